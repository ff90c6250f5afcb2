"""300 ms at one of seven places of a real cluster: the spans that a collector got name the place."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.core import extras
from tests.support.clusters.chaos_cluster import Endpoint
from tests.support.clusters.procs import NodeProcess
from tests.support.clusters.router_process import RouterProcess
from tests.support.clusters.slow_places import SHOWN, WAIT_S
from tests.support.machine.patience import HANG_GUARD_S

pytestmark = pytest.mark.skipif(not extras.is_here("otel"), reason="the extra otel is not installed")
PROGRAM = Path(__file__).resolve().parents[2] / "support" / "clusters" / "slow_places.py"
TRIES = 4
SECRET = "the word that no span may hold is Xylophagous"
WHOLE = {"receive", "tokenize", "queue", "placement", "attempt", "first token", "wait", "offer", "prompt chunk"}
WHOLE |= {"hand-off", "memory", "transfer", "install", "decode"}


class TracedCluster:
    """A router, a prefill and a decode node, with places that wait once when a test says so."""

    def __init__(self, folder: Path) -> None:
        from tests.support.clusters.otlp_receiver import Receiver

        self.receiver = Receiver()
        self.folder = folder / "slow"
        self.folder.mkdir()
        program = [sys.executable, "-P", str(PROGRAM), str(self.folder)]
        flags = (f"--parent-pid={os.getpid()}", "--otlp-endpoint", self.receiver.url)
        self.router = RouterProcess(*flags, "--trace-sample", "0", program=[*program, "router"])
        router = Endpoint(self.router.nodes)
        self.nodes = [
            NodeProcess(role, role, router, folder, *flags, "--transport", "shm", baton=program)  # type: ignore[arg-type]
            for role in ("prefill", "decode")
        ]
        self._until(lambda: httpx.get(f"{self.router.url}/ready").json().get("pair"), "both nodes are ready")

    def _until(self, condition: object, what: str) -> None:
        deadline = time.monotonic() + HANG_GUARD_S
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline, f"never: {what}\n" + "\n".join(node.log for node in self.nodes)
            time.sleep(0.02)

    def ask(self, number: int) -> list:
        """Return the request's spans, once all are here."""
        trace_id = f"{number + 1:032x}"
        body = {"model": "hashlm", "prompt": f"{number} {SECRET}", "max_tokens": 8, "seed": number, "ignore_eos": True}
        headers = {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}
        answer = httpx.post(f"{self.router.url}/v1/completions", json=body, headers=headers, timeout=HANG_GUARD_S)
        assert answer.status_code == 200, answer.text
        self._until(lambda: self._names(trace_id) >= WHOLE | {"text_completion hashlm"}, f"spans of request {number}")
        return self.receiver.of_trace(trace_id)

    def _names(self, trace_id: str) -> set[str]:
        return {span.name for span in self.receiver.of_trace(trace_id)}

    def close(self) -> None:
        for process in [*self.nodes, self.router]:
            process.process.terminate()
        for node in self.nodes:
            node.close()
        self.router.stop()
        self.receiver.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedCluster]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds between batches
        made = TracedCluster(tmp_path_factory.mktemp("traced"))
    try:
        made.ask(1000)  # the first request compiles and dials
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(("number", "place"), list(enumerate(SHOWN)), ids=list(SHOWN))
def test_the_spans_name_the_place_that_was_slow(cluster: TracedCluster, number: int, place: str) -> None:
    from tests.support.clusters.otlp_receiver import slow_place

    for turn in range(TRIES):  # a busy machine may keep somebody else waiting for as long
        (cluster.folder / place).touch()
        spans = cluster.ask(TRIES * number + turn)
        assert not (cluster.folder / place).exists(), "nobody came past the place"
        name, seconds = slow_place(spans)
        print(f"{place}: {name}, {seconds:.3f} s")
        if name == SHOWN[place]:
            break
    assert name == SHOWN[place] and seconds >= WAIT_S


def test_spans_hold_no_text_and_one_tree(cluster: TracedCluster) -> None:
    spans = cluster.ask(500)
    ids = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.parent_id == "1" * 16]
    assert root.name == "text_completion hashlm"
    assert all(span.parent_id in ids for span in spans if span is not root)
    (attempt,) = [span for span in spans if span.name == "attempt"]
    assert attempt.attributes["baton.prefill_node"] == "prefill" and attempt.attributes["baton.decode_node"] == "decode"
    for span in spans:
        assert span.part == root.part or span.parent_id == attempt.span_id
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert SECRET.split()[-1].encode() not in b"".join(cluster.receiver.bodies)
