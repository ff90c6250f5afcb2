"""What hand-offs and pulls share of books: used tickets, and numbers of leases."""

from __future__ import annotations

import pytest

from shared.node.records.leases import Leases
from shared.node.records.spent_tickets import KEPT_LONGER_S, SpentTickets


def test_a_used_ticket_is_kept_beyond_its_deadline() -> None:
    """A later Welcome may move the deadline, and the ticket would open again."""
    spent: SpentTickets[str] = SpentTickets()
    spent.spend("a", deadline=10.0, now=0.0)
    spent.spend("b", deadline=500.0, now=10.0 + KEPT_LONGER_S)
    assert "a" in spent and "b" in spent
    spent.spend("c", deadline=500.0, now=10.1 + KEPT_LONGER_S)
    assert "a" not in spent and "b" in spent


def test_so_many_used_tickets_are_kept_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.node.records.spent_tickets.MAX_SPENT", 3)
    spent: SpentTickets[int] = SpentTickets()
    for number in range(5):
        spent.spend(number, deadline=100.0, now=0.0)
    assert len(spent) == 3 and [number for number in range(5) if number in spent] == [2, 3, 4]


def test_leases_are_numbered_apart_in_each_epoch() -> None:
    first, second = Leases(7), Leases(8)
    numbers = [leases.next() for leases in (first, second) for _ in range(3)]
    assert len(set(numbers)) == 6 and [number >> 32 for number in numbers] == [7, 7, 7, 8, 8, 8]
    assert Leases((1 << 40) + 5).next() < 1 << 64, "a lease is 64 bits on the wire"
