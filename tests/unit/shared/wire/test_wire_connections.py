"""Who has gone, when descriptors are reused and reports come late. The monitor is a list here."""

from __future__ import annotations

import pytest

from shared.wire.zeromq.connections import Connections

FIRST, SECOND, THIRD = b"\x00\x00\x00\x00\x01", b"\x00\x00\x00\x00\x02", b"\x00\x00\x00\x00\x03"


class Monitor:
    """`reports`: +fd accepted, -fd disconnected."""

    def __init__(self, *reports: int) -> None:
        self.connections = Connections(self.drain)
        self.reports = list(reports)

    def drain(self) -> None:
        for report in self.reports:
            if report > 0:
                self.connections.accepted(report)
            else:
                self.connections.closed(-report)
        self.reports = []

    def gone(self, *reports: int) -> list[str]:
        """A receive in which nothing comes but these."""
        self.reports = list(reports)
        self.drain()
        return self.connections.take_gone()


def test_a_closed_descriptor_is_its_peer() -> None:
    monitor = Monitor(5, 6)
    monitor.connections.seen(5, FIRST, "a")
    monitor.connections.seen(6, SECOND, "b")
    assert monitor.connections.take_gone() == []
    assert monitor.gone(-5, -99) == ["a"]
    assert monitor.gone() == []


@pytest.mark.parametrize("successor", ["b", "a"])
def test_a_reused_descriptor_whose_report_waits_in_the_monitor(successor: str) -> None:
    """Its successor's message overtook our drain: another peer, or the same one that dialled again at once."""
    monitor = Monitor(5)
    monitor.connections.seen(5, FIRST, "a")
    monitor.reports = [-5, 5]
    monitor.connections.seen(5, SECOND, successor)
    assert monitor.connections.take_gone() == ["a"] * (successor != "a")
    assert monitor.gone() == []
    assert monitor.gone(-5) == [successor]


@pytest.mark.parametrize("successor", ["b", "a"])
def test_a_reused_descriptor_whose_report_was_drained_before(successor: str) -> None:
    monitor = Monitor(5)
    monitor.connections.seen(5, FIRST, "a")
    monitor.reports = [-5, 5]
    monitor.drain()
    monitor.connections.seen(5, SECOND, successor)
    assert monitor.connections.take_gone() == ["a"] * (successor != "a")
    assert monitor.gone(-5) == [successor]


@pytest.mark.parametrize("reports", [(5, -5, 5), (5, -5, 5, -5, 5)])
def test_failed_connections_say_nothing_of_their_fd_s_next_one(
    reports: tuple[int, ...],
) -> None:
    """A foreign key, a port scanner: with the report drained before, and with it still in the monitor."""
    for drained_before in (True, False):
        monitor = Monitor(*reports)
        if drained_before:
            monitor.drain()
        monitor.connections.seen(5, FIRST, "a")
        assert monitor.connections.take_gone() == []
        assert monitor.gone(-5) == ["a"]


def test_one_that_came_spoke_and_went_between_two_receives() -> None:
    monitor = Monitor(5, -5)
    monitor.drain()
    monitor.connections.seen(5, FIRST, "a")
    assert monitor.connections.take_gone() == ["a"]


def test_both_users_of_a_descriptor_gone_at_once() -> None:
    monitor = Monitor(5)
    monitor.connections.seen(5, FIRST, "a")
    monitor.reports = [-5, 5, -5]
    monitor.connections.seen(5, SECOND, "b")
    assert monitor.connections.take_gone() == ["a", "b"]


def test_last_messages_of_a_gone_peer_do_not_bring_it_back() -> None:
    monitor = Monitor(5)
    monitor.connections.seen(5, FIRST, "a")
    monitor.reports = [-5, 5]
    for route, peer in ((SECOND, "b"), (FIRST, "a"), (SECOND, "b")):
        monitor.connections.seen(5, route, peer)
    assert monitor.connections.take_gone() == ["a"]
    assert monitor.gone(-5) == ["b"]


def test_last_messages_that_are_the_first_we_hear_of_a_gone_peer() -> None:
    """Queues are read in turn: its successor on the descriptor was heard before it."""
    monitor = Monitor(5, -5, 5)
    for route, peer in ((SECOND, "b"), (FIRST, "a"), (SECOND, "b")):
        monitor.connections.seen(5, route, peer)
    assert monitor.connections.take_gone() == ["a"]
    assert monitor.gone(-5) == ["b"]


def test_a_peer_that_is_back_on_another_descriptor_is_not_gone() -> None:
    monitor = Monitor(5, 7)
    monitor.connections.seen(5, FIRST, "a")
    monitor.connections.seen(7, SECOND, "a")
    assert monitor.gone(-5) == []
    assert monitor.gone(-7) == ["a"]


def test_three_on_one_descriptor() -> None:
    monitor = Monitor(5)
    monitor.connections.seen(5, FIRST, "a")
    monitor.reports = [-5, 5, -5, 5]
    monitor.connections.seen(5, SECOND, "b")
    monitor.connections.seen(5, THIRD, "c")
    assert monitor.connections.take_gone() == ["a", "b"]
    assert monitor.gone(-5) == ["c"]
