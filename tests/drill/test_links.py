"""Cables that are pulled, and cables that lead one way only. No FIN and no reset: only silence tells."""

from __future__ import annotations

import pytest

from shared.config.settings.settings import NodeConfig
from tests.drill.scene import Scene, without


@pytest.mark.parametrize(
    ("host", "seconds"),
    [
        ("d0", 3),
        ("p0", 3),
        ("router0", 3),
        *(pytest.param(host, 30, marks=pytest.mark.long) for host in ("d0", "p0", "router0")),
    ],
)
def test_a_host_is_unplugged(scene: Scene, host: str, seconds: int) -> None:
    """Its streams go on elsewhere; a router's wait for it. The other router's do not notice a router's absence."""
    routers = ("router0", "router1") if host == "router0" else ("router0",)
    with scene.under_load(*routers, loses=without(host)) as loads:
        scene.unplug(host, seconds)
    scene.check_streams(loads)


@pytest.mark.parametrize(("sender", "receiver"), [("d0", "router0"), ("router0", "d0"), ("p0", "router0")])
def test_a_node_and_a_router_hear_one_way_only(scene: Scene, sender: str, receiver: str) -> None:
    """To the router it is a node like any that is lost."""
    node = receiver if sender == "router0" else sender
    with scene.under_load("router0", loses=frozenset({("router0", node)})) as loads:
        scene.site.lose(sender, receiver)
        scene.let_pass(5)
    scene.check_streams(loads)


@pytest.mark.parametrize(("sender", "receiver"), [("p0", "d0"), ("d0", "p0")])
def test_two_nodes_can_t_reach_each_other(scene: Scene, sender: str, receiver: str) -> None:
    """Both are well, and the router reaches both: requests go by other pairs, and nobody is given up. Nor does anybody
    wait for a hand-off's lease to run out: that is what a request pays where nobody notices that the pair is broken."""
    with scene.under_load("router0", moves=True) as loads:
        scene.site.lose(sender, receiver)
        loads[0].go_round()
    scene.check_streams(loads)
    assert loads[0].longest_pause_s < NodeConfig().lease_s
