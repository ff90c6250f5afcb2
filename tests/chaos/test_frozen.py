"""SIGSTOP, longer than anybody's patience, then SIGCONT: of each kind of process. Nobody waits for the frozen one, what
it says when it wakes up hurts nobody, and no stream ends for it. `make soak FAULTS=--faults` freezes for a minute."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from shared.wire.messages import Ready, Tokens
from tests.support.clusters.chaos_cluster import ChaosCluster
from tests.support.machine.patience import SILENCE_S
from tests.support.web.sdk_clients import fresh_clients, run_clients
from tests.support.wire.proxy import Seen, Trap

FROZEN_S = 2 * SILENCE_S


def freeze_for(pid: int, seconds: float) -> threading.Timer:
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))
    timer.start()
    return timer


def decoding(seen: Seen) -> bool:
    return isinstance(seen.message, Tokens) and seen.sender[0] == "d"


def handing_over(seen: Seen) -> bool:
    return isinstance(seen.message, Ready) and seen.message.first_page > 0


@pytest.mark.parametrize(("matches", "nth"), [(decoding, 20), (handing_over, 1)], ids=["decode", "prefill"])
def test_a_frozen_node(cluster: ChaosCluster, matches: object, nth: int) -> None:
    timers = []

    def strike(seen: Seen) -> None:
        timers.append(freeze_for(cluster.nodes[seen.sender].process.pid, FROZEN_S))

    cluster.proxy.traps.append(Trap(matches, strike, nth, ends_connection=False))  # type: ignore[arg-type]
    clients = fresh_clients()
    run_clients(cluster.url, clients)
    assert timers, "nobody was frozen"
    for client in clients:
        client.check()
    timers[0].join()


def test_a_frozen_router(cluster: ChaosCluster) -> None:
    """Its nodes drop what it had asked for; when it is back it asks again, from where each stream was. It learns one by
    one that all connections broke; what it sends meanwhile to nodes that are gone counts as no attempt."""
    timers = []

    def strike(seen: Seen) -> None:
        timers.append(freeze_for(cluster.routers[0].process.pid, FROZEN_S))

    cluster.proxy.traps.append(Trap(decoding, strike, nth=20, ends_connection=False))
    clients = fresh_clients()
    run_clients(cluster.url, clients)
    assert timers, "it was not frozen"
    for client in clients:
        client.check()


def test_everyone_frozen_at_once(cluster: ChaosCluster) -> None:
    """As on a machine that was put to sleep."""
    struck = []

    def strike(seen: Seen) -> None:
        processes = [router.process for router in cluster.routers] + [node.process for node in cluster.nodes.values()]
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(FROZEN_S)  # the proxy's thread: the network sleeps too
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)
        struck.append(seen)

    cluster.proxy.traps.append(Trap(decoding, strike, nth=20, ends_connection=False))
    clients = fresh_clients()
    run_clients(cluster.url, clients)
    assert struck
    for client in clients:
        client.check()
