"""Models that the library transformers runs, served by real processes: answers through HTTP are its own `generate`'s,
however pages travel, and also after a node died."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster, baton_up
from tests.support.library_families import FAMILIES, NUM_TOKENS, PROMPTS, Said, generate, save, write_tokenizer
from tests.support.patience import HANG_GUARD_S, SILENCE_S
from tests.support.struck_stream import struck_stream

WAYS = {
    "gpt_oss": ("--transport", "shm", "--layer-parts", "3", "--decode-tp", "2", "--offload-bytes", "1MiB"),
    "deepseek_v3": (
        *("--transport", "zmq", "--spec", "ngram", "--layer-parts", "3", "--tp", "2", "--decode-tp", "1"),
        *("--offload-bytes", "1MiB"),
    ),
    "gemma4_text": ("--transport", "gloo", "--trust-network", "--dp", "2"),
}
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


def num_moved_bytes(cluster: Cluster) -> float:
    return sum(value for (name, _), value in cluster.metrics().items() if name == "baton_handoff_bytes_total")


def test_greedy_answers_are_the_library_s(served: Served) -> None:
    """All at once; then again, with prompts that are cached."""
    for _ in range(2):
        answer = ask(served.cluster, [list(prompt) for prompt in PROMPTS], temperature=0, logprobs=2)
        for choice, said in zip(answer["choices"], served.said, strict=True):
            said.tie(choice["token_ids"])
    served.cluster.eventually(served.cluster.at_rest, "all pages and rows are back")
    assert num_moved_bytes(served.cluster) > 0


def test_latents_are_what_travels(served: Served) -> None:
    """Of 40 new tokens: 32 + 16 numbers in each of four layers, not 4 heads of 32 + 24."""
    if served.family != "deepseek_v3":
        pytest.skip("its layers keep keys and values")
    before, need = num_moved_bytes(served.cluster), 40 * 4 * (32 + 16) * 4
    ask(served.cluster, list(range(100, 140)), temperature=0)
    served.cluster.eventually(lambda: num_moved_bytes(served.cluster) >= before + need, "all parts are counted")
    assert num_moved_bytes(served.cluster) == before + need


def test_an_answer_goes_on_where_its_node_died(tmp_path: Path) -> None:
    save("gemma2", tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    flags = ("--model", str(tmp_path / "tiny"), "--dtype", "float32", "--silence-s", str(SILENCE_S))
    fields = {"temperature": 0.9, "seed": 5, "max_tokens": 300, "ignore_eos": True}
    with baton_up(tmp_path / "up.log", *flags, "--node-silence-s", str(SILENCE_S)) as cluster:
        (unbroken,) = ask(cluster, list(PROMPTS[0]), **fields)["choices"]
        broken = struck_stream(cluster, {"model": "tiny", "prompt": list(PROMPTS[0])} | fields, strike_at=30)
        assert cluster.metrics()["baton_resumed_total", ""] >= 1
    assert broken == unbroken["token_ids"] and len(broken) == 300
