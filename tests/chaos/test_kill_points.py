"""kill -9 at named points of the protocol, under streams of the openai SDK: each is the unbroken run's, to the token.

The proxy sees the n-th message of a kind and kills one end of it; that message is the last which passes, or the first
which does not. Two prefill and two decode nodes, one pair with shared memory, the other with pages in messages.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from shared.wire.messages import Generate, Grant, Heartbeat, Installed, Offer, Prebuilt, Ready, Tokens
from tests.support.clusters.chaos_cluster import ChaosCluster
from tests.support.web.sdk_clients import fresh_clients, run_clients
from tests.support.wire.proxy import Seen, Trap

Match = Callable[[Seen], bool]


def is_a(kind: type) -> Match:
    return lambda seen: isinstance(seen.message, kind)


def has_pages(seen: Seen) -> bool:
    return isinstance(seen.message, Ready) and len(seen.message.pages) > 0


def later_pages(seen: Seen) -> bool:
    return isinstance(seen.message, Ready) and len(seen.message.pages) > 0 and seen.message.first_page > 0


def tokens_of(role: str) -> Match:
    return lambda seen: isinstance(seen.message, Tokens) and seen.sender[0] == role and bool(seen.message.runs)


def last_tokens(seen: Seen) -> bool:
    return isinstance(seen.message, Tokens) and seen.sender[0] == "d" and bool(seen.message.ends)


@dataclass(frozen=True, slots=True)
class Point:
    """`victim`: which end of the message dies."""

    name: str
    matches: Match
    victim: str
    passes_on: bool
    nth: int = 1
    after_s: float = 0.0


POINTS = [
    Point("a_request_arrives_at_the_prefill_node", is_a(Generate), "receiver", False, nth=2),
    Point("after_the_offer", is_a(Offer), "sender", True, nth=2),
    Point("an_offer_meets_nobody", is_a(Offer), "receiver", False),
    Point("after_the_grant", is_a(Grant), "sender", True, nth=2),
    Point("a_grant_meets_nobody", is_a(Grant), "receiver", False, nth=2),
    Point("after_the_first_ready", has_pages, "sender", True),
    Point("between_chunks", later_pages, "sender", False),
    Point("while_pulling", later_pages, "receiver", True, after_s=0.002),
    Point("before_prebuilt", is_a(Prebuilt), "sender", False, nth=2),
    Point("after_prebuilt", is_a(Prebuilt), "sender", True),
    Point("prebuilt_arrives", is_a(Prebuilt), "receiver", True, nth=3),
    Point("after_installed", is_a(Installed), "sender", True, nth=2),
    Point("installed_meets_nobody", is_a(Installed), "receiver", False),
    Point("after_the_first_token", tokens_of("p"), "sender", True),
    Point("in_mid_decode", tokens_of("d"), "sender", True, nth=25),
    Point("the_last_tokens_are_lost", last_tokens, "sender", False, nth=2),
    Point("after_the_end", last_tokens, "sender", True),
]


def run_with(cluster: ChaosCluster, trap: Trap) -> None:
    cluster.proxy.traps.append(trap)
    clients = fresh_clients()
    run_clients(cluster.url, clients)
    assert trap.fired.is_set(), "the point was never reached"
    for client in clients:
        client.check()


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_killed(cluster: ChaosCluster, point: Point) -> None:
    dead = []

    def strike(seen: Seen) -> None:
        dead.append(getattr(seen, point.victim))
        cluster.kill(dead[0])

    run_with(cluster, Trap(point.matches, strike, point.nth, point.passes_on, point.after_s))
    assert len(dead) == 1


def test_killed_while_it_drains(cluster: ChaosCluster) -> None:
    """SIGTERM in mid decode; its heartbeat says that it drains; then it dies with what it was to finish."""

    def strike(seen: Seen) -> None:
        cluster.kill(seen.sender)

    def drains(seen: Seen) -> bool:
        return isinstance(seen.message, Heartbeat) and seen.message.draining

    def begin(seen: Seen) -> None:
        os.kill(cluster.nodes[seen.sender].process.pid, signal.SIGTERM)

    cluster.proxy.traps.append(Trap(drains, strike))
    run_with(cluster, Trap(tokens_of("d"), begin, nth=10, ends_connection=False))
