"""Models that the library transformers runs, served by real processes: answers through HTTP are its own `generate`'s,
however pages travel, with drafts, where memory is short, and after a node died."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.kv.layout import page_bytes, page_windows
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.clusters.metrics_page import total
from tests.support.clusters.struck_stream import struck_stream
from tests.support.machine.patience import HANG_GUARD_S, SILENCE_S
from tests.support.models.library_families import (
    BOUND,
    FAMILIES,
    NUM_TOKENS,
    PROMPTS,
    TWO_FACTORS,
    VOCAB,
    Said,
    generate,
    save,
    write_tokenizer,
)
from tests.support.models.library_wrappers import save_wrapper

WAYS = {
    "gpt_oss": ("--transport", "shm", "--layer-parts", "3", "--decode-tp", "2", "--offload-bytes", "1MiB"),
    "deepseek_v3": (
        *("--transport", "zmq", "--spec", "ngram", "--layer-parts", "3", "--tp", "2", "--decode-tp", "1"),
        *("--offload-bytes", "1MiB"),
    ),
    "deepseek_v32": ("--transport", "shm", "--spec", "ngram", "--layer-parts", "3", "--offload-bytes", "1MiB"),
    "gemma4_text": ("--transport", "gloo", "--trust-network", "--dp", "2"),
}
NAMED = (
    *("cohere2", "deepseek_v2", "deepseek_v3", "exaone4", "gemma2", "gemma3_text", "gemma4_text", "glm4_moe"),
    *("glm_moe_dsa", "gpt_oss", "ministral", "ministral3", "olmo3"),
)
SPACES = ("197", "198", "201")  # ids that a random model might write up to its limit
LONG, LONGEST = 150, 216  # tokens of an answer, and of a row
TIGHT = (
    *("--dtype", "float32", "--page-size", "8", "--chunk-size", "16", "--max-context", str(LONGEST)),
    *("--growth-reserve", "0", "--spec", "ngram", "--no-spec-adaptive", "--node-silence-s", str(SILENCE_S)),
    *("--local-prefill-tokens", "0"),
)
ROOMY = (
    "gemma3_text",
    "ministral",
)  # where a row fits, ten do: tests/unit/shared/model/library/test_library_families.py retracts theirs
LATENTS = {"deepseek_v3": 32 + 16, "deepseek_v32": 32 + 16 + 32}  # numbers of a token in a layer
MOVED, OUTGROWN = "baton_handoff_bytes_total", "baton_outgrown_contexts_total"
COUNTED = ("handoffs", "retractions", "spec_accepted_tokens")
SEED, NUM_DRAWN = 1, 6
SETTINGS = {"--transport": ("shm", "zmq"), "--spec": ("none", "ngram"), "--layer-parts": ("1", "2", "3")}


def draw(seed: int) -> dict[str, tuple[str, ...]]:
    """Return NUM_DRAWN other families with settings that any family takes."""
    rng = random.Random(seed)
    families = rng.sample(sorted(FAMILIES.keys() - WAYS.keys()), NUM_DRAWN)
    return {
        family: tuple(word for flag, values in SETTINGS.items() for word in (flag, rng.choice(values)))
        for family in families
    }


ALL_WAYS = WAYS | draw(SEED)


@dataclass
class Served:
    family: str
    cluster: Cluster
    said: list[Said]


@pytest.fixture(scope="module", params=ALL_WAYS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    network = save(request.param, folder)
    write_tokenizer(folder)
    flags = ("--model", str(folder), "--dtype", "float32", "--page-size", "8", "--chunk-size", "16")
    with baton_up(tmp_path_factory.mktemp("up") / "up.log", *flags, *ALL_WAYS[request.param]) as cluster:
        yield Served(request.param, cluster, [generate(network, prompt, NUM_TOKENS) for prompt in PROMPTS])


def ask(cluster: Cluster, prompt: object, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "return_token_ids": True, "ignore_eos": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body | fields, timeout=HANG_GUARD_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_greedy_answers_are_the_library_s(served: Served) -> None:
    """All at once; then again, with prompts that are cached."""
    for _ in range(2):
        answer = ask(served.cluster, [list(prompt) for prompt in PROMPTS], temperature=0, logprobs=2)
        for choice, said in zip(answer["choices"], served.said, strict=True):
            said.tie(choice["token_ids"])
    served.cluster.eventually(served.cluster.at_rest, "all pages and rows are back")
    served.cluster.eventually(lambda: total(served.cluster.metrics(), MOVED) > 0, "a heartbeat told of the hand-offs")


def test_latents_are_what_travels(served: Served) -> None:
    """Of 40 new tokens: 32 + 16 numbers in each of four layers, not 4 heads of 32 + 24; and 32 of an indexer's key."""
    if served.family not in LATENTS:
        pytest.skip("its layers keep keys and values")
    before, need = total(served.cluster.metrics(), MOVED), 40 * 4 * LATENTS[served.family] * 4
    ask(served.cluster, list(range(100, 140)), temperature=0)
    served.cluster.eventually(lambda: total(served.cluster.metrics(), MOVED) >= before + need, "all parts are counted")
    assert total(served.cluster.metrics(), MOVED) == before + need


