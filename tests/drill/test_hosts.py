"""Hosts that freeze, die, are drained, or have too much to do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shared.core.exit_codes import exit_code_after
from tests.drill.cluster import ROOT, ROUTERS
from tests.drill.scene import Scene, missing_everywhere, without

EVERY_KIND = ("d0", "p0", "router0")
LONG_ANSWER = 3000  # tokens: with its prompt, nearly as much as a pool holds for it
SPINNERS = 2 * (os.cpu_count() or 1)


@pytest.mark.parametrize("host", EVERY_KIND)
def test_a_host_frozen_for_a_second_loses_nothing(scene: Scene, host: str) -> None:
    with scene.under_load("router0", "router1") as loads:
        scene.freeze(host, 1.0)
    scene.check_streams(loads)


@pytest.mark.parametrize("host", EVERY_KIND)
def test_a_host_is_frozen_for_long(scene: Scene, host: str) -> None:
    """Nobody waits for it, and what it says when it wakes up hurts nobody."""
    with scene.under_load("router0", loses=without(host)) as loads:
        scene.freeze(host, 8.0)
    scene.check_streams(loads)


@pytest.mark.parametrize("host", ["d0", "p0"])
def test_a_node_is_killed(scene: Scene, host: str) -> None:
    with scene.under_load("router0", loses=missing_everywhere(host)) as loads:
        scene.cluster.kill(host)
    scene.check_streams(loads)


def test_a_router_is_killed(scene: Scene) -> None:
    """Its own streams break, with an error; the other router's never notice."""
    with scene.under_load("router0", "router1") as (broken, kept):
        scene.cluster.kill("router0")
        broken.ask_no_more()
    scene.check_streams([kept])
    scene.check_broken_streams(broken)


def test_busy_cores_are_no_lost_hosts(scene: Scene) -> None:
    """Twice as many processes as cores compute beside the cluster: everything is slow, and nobody is given up."""
    guard = f"from shared.core.orphan_guard import die_with_parent; die_with_parent({os.getpid()})"
    spin = [sys.executable, "-c", f"{guard}\nwhile True: pass"]
    with scene.under_load("router0") as loads:
        spinners: list[subprocess.Popen[bytes]] = []
        try:
            spinners.extend(subprocess.Popen(spin, cwd=ROOT) for _ in range(SPINNERS))
            scene.let_pass(8)
        finally:
            for spinner in spinners:
                spinner.kill()
                spinner.wait()
    scene.check_streams(loads)


def test_a_drain_moves_both_routers_streams(scene: Scene) -> None:
    """The node is gone while streams that began on it, at either router, go on: on other nodes, as if nothing were."""
    cluster, loses = scene.cluster, missing_everywhere("d0")
    with scene.under_load(*ROUTERS, loses=loses, max_tokens=LONG_ANSWER) as loads:
        cluster.eventually(  # where the start was slow, the first streams are over by now
            lambda: all(cluster.open_on("d0", router) >= 2 for router in ROUTERS), "d0 has streams of both routers"
        )
        before = {router: cluster.resumed(router) for router in ROUTERS}
        cluster.admin("router0", "drain", {"node": "d0", "then": "stop", "move_after_s": 0.0})
        assert cluster.wait_for_end("d0") == exit_code_after("stop")
        stayed = [router for router in ROUTERS if cluster.resumed(router) == before[router]]
        assert not stayed, f"the drain waited for the last token of streams at {stayed}"
    scene.check_streams(loads)
