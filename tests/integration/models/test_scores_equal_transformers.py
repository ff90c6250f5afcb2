"""How likely a prompt is, asked over HTTP as lm-eval asks it, equals what transformers says of the same weights."""

from __future__ import annotations

import random
from collections.abc import Iterator

import httpx
import pytest
import torch
import transformers

from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.transformers_model import default_model_in_transformers

SLACK = 1e-3
LENGTHS = (2, 17, 64, 300, 700)  # one token more than nothing, within a page, several chunks
CHUNK = 128


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("up") / "up.log"
    with baton_up(log, "--dtype", "float32", "--chunk-size", str(CHUNK), "--max-context", "1024") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def network() -> transformers.PreTrainedModel:
    return default_model_in_transformers()


def prompt_of(length: int) -> list[int]:
    """All of them begin alike, so that the prefix cache has something to spare."""
    return random.Random(0).choices(range(1000, 40000), k=700)[:length]


def reference(network: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """(len(ids) - 1, vocabulary) log-probabilities of what may come next."""
    with torch.inference_mode():
        return torch.log_softmax(network(torch.tensor([ids])).logits[0, :-1].double(), dim=-1)


@pytest.mark.timeout(1800)
def test_log_likelihoods(cluster: Cluster, network: transformers.PreTrainedModel) -> None:
    with httpx.Client(base_url=cluster.url, timeout=HANG_GUARD_S) as http:
        for length in reversed(LENGTHS):
            ids = prompt_of(length)
            wanted = reference(network, ids)
            asked = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 2, "return_tokens_as_token_ids": True}
            for more in ({}, {"max_tokens": 1, "temperature": 0}):
                answer = http.post("/v1/completions", json=asked | more).raise_for_status().json()
                logprobs = answer["choices"][0]["logprobs"]
                own = torch.tensor(logprobs["token_logprobs"][1:length]).double()
                expected = wanted.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
                assert logprobs["tokens"][:length] == [f"token_id:{i}" for i in ids]
                assert logprobs["token_logprobs"][0] is None
                assert (own - expected).abs().max() < SLACK
                best = torch.tensor([max(top.values()) for top in logprobs["top_logprobs"][1:length]]).double()
                assert (best - wanted.amax(-1)).abs().max() < SLACK
                assert (
                    answer["usage"]["completion_tokens"]
                    == len(logprobs["tokens"]) - length
                    == more.get("max_tokens", 0)
                )
