"""MTP layers of published families, served by real processes: answers through HTTP are those of the library's own
`generate`, and their drafts are accepted after a hand-off."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clusters.cluster import baton_up
from tests.support.clusters.metrics_page import total
from tests.support.clusters.struck_stream import struck_stream
from tests.support.machine.patience import HANG_GUARD_S, SILENCE_S
from tests.support.models.library_families import PROMPTS, generate, write_tokenizer
from tests.support.models.mtp_folders import save_with_mtp

NUM_TOKENS = 40
LEAST_PER_VERIFY = 1.8
PLAIN = ("--dtype", "float32", "--page-size", "8", "--chunk-size", "16", "--transport", "zmq")
FLAGS = (*PLAIN, "--spec", "mtp", "--spec-copies", "0", "--no-spec-adaptive")
SEEDED = {"temperature": 0.8, "seed": 5}
PAIRS = "([a-z][A-Z0-9]){5,9}[.]"


def choices(url: str, **fields: Any) -> list[dict[str, Any]]:
    body = {
        "model": "tiny",
        "prompt": [list(prompt) for prompt in PROMPTS],
        "max_tokens": NUM_TOKENS,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body | fields, timeout=HANG_GUARD_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def ask(url: str, **fields: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in choices(url, ignore_eos=True, **fields)]


@pytest.mark.parametrize("family", ["deepseek_v3", "exaone_moe", "glm4_moe", "mellum", "step3p7"])
def test_answers_with_mtp_are_the_library_s(family: str, tmp_path: Path) -> None:
    own = save_with_mtp(family, tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    said = [generate(own.network, prompt, NUM_TOKENS) for prompt in PROMPTS]
    with baton_up(tmp_path / "up.log", "--model", str(tmp_path / "tiny"), *FLAGS) as cluster:
        for _ in range(2):  # the second time, prompts are cached
            for one, stream in zip(said, ask(cluster.url, temperature=0), strict=True):
                print(family, "tie at", one.tie(stream))
        assert ask(cluster.url, **SEEDED) == ask(cluster.url, **SEEDED)
        cluster.eventually(cluster.at_rest, "all pages and rows are back")
        metrics = cluster.metrics()
    per_verify = 1 + total(metrics, "baton_spec_accepted_tokens_total") / total(metrics, "baton_spec_steps_total")
    moved = total(metrics, "baton_handoff_bytes_total")
    print(family, f"{per_verify:.2f} tokens per verify,", moved, "bytes handed over")
    assert per_verify >= LEAST_PER_VERIFY
    assert moved > 0
    assert total(metrics, "baton_spec_rows_without_draft_state_total") == 0


def test_several_heads_draft_for_a_grammar(tmp_path: Path) -> None:
    """Answers are those without drafts, and follow the expression; some drafts are accepted."""
    save_with_mtp("step3p7", tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    said = []
    for number, spec in enumerate((FLAGS, PLAIN)):
        with baton_up(tmp_path / f"{number}.log", "--model", str(tmp_path / "tiny"), *spec) as cluster:
            both = [choices(cluster.url, guided_regex=PAIRS, **draw) for draw in ({"temperature": 0}, SEEDED)]
            said.append([[choice["token_ids"] for choice in drawn] for drawn in both])
            assert all(re.fullmatch(PAIRS, choice["text"]) for drawn in both for choice in drawn)
            cluster.eventually(cluster.at_rest, "all pages and rows are back")
            metrics = cluster.metrics()
        assert total(metrics, "baton_handoffs_total") > 0
        assert (total(metrics, "baton_spec_accepted_tokens_total") > 0) == (spec is FLAGS)
    assert said[0] == said[1]


def test_several_heads_go_on_where_a_node_died(tmp_path: Path) -> None:
    save_with_mtp("step3p7", tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    one = {"prompt": list(PROMPTS[0]), "max_tokens": 300, "ignore_eos": True} | SEEDED
    flags = ("--model", str(tmp_path / "tiny"), *FLAGS, "--silence-s", str(SILENCE_S))
    with baton_up(tmp_path / "up.log", *flags, "--node-silence-s", str(SILENCE_S)) as cluster:
        (unbroken,) = choices(cluster.url, **one)
        broken = struck_stream(cluster, {"model": "tiny"} | one, strike_at=60)
        metrics = cluster.metrics()
    assert total(metrics, "baton_resumed_total") >= 1 and total(metrics, "baton_spec_accepted_tokens_total") > 0
    assert broken == unbroken["token_ids"] and len(broken) == 300
