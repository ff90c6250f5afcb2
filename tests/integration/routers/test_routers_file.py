"""A real node whose list of routers changes while it runs: a file names another router than before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.clusters.chaos_cluster import Endpoint
from tests.support.clusters.metrics_page import at_rest, read_metrics
from tests.support.clusters.procs import NodeProcess
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S

TOKENS = 400


@pytest.fixture
def routers() -> Iterator[list[RouterProcess]]:
    with contextlib.ExitStack() as stack:
        started = []
        for index in range(3):
            started.append(RouterProcess(f"--parent-pid={os.getpid()}", "--router-id", f"router-{index}"))
            stack.callback(started[-1].stop)
        yield started


def is_ready(router: RouterProcess) -> bool:
    return httpx.get(f"{router.url}/ready", timeout=HANG_GUARD_S).status_code == 200


def test_a_node_goes_where_its_file_says(routers: list[RouterProcess], tmp_path: Path) -> None:
    fixed, before, after = routers
    file = tmp_path / "routers"
    file.write_text(f"# ours\n{before.nodes}\n")
    node = NodeProcess("decode", "d0", Endpoint(fixed.nodes), tmp_path, "--routers-file", str(file))  # type: ignore[arg-type]
    try:
        eventually(lambda: is_ready(fixed) and is_ready(before))
        assert not is_ready(after)
        body = {"prompt": "a long one", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{before.url}/v1/completions", json=body, timeout=HANG_GUARD_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            file.write_text(f"{after.nodes}\n")
            eventually(lambda: is_ready(after) and not is_ready(before))
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        eventually(lambda: any("node is gone" in line for line in before.lines))
        assert not any("is lost" in line for line in before.lines) and is_ready(fixed)
        assert "a router has left the list" in node.log and at_rest(read_metrics(after.url))
    finally:
        node.close()
