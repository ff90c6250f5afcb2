"""Real prefill and decode processes hand over on HashLM: the streams are the reference's, on both transports."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters.procs import NodeProcess, RouterStub
from tests.support.cores.core_rig import draw_jobs
from tests.support.worlds.node_pair import expected


@pytest.fixture
def router() -> Iterator[RouterStub]:
    stub = RouterStub()
    yield stub
    stub.close()


@pytest.fixture(params=["shm", "zmq", "gloo"])
def nodes(request: pytest.FixtureRequest, router: RouterStub, tmp_path: Path) -> Iterator[tuple[NodeProcess, ...]]:
    flags = ("--transport", request.param)
    started = (
        NodeProcess("prefill", "p0", router, tmp_path, *flags),
        NodeProcess("decode", "d0", router, tmp_path, *flags),
    )
    router.until(lambda: {"p0", "d0"} <= set(router.hellos), "both nodes say Hello")
    yield started
    for node in started:
        node.close()


def test_streams_equal_the_reference(router: RouterStub, nodes: tuple[NodeProcess, ...]) -> None:
    jobs = draw_jobs(random.Random(3), 20)
    keys = [router.generate("p0", job, "d0") for job in jobs]
    router.wait_ends(keys)
    for job, key in zip(jobs, keys, strict=True):
        assert router.book.streams[key] == expected(job)
    for node in nodes:
        router.wait_at_rest(node.node_id)
        assert node.terminate() == 0, node.log
        assert "add up" not in node.log
