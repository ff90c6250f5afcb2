"""A node that has no descriptor left for a peer gives the peer up, and lives."""

from __future__ import annotations

import io
import resource

import pytest

from prefill_node.side import PrefillSide
from shared.core.errors import PeerUnreachable
from shared.node.loop.daemon import Daemon
from shared.observe.log import Logger
from shared.wire import descriptors
from tests.support.cores.core_rig import CoreKnobs
from tests.support.cores.scripted_core import job
from tests.support.worlds.node_pair import Net, make_node, name_of
from tests.unit.shared.node.test_node_rounds import Line


class FullLine(Line):
    def dial(self, peer: str, endpoint: str, *, brings_pages: bool = False) -> None:
        raise PeerUnreachable("Too many open files")


def test_a_peer_for_which_no_descriptor_is_left_is_unreachable() -> None:
    """The defect: a ZMQError at dialling ended the node."""
    p, d = make_node("prefill", "p0", CoreKnobs()), make_node("decode", "d0", CoreKnobs())
    net = Net([p, d])
    net.generate(p, job(1, 40, 8), d)
    line = FullLine(list(net.inboxes[name_of(p)]), [])
    daemon = Daemon(p, line, Logger("p", io.StringIO()), drain_s=1.0, clock=lambda: 0.0)
    try:
        for _ in range(5):
            daemon.round()
    except PeerUnreachable:
        pytest.fail("the node ended")
    assert isinstance(p.side, PrefillSide)
    assert not p.side.bootstrap.offered and not p.ctx.core.requests
    assert p.ctx.metrics.counters()["unreachable"] == 1


def test_the_limit_of_descriptors_is_raised_to_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    assert descriptors.raise_limit() == 4096 and limits[-1] == (4096, 4096)


def test_a_limit_that_can_t_be_raised_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, limit: tuple[int, int]) -> None:
        raise ValueError("not allowed")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert descriptors.raise_limit() == 1024
