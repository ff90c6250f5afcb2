"""MTP layers of published families, served by real processes: answers through HTTP are those of the library's own
`generate`, and their drafts are accepted after a hand-off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import baton_up
from tests.support.library_families import PROMPTS, generate, write_tokenizer
from tests.support.mtp_folders import save_with_mtp
from tests.support.patience import HANG_GUARD_S

NUM_TOKENS = 40
LEAST_PER_VERIFY = 1.8
FLAGS = (
    *("--dtype", "float32", "--page-size", "8", "--chunk-size", "16", "--transport", "zmq"),
    *("--spec", "mtp", "--spec-copies", "0", "--no-spec-adaptive"),
)


def ask(url: str, **fields: Any) -> list[list[int]]:
    body = {
        "model": "tiny",
        "prompt": [list(prompt) for prompt in PROMPTS],
        "max_tokens": NUM_TOKENS,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body | fields, timeout=HANG_GUARD_S)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


@pytest.mark.parametrize("family", ["deepseek_v3", "mellum", "step3p7"])
def test_answers_with_mtp_are_the_library_s(family: str, tmp_path: Path) -> None:
    own = save_with_mtp(family, tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    said = [generate(own.network, prompt, NUM_TOKENS) for prompt in PROMPTS]
    with baton_up(tmp_path / "up.log", "--model", str(tmp_path / "tiny"), *FLAGS) as cluster:
        for _ in range(2):  # the second time, prompts are cached
            for one, stream in zip(said, ask(cluster.url, temperature=0), strict=True):
                print(family, "tie at", one.tie(stream))
        seeded = {"temperature": 0.8, "seed": 5}
        assert ask(cluster.url, **seeded) == ask(cluster.url, **seeded)
        cluster.eventually(cluster.at_rest, "all pages and rows are back")
        metrics = cluster.metrics()

    def total(name: str) -> float:
        return sum(value for (found, _), value in metrics.items() if found == name)

    per_verify = 1 + total("baton_spec_accepted_tokens_total") / total("baton_spec_steps_total")
    print(family, f"{per_verify:.2f} tokens per verify,", total("baton_handoff_bytes_total"), "bytes handed over")
    assert per_verify >= LEAST_PER_VERIFY
    assert total("baton_handoff_bytes_total") > 0
    assert total("baton_spec_rows_without_draft_state_total") == 0
