"""Whose messages a bound socket takes, and what is said of those that it does not."""

from __future__ import annotations

import logging

import pytest

from shared.wire.peers import Refused, WireStats, peer_name
from shared.wire.zeromq.peer_gate import PeerGate


def name(epoch: int) -> str:
    return peer_name("d", epoch)


def test_the_newest_life_is_listened_to_until_it_is_gone() -> None:
    gate = PeerGate(None)
    gate.check(name(1), "")
    gate.check(name(2), "")
    gate.gone(name(1))
    with pytest.raises(Refused):
        gate.check(name(1), "")
    gate.gone(name(2))
    gate.check(name(1), "")  # a clock that went back makes the next life look older


def test_a_knock_without_a_key_is_logged_once_and_always_counted(caplog: pytest.LogCaptureFixture) -> None:
    stats = WireStats()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            stats.shut_out("a peer without a key")
        stats.shut_out("another peer")
    assert len(caplog.records) == 2 and sum(stats.counts.values()) == 6
