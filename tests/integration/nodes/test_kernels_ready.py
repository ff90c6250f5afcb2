"""No kernel is compiled or read from disk for a request: a node's start has had them all. Every kind of request that
means other work for kernels, and as many at once as take several threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.machine.patience import HANG_GUARD_S

LONG = "It was a bright cold day in April, and the clocks were striking thirteen. " * 8
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8, "seed": 5},
    "filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {"5": 2.0}},
    "bad words": {"bad_words": ["the sea"]},
    "allowed": {"allowed_token_ids": [5, 6, 7]},
    "stop": {"stop": ["sea"], "min_tokens": 2},
    "log-probabilities": {"logprobs": 3},
    "scores": {"echo": True, "logprobs": 2},
    "several": {"n": 3, "temperature": 0.9},
    "long": {"prompt": LONG},
    "again": {"prompt": LONG},
    "grammar": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
}
NUM_AT_ONCE = 8  # outputs of so many, of a real vocabulary, are sampled by several threads
TREE = ("--spec", "eagle", "--spec-width", "6", "--spec-topk", "2", "--spec-steps", "3")
CLUSTERS = {
    "one node": ("smollm2", "--prefill", "0"),
    "pair, tree of drafts": ("smollm2", *TREE),
    "bfloat16": ("smollm2", "--prefill", "0", "--dtype", "bfloat16"),
    "integers, pair, mtp and copies": ("hashlm", "--spec", "mtp", "--spec-width", "3", "--spec-copies", "2"),
}


LONG = ("bfloat16",)


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CLUSTERS], scope="module"
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    model, *flags = CLUSTERS[request.param]
    with baton_up(tmp_path_factory.mktemp("up") / "up.log", "--model", model, *flags) as cluster:
        yield cluster, model


def ask(cluster: Cluster, model: str, fields: dict[str, Any]) -> None:
    body = {"model": model, "prompt": "Tell me of the sea", "max_tokens": 6, **fields}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG_GUARD_S)
    assert answer.status_code == 200 or "grammar" in answer.text, answer.text


def test_no_request_waits_for_a_kernel(served: tuple[Cluster, str]) -> None:
    cluster, model = served
    for fields in KINDS.values():
        ask(cluster, model, fields)
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        at_once = [
            threads.submit(ask, cluster, model, {"prompt": f"{n} of them", "max_tokens": 16, "temperature": n % 2})
            for n in range(2 * NUM_AT_ONCE)
        ]
    for one in at_once:
        one.result()
    said = cluster.log_path.read_text()
    assert "kernels are ready" in said
    assert [line for line in said.splitlines() if "waited for a kernel" in line] == []
