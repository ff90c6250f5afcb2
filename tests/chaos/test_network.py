"""Bad weather on the wires between real processes: cut, half open, partitioned, slow. No stream may show it."""

from __future__ import annotations

import threading

import pytest

from shared.wire.messages import Ready, Tokens
from tests.support.clusters.chaos_cluster import ChaosCluster
from tests.support.machine.patience import SILENCE_S
from tests.support.web.sdk_clients import fresh_clients, run_clients
from tests.support.wire.proxy import Link, Seen, Trap

HELD_S = 2 * SILENCE_S


def handing_over(seen: Seen) -> bool:
    return isinstance(seen.message, Ready) and seen.message.first_page > 0


def decoding(seen: Seen) -> bool:
    return isinstance(seen.message, Tokens) and seen.sender[0] == "d"


def run_and_check(cluster: ChaosCluster) -> None:
    clients = fresh_clients()
    run_clients(cluster.url, clients)
    for client in clients:
        client.check()


@pytest.mark.parametrize("matches", [handing_over, decoding], ids=["between_the_nodes", "to_the_router"])
@pytest.mark.parametrize("passes_on", [True, False], ids=["delivered", "lost"])
def test_a_cut_wire(cluster: ChaosCluster, matches: object, passes_on: bool) -> None:
    """Everyone lives on, only the connection is gone: it is dialled anew, with the same epoch."""
    trap = Trap(matches, lambda seen: None, nth=3, passes_on=passes_on)  # type: ignore[arg-type]
    cluster.proxy.traps.append(trap)
    run_and_check(cluster)
    assert trap.fired.is_set()


@pytest.mark.parametrize("matches", [handing_over, decoding], ids=["between_the_nodes", "to_the_router"])
def test_a_half_open_wire(cluster: ChaosCluster, matches: object) -> None:
    """Connected, and nothing arrives, for longer than anybody waits; then everything that was under way does."""
    held: list[Link] = []

    def hold(seen: Seen) -> None:
        link = cluster.proxy.links[seen.link]
        link.held = True
        held.append(link)
        threading.Timer(HELD_S, setattr, (link, "held", False)).start()

    cluster.proxy.traps.append(Trap(matches, hold, nth=3, ends_connection=False))  # type: ignore[arg-type]
    run_and_check(cluster)
    assert held


def test_slow_wires(cluster: ChaosCluster) -> None:
    """Milliseconds per message, and a trickle where pages go: nobody is taken for dead."""
    before = cluster.resumed()
    for name, link in list(cluster.proxy.links.items()):
        link.delay_s, link.bytes_per_s = (0.002, 1e6) if name.startswith("router") else (0.005, 50e3)
    run_and_check(cluster)
    assert cluster.resumed() == before
