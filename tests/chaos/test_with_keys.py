"""The main faults once more, with keys between router and nodes: kills at points of the protocol, wires that are cut,
half open or deaf one way, frozen nodes. The proxy ends CURVE on both sides. No stream may show any of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.chaos.test_frozen import FROZEN_S, freeze_for
from tests.chaos.test_kill_points import POINTS, Point, run_with
from tests.chaos.test_network import HELD_S, decoding, handing_over, run_and_check
from tests.support.clusters.chaos_cluster import ChaosCluster, chaos_cluster
from tests.support.wire.proxy import Link, Seen, Trap

KILLS = ("after_the_grant", "between_chunks", "prebuilt_arrives", "in_mid_decode")
WIRES = pytest.mark.parametrize("matches", [handing_over, decoding], ids=["between_the_nodes", "to_the_router"])
Matches = Callable[[Seen], bool]


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    """The folder's `cluster` fixture heals and checks this one here."""
    with chaos_cluster(tmp_path_factory.mktemp("keys"), has_keys=True) as cluster:
        yield cluster


@pytest.mark.parametrize("point", [point for point in POINTS if point.name in KILLS], ids=lambda point: point.name)
def test_killed(cluster: ChaosCluster, point: Point) -> None:
    dead: list[str] = []

    def strike(seen: Seen) -> None:
        dead.append(getattr(seen, point.victim))
        cluster.kill(dead[0])

    run_with(cluster, Trap(point.matches, strike, point.nth, point.passes_on, point.after_s))
    assert len(dead) == 1


@WIRES
def test_a_cut_wire(cluster: ChaosCluster, matches: Matches) -> None:
    trap = Trap(matches, lambda seen: None, nth=3, passes_on=False)
    cluster.proxy.traps.append(trap)
    run_and_check(cluster)
    assert trap.fired.is_set()


@WIRES
@pytest.mark.parametrize("way", [None, True, False], ids=["both", "to_the_target", "from_it"])
def test_a_half_open_wire(cluster: ChaosCluster, matches: Matches, way: bool | None) -> None:
    """Connected, and nothing arrives, both ways or one way, for longer than anybody waits."""
    held: list[Link] = []

    def hold(seen: Seen) -> None:
        link = cluster.proxy.links[seen.link]
        held.append(link)
        name, value, calm = ("held", True, False) if way is None else ("held_way", way, None)
        setattr(link, name, value)
        threading.Timer(HELD_S, setattr, (link, name, calm)).start()

    cluster.proxy.traps.append(Trap(matches, hold, nth=3, ends_connection=False))
    run_and_check(cluster)
    assert held


def test_a_frozen_node(cluster: ChaosCluster) -> None:
    timers: list[threading.Timer] = []

    def strike(seen: Seen) -> None:
        timers.append(freeze_for(cluster.nodes[seen.sender].process.pid, FROZEN_S))

    cluster.proxy.traps.append(Trap(decoding, strike, nth=20, ends_connection=False))
    run_and_check(cluster)
    assert timers, "nobody was frozen"
    timers[0].join()


def test_a_frozen_router(cluster: ChaosCluster) -> None:
    timers: list[threading.Timer] = []

    def strike(seen: Seen) -> None:
        timers.append(freeze_for(cluster.routers[0].process.pid, FROZEN_S))

    cluster.proxy.traps.append(Trap(decoding, strike, nth=20, ends_connection=False))
    run_and_check(cluster)
    assert timers, "it was not frozen"
    timers[0].join()


def test_keys_really_stand_between_them(cluster: ChaosCluster) -> None:
    """What passes is read by the proxy alone: the links that it offers have keys, and nobody without one comes in."""
    assert all(link.pair is not None for link in cluster.proxy.links.values())
    run_and_check(cluster)
    assert cluster.proxy.passed["Tokens"] > 0
