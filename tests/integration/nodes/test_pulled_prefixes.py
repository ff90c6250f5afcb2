"""Processes that pull prefixes from each other, on HashLM with a device that sleeps: computing takes real time."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.sse_client import stream_completion
from shared.core.sampling_params import SamplingParams
from tests.support.clusters.cluster import ROOT, Cluster, baton_up
from tests.support.clusters.metrics_page import NODE, total
from tests.support.cores.core_rig import Job
from tests.support.web.mixed_clients import EOS

TOKEN_S = 0.003
PREFIX_TOKENS = 320
FLAGS = ["--model", "hashlm", "--prefill", "2", "--policy", "round_robin", "--chunk-size", "32"]
FLAGS += ("--heartbeat-s", "0.1", "--silence-s", "3", "--local-prefill-tokens", "0", "--pull-prefixes", "on")
PULLS, PAGES, STEPS = "baton_prefix_pulls_total", "baton_pulled_prefix_pages_total", "baton_prompt_steps_total"


@pytest.fixture(autouse=True)
def slow_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/support/sleepy"))
    monkeypatch.setenv("SLEEPY_STEP_S", "0.002")
    monkeypatch.setenv("SLEEPY_TOKEN_S", str(TOKEN_S))


@pytest.fixture(params=["shm", "zmq"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with baton_up(tmp_path / "up.log", *FLAGS, "--transport", request.param) as running:
        yield running


def ask(cluster: Cluster, prefix: int, number: int) -> None:
    """Stream an answer to a prompt that begins as others of this prefix; it must be the reference's."""
    prompt = tuple((7 * i + prefix * i * i) % 90 for i in range(PREFIX_TOKENS))
    prompt += tuple((number * 11 + i) % 90 for i in range(20))
    got: list[int] = []

    def keep(event: dict[str, Any]) -> int:
        ids = [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
        got.extend(ids)
        return len(ids)

    body = {"model": "hashlm", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    stream = asyncio.run(stream_completion(cluster.port, body, keep))
    assert not stream.error
    expected = Job(number, prompt, SamplingParams(max_tokens=8, temperature=0.0), 1).expected()
    assert got == expected[: len(got)] and (len(got) == 8 or got[-1] == EOS)


def the_busy_one(cluster: Cluster) -> int:
    """Return the process of the prefill node that has computed most."""
    steps = {labels: value for (known, labels), value in cluster.metrics().items() if known == STEPS}
    labels = max((labels for labels in steps if "prefill" in labels), key=lambda labels: steps[labels])
    node = NODE.search(labels)
    assert node is not None
    processes = psutil.Process(cluster.process.pid).children()
    return next(int(process.pid) for process in processes if node[1] in " ".join(process.cmdline()))


def warm(cluster: Cluster) -> None:
    """One of the nodes has the first prefix and has measured what it costs."""
    ask(cluster, 1, 0)
    cluster.eventually(lambda: total(cluster.metrics(), STEPS) >= 9, "a heartbeat told of the prompt")


def test_the_second_node_pulls_what_the_first_has_computed(cluster: Cluster) -> None:
    warm(cluster)
    ask(cluster, 1, 1)
    cluster.eventually(lambda: total(cluster.metrics(), PULLS, 'outcome="pulled"') == 1, "the prefix was pulled")
    assert total(cluster.metrics(), PAGES) == PREFIX_TOKENS // 16
    cluster.eventually(cluster.at_rest, "all pages and rows are back")


@pytest.mark.parametrize("is_killed", [pytest.param(False, marks=pytest.mark.long), True], ids=["frozen", "killed"])
def test_a_source_that_goes_during_a_pull_costs_no_stream(cluster: Cluster, is_killed: bool) -> None:
    warm(cluster)
    source = the_busy_one(cluster)
    os.kill(source, signal.SIGSTOP)
    end = threading.Timer(0.4, os.kill, (source, signal.SIGKILL if is_killed else signal.SIGWINCH))
    end.start()
    ask(cluster, 1, 1)
    end.join()
    if not is_killed:
        os.kill(source, signal.SIGCONT)
    cluster.eventually(
        lambda: sum(total(cluster.metrics(), PULLS, f'outcome="{end}"') for end in ("late", "lost")) == 1,
        "the end of it",
    )
    assert not total(cluster.metrics(), PAGES)
    cluster.eventually(cluster.at_rest, "all pages and rows are back")
