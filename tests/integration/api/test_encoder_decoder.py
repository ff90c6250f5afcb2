"""T5 served by real processes: answers through HTTP are transformers', handed over or not, also after a node died."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.clusters.metrics_page import total
from tests.support.clusters.struck_stream import struck_stream
from tests.support.machine.patience import HANG_GUARD_S, SILENCE_S
from tests.support.models.tiny_t5 import EOS, greedy, text_of, write_tiny_t5

TEXTS = ("the quick baton runs to the sea", "Translate: hello, moon!", "", "a tide is far and slow. " * 12, "moon")
NUM_TOKENS = 40
WAYS = {
    "handed over": ("--local-prefill-tokens", "0", "--page-size", "4", "--chunk-size", "16"),
    "as messages, with drafts": ("--transport", "zmq", "--spec", "ngram", "--layer-parts", "2"),
    "together": ("--prefill", "0"),
}
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny-t5"
    write_tiny_t5(path)
    return path


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[int], list[int]]]:
    """(input, answer) of each text, in ids."""
    path = tmp_path_factory.mktemp("again")
    network = write_tiny_t5(path)
    encode = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).encode
    inputs = [encode(text).ids for text in TEXTS]
    return [(ids, greedy(network, ids, NUM_TOKENS)) for ids in inputs]


def flags(folder: Path) -> tuple[str, ...]:
    return ("--model", str(folder), "--dtype", "float32", "--heartbeat-s", "0.1")


@pytest.fixture(scope="module", params=WAYS)
def cluster(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("up") / "up.log"
    with baton_up(log, *flags(folder), *WAYS[request.param]) as cluster:
        yield cluster


def ask(cluster: Cluster, **fields: Any) -> Answer:
    body = {"model": "tiny-t5", "return_token_ids": True, "max_tokens": NUM_TOKENS} | fields
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG_GUARD_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids_of(answer: Answer) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def test_greedy_answers_are_transformers(
    cluster: Cluster, folder: Path, expected: list[tuple[list[int], list[int]]]
) -> None:
    answer = ask(cluster, prompt=list(TEXTS), temperature=0)
    assert ids_of(answer) == [said for _, said in expected]
    for choice, (ids, said) in zip(answer["choices"], expected, strict=True):
        assert choice["text"] == text_of(folder, said)
        assert choice["prompt_token_ids"] == ids
        assert choice["finish_reason"] == ("stop" if said[-1] == EOS else "length")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(len(ids) for ids, _ in expected), "</s> counts, the start token does not"
    assert usage["completion_tokens"] == sum(len(said) for _, said in expected)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    cluster.eventually(cluster.at_rest, "all pages and rows are back")
    assert (total(cluster.metrics(), "baton_handoff_bytes_total") > 0) == ("--prefill" not in cluster.process.args)


def test_several_answers_are_those_of_their_seeds(cluster: Cluster) -> None:
    """The first of n has the request's own seed; all are the same wherever they ran."""
    fields = {"prompt": TEXTS[0], "seed": 3, "temperature": 0.9, "ignore_eos": True}
    alone, three = ids_of(ask(cluster, **fields)), ids_of(ask(cluster, n=3, **fields))
    assert three[:1] == alone and len(set(map(tuple, three))) == 3
    assert three == ids_of(ask(cluster, n=3, **fields))


def test_equal_beginnings_of_inputs_share_nothing(
    cluster: Cluster, expected: list[tuple[list[int], list[int]]]
) -> None:
    """The long input, and all but its last word: its cached pages would be another input's."""
    ids, said = expected[3]
    assert ids_of(ask(cluster, prompt=ids, temperature=0)) == [said]
    other = ask(cluster, prompt=[*ids[:-2], EOS], temperature=0)
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert ids_of(ask(cluster, prompt=ids, temperature=0)) == [said]


def test_stops_echo_and_limits(cluster: Cluster, folder: Path, expected: list[tuple[list[int], list[int]]]) -> None:
    whole = text_of(folder, expected[0][1])
    stop = whole[8:11]
    cut = ask(cluster, prompt=TEXTS[0], temperature=0, stop=stop, echo=True)["choices"][0]
    assert cut["text"] == TEXTS[0] + whole[: whole.index(stop)] and cut["finish_reason"] == "stop"
    short = ask(cluster, prompt=TEXTS[0], temperature=0, max_tokens=5)
    assert ids_of(short) == [expected[0][1][:5]] and short["choices"][0]["finish_reason"] == "length"
    body = {"model": "tiny-t5", "prompt": [7] * 1000, "max_tokens": 24}
    lowered = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG_GUARD_S)
    assert lowered.status_code == 200 and lowered.headers["x-baton-lowered"] == "max_tokens;from=24;to=23"
    assert len(ids_of(ask(cluster, prompt=[7] * 1000, max_tokens=23, ignore_eos=True))[0]) == 23


def test_json_is_asked_for_but_not_enforced(cluster: Cluster) -> None:
    """A model with an encoder follows no grammar. Who relies on one gets the reason."""
    body = {"model": "tiny-t5", "prompt": TEXTS[0], "max_tokens": 5, "response_format": {"type": "json_object"}}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG_GUARD_S)
    assert answer.status_code == 200 and answer.headers["x-baton-unenforced"] == "json;valid=no"
    body |= {"response_format": None, "guided_regex": "a+"}
    refused = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG_GUARD_S)
    assert refused.status_code == 400 and "models with an encoder" in refused.json()["error"]["message"]


def test_chat_is_refused(cluster: Cluster) -> None:
    body = {"model": "tiny-t5", "messages": [{"role": "user", "content": "hi"}]}
    refused = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=HANG_GUARD_S)
    assert refused.status_code == 400
    assert "no chat template" in refused.json()["error"]["message"] and refused.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_an_answer_goes_on_where_its_node_died(
    folder: Path, tmp_path: Path, temperature: float, expected: list[tuple[list[int], list[int]]]
) -> None:
    """What was said comes behind the start token again, and not into the encoder."""
    more = ("--node-silence-s", str(SILENCE_S), "--silence-s", str(SILENCE_S))
    fields = {"prompt": TEXTS[3], "temperature": temperature, "seed": 5, "max_tokens": 400, "ignore_eos": True}
    with baton_up(tmp_path / "up.log", *flags(folder), *more) as cluster:
        unbroken = ids_of(ask(cluster, **fields))[0]
        broken = struck_stream(cluster, {"model": "tiny-t5"} | fields, strike_at=30)
        assert cluster.metrics()["baton_resumed_total", ""] >= 1
    assert broken == unbroken and len(broken) == 400
    if not temperature:
        assert broken[:NUM_TOKENS] == expected[3][1]
