"""Processes that pull prefixes of a model with page groups: answers are the library's own, and of windowed layers only
the last window's pages travel."""

from __future__ import annotations

import random
from pathlib import Path

import httpx

from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.clusters.metrics_page import total
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.library_families import VOCAB, generate, save, write_tokenizer

PREFIX_TOKENS, PAGE, NUM_TOKENS, MOST_PREFIXES = 320, 8, 6, 20
FLAGS = (
    *("--dtype", "float32", "--page-size", str(PAGE), "--chunk-size", "16", "--prefill", "2", "--heartbeat-s", "0.1"),
    *("--pull-prefixes", "on", "--policy", "round_robin", "--local-prefill-tokens", "0"),
)
STEPS = "baton_prompt_steps_total"
PULLED = PREFIX_TOKENS // PAGE + 2  # gpt_oss has a group without a window, and one whose window is two pages


def ask(cluster: Cluster, prompt: list[int]) -> list[int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "return_token_ids": True, "ignore_eos": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body | {"temperature": 0}, timeout=HANG_GUARD_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_a_prefix_of_two_page_groups_is_pulled(tmp_path: Path) -> None:
    """A pull that comes late is given up, so several prompts are tried."""
    network = save("gpt_oss", tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    rng = random.Random(5)
    with baton_up(tmp_path / "up.log", "--model", str(tmp_path / "tiny"), *FLAGS) as cluster:
        for _ in range(MOST_PREFIXES):
            prefix = [rng.randrange(3, VOCAB) for _ in range(PREFIX_TOKENS)]
            before = total(cluster.metrics(), STEPS)
            for number in range(2):
                prompt = [*prefix, *(rng.randrange(3, VOCAB) for _ in range(10 + number))]
                generate(network, prompt, NUM_TOKENS).tie(ask(cluster, prompt))
                steps = before + PREFIX_TOKENS // 16
                cluster.eventually(lambda least=steps: total(cluster.metrics(), STEPS) >= least, "news")
            num_pulls = total(cluster.metrics(), "baton_prefix_pulls_total", 'outcome="pulled"')
            if num_pulls:
                break
        assert num_pulls, "no prefix was pulled"
        assert total(cluster.metrics(), "baton_pulled_prefix_pages_total") == PULLED * num_pulls
        cluster.eventually(cluster.at_rest, "all pages and rows are back")
