"""The bench of page groups: whose turn it is, and what it makes of /metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from benchmarks.cluster import ROOT
from benchmarks.layouts import page_groups as bench
from tests.support.clusters.metrics_page import Metrics


def test_the_checkouts_take_turns_and_medians_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns, folders = list[str](), list[dict[str, object]]()

    @contextmanager
    def cluster(folder: Path, transport: str, code: Path) -> Iterator[str]:
        assert transport == "zmq"
        yield str(code)

    def serve(url: str, body: dict[str, list[int]]) -> bench.HandedOver:
        assert len(body["prompt"]) == 2048 - bench.ANSWER
        turns.append(url)
        return bench.HandedOver("said", 1984.0 * len(turns), float(len(turns)))

    monkeypatch.setattr(bench, "cluster", cluster)
    monkeypatch.setattr(bench, "serve", serve)
    monkeypatch.setattr(bench, "save", lambda family, folder, **sizes: folders.append(sizes))
    monkeypatch.setattr(bench, "write_tokenizer", lambda folder: None)
    assert bench.main([str(tmp_path), "--families", "deepseek_v3", "--rounds", "3", "--transport", "zmq"]) == 0
    assert turns == [str(tmp_path), str(ROOT)] * 4
    assert [sizes["max_position_embeddings"] for sizes in folders] == [2048]
    found = json.loads(capsys.readouterr().out)["deepseek_v3"]
    before, now = found["before"], found["now"]
    assert found["equal_answers"] and before["handoff_s"] == [1, 3, 5, 7] and now["handoff_s"] == [2, 4, 6, 8]
    assert (before["handoff_median_s"], before["bytes_per_token"], now["handoff_median_s"]) == (5, 7, 6)


@pytest.mark.parametrize(
    ("num_tokens", "num_handoffs"), [(bench.ANSWER, 1), (1, 1), (bench.ANSWER, 0), (bench.ANSWER, 2)]
)
def test_one_hand_off_is_measured(num_tokens: int, num_handoffs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the cluster's first one."""
    counts = iter([1, 1 + num_handoffs])

    def read_metrics(url: str) -> Metrics:
        num = next(counts)
        told = {"bytes_total": 700 * num, "seconds_sum": 0.25 * num, "seconds_count": num}
        return {(f"baton_handoff_{name}", 'node="d"'): float(value) for name, value in told.items()}

    def post(*_: object, **__: object) -> httpx.Response:
        answer = {"usage": {"completion_tokens": num_tokens}, "choices": [{"text": "said"}]}
        return httpx.Response(200, json=answer, request=httpx.Request("POST", "http://127.0.0.1"))

    monkeypatch.setattr(bench, "read_metrics", read_metrics)
    monkeypatch.setattr(bench.httpx, "post", post)
    monkeypatch.setattr(bench, "NEWS_S", 0.0)
    if num_tokens == bench.ANSWER and num_handoffs == 1:
        assert bench.serve("", {}) == bench.HandedOver("said", 700, 0.25)
    else:
        with pytest.raises(RuntimeError, match="hand-offs"):
            bench.serve("", {})
