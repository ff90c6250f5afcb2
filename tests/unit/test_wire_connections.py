"""Who has gone, when descriptors are reused and reports come late. The monitor is a list here."""

from __future__ import annotations

from shared.wire.connections import Connections


class Monitor:
    def __init__(self) -> None:
        self.reports: list[int] = []
        self.connections = Connections(self.drain)

    def drain(self) -> None:
        self.connections.closed(self.reports)
        self.reports = []


def test_a_closed_descriptor_is_its_peer() -> None:
    monitor = Monitor()
    connections = monitor.connections
    connections.seen(5, "a")
    connections.seen(6, "b")
    assert connections.take_gone() == []
    connections.closed([5, 99])
    assert connections.take_gone() == ["a"]
    assert connections.take_gone() == []


def test_a_reused_descriptor_whose_report_is_still_in_the_monitor() -> None:
    monitor = Monitor()
    connections = monitor.connections
    connections.seen(5, "a")
    monitor.reports = [5]  # a closed, b accepted under the same number, b's message overtook our drain
    connections.seen(5, "b")
    assert connections.take_gone() == ["a"]
    monitor.drain()
    assert connections.take_gone() == []  # b lives
    connections.closed([5])
    assert connections.take_gone() == ["b"]


def test_a_reused_descriptor_whose_report_was_drained_before() -> None:
    connections = Monitor().connections
    connections.seen(5, "a")
    connections.closed([5])
    connections.seen(5, "b")
    assert connections.take_gone() == ["a"]
    connections.closed([5])
    assert connections.take_gone() == ["b"]


def test_both_users_of_a_descriptor_gone_at_once() -> None:
    monitor = Monitor()
    connections = monitor.connections
    connections.seen(5, "a")
    monitor.reports = [5, 5]
    connections.seen(5, "b")
    assert connections.take_gone() == ["a", "b"]


def test_last_messages_of_a_gone_peer_do_not_bring_it_back() -> None:
    monitor = Monitor()
    connections = monitor.connections
    connections.seen(5, "a")
    monitor.reports = [5]
    connections.seen(5, "b")
    connections.seen(5, "a")
    connections.seen(5, "b")
    assert connections.take_gone() == ["a"]
    connections.closed([5])
    assert connections.take_gone() == ["b"]


def test_a_peer_that_is_back_under_another_descriptor_is_not_gone() -> None:
    connections = Monitor().connections
    connections.seen(5, "a")
    connections.seen(7, "a")
    connections.closed([5])
    assert connections.take_gone() == []
    connections.closed([7])
    assert connections.take_gone() == ["a"]