def test_models_that_also_see_follow_tools_and_schemas(tmp_path: Path) -> None:
    """Their vocabulary stands in a part of config.json, and is padded: no node once followed a grammar for them."""
    folder = tmp_path / "tiny"
    save_wrapper("gemma3", folder, vocab_size=VOCAB + 20)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    schema = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    asked = {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "logit_bias": dict.fromkeys(SPACES, -99),
    }
    with baton_up(tmp_path / "up.log", "--model", str(folder), "--page-size", "8") as cluster:

        def ask_chat(**fields: Any) -> dict[str, Any]:
            answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=asked | fields, timeout=HANG_GUARD_S)
            assert answer.status_code == 200 and "x-baton-unenforced" not in answer.headers, answer.text
            choice: dict[str, Any] = answer.json()["choices"][0]
            return choice

        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        assert json.loads(ask_chat(response_format=form)["message"]["content"])["a"] in ("b", "c")
        assert ask_chat(response_format={"type": "json_object"}, max_tokens=20)["message"]["content"].startswith("{")
        assert ask_chat(tools=tools, max_tokens=20)["finish_reason"] in ("stop", "length", "tool_calls")
        (call,) = ask_chat(tools=tools, tool_choice="required", parallel_tool_calls=False)["message"]["tool_calls"]
        assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"])["a"] in ("b", "c")


@pytest.mark.parametrize("family", NAMED)
def test_drafts_and_retractions_and_a_death_change_no_answer(family: str, tmp_path: Path) -> None:
    """The pool has room for one row of full length, or a few more where windows leave pages behind."""
    network = save(family, tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    said = [generate(network, prompt, LONG) for prompt in PROMPTS]
    planes = load_model(str(tmp_path / "tiny"), LoadOptions("float32")).kv_planes(8)
    num_pages = 1 + (LONGEST // 8 + 2) * len(page_windows(planes))
    flags = ("--model", str(tmp_path / "tiny"), *TIGHT, "--kv-bytes", str(num_pages * page_bytes(planes)))
    asked = {"temperature": 0, "max_tokens": LONG}
    with baton_up(tmp_path / "up.log", *flags, "--silence-s", str(SILENCE_S)) as cluster:
        for choice, one in zip(ask(cluster, [*PROMPTS] * 2, **asked)["choices"], said * 2, strict=True):
            print(family, "tie at", one.tie(choice["token_ids"]))
        cluster.eventually(cluster.at_rest, "all pages and rows are back")
        seen = {name: total(cluster.metrics(), f"baton_{name}_total") for name in COUNTED}
        print(family, seen)
        assert all(seen[name] > 0 for name in COUNTED if name != "retractions" or family not in ROOMY)
        struck = {"model": "tiny", "prompt": PROMPTS[0], "ignore_eos": True}
        said[0].tie(struck_stream(cluster, struck | asked, strike_at=30))
        assert total(cluster.metrics(), "baton_resumed_total") >= 1


def test_longer_texts_have_their_own_factors(tmp_path: Path) -> None:
    """Answers that end below the bound, cross it, or begin beyond it; then again, cached; and one after a death."""
    network = save("phi3", tmp_path / "tiny", **TWO_FACTORS["phi3"])
    write_tokenizer(tmp_path / "tiny")
    stem = [number % (VOCAB - 3) + 3 for number in range(7, 1000, 11)]
    texts = [stem[:length] for length in (20, BOUND - 9, BOUND, BOUND + 1, BOUND + 20)]
    said = [generate(network, text, 40) for text in texts]
    flags = ("--model", str(tmp_path / "tiny"), *TIGHT, "--silence-s", str(SILENCE_S))
    with baton_up(tmp_path / "up.log", *flags) as cluster:
        for _ in range(2):
            for choice, one in zip(ask(cluster, texts, temperature=0, max_tokens=40)["choices"], said, strict=True):
                print("tie at", one.tie(choice["token_ids"]))
        cluster.eventually(lambda: total(cluster.metrics(), OUTGROWN) == 2 * 2, "a heartbeat told of the outgrown")
        struck = {"model": "tiny", "prompt": texts[1], "ignore_eos": True, "temperature": 0, "max_tokens": 40}
        said[1].tie(struck_stream(cluster, struck, strike_at=20))
        assert total(cluster.metrics(), "baton_resumed_total") >= 1
