"""A computing stream keeps a result back until it computes the next one, and never longer than it must."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from shared.core.held_result import hold, release
from shared.device.cpu import CpuStream
from shared.device.events import Event, StreamSkipped, Ticket
from shared.engine.future_map import FutureMap
from shared.engine.worker import Worker
from tests.support.machine.patience import HANG_GUARD_S


class Case:
    """A stream whose first closure ends only once all other work is queued."""

    def __init__(self) -> None:
        self.notified = 0
        self.stream = CpuStream("forward", notify=self._notify, computes=True)
        self._gate = threading.Event()
        self.first: Ticket[str] = self.stream.launch(self._first)

    def _first(self) -> str:
        assert self._gate.wait(HANG_GUARD_S)
        return "first"

    def _notify(self) -> None:
        self.notified += 1

    def run(self, *closures: Callable[[], Any]) -> list[Any]:
        tickets = [self.stream.launch(closure) for closure in closures]
        self._gate.set()
        return [ticket.take(HANG_GUARD_S) for ticket in tickets]

    def is_done(self) -> bool:
        return self.first.done.peek()

    def is_released(self, ticket: Ticket[Any] | None = None) -> bool:
        """Wait for the result, by default the first one."""
        released = threading.Event()
        (ticket or self.first).done.add_callback(lambda _: released.set())
        return released.wait(HANG_GUARD_S)


@pytest.fixture
def case() -> Iterator[Case]:
    made = Case()
    yield made
    made.stream.stop()


def test_a_result_waits_until_the_next_closure_computes(case: Case) -> None:
    def second() -> list[bool]:
        before = case.is_done()
        release()
        return [before, case.is_done()]

    assert case.run(second) == [[False, True]]
    case.stream.stop()
    assert case.notified == 2


def test_a_closure_that_does_not_compute_releases_at_its_end(case: Case) -> None:
    assert case.run(case.is_done, case.is_done) == [False, True]


def test_a_result_without_later_work_is_released_at_once(case: Case) -> None:
    case.run()
    assert case.is_released()


def test_a_result_does_not_wait_for_an_event(case: Case) -> None:
    """Masks of the next step are made of this step's tokens."""
    event = Event("masks")
    case.stream.wait(event)
    later = case.stream.launch(lambda: "later")
    case.run()
    assert case.is_released() and not later.done.peek()
    event.fire()
    assert later.take(HANG_GUARD_S) == "later"


def test_an_error_is_released_before_what_it_skips(case: Case) -> None:
    order: list[str] = []

    def fails() -> None:
        raise ValueError("boom")

    tickets = [case.stream.launch(fails), case.stream.launch(lambda: None)]
    for name, ticket in (("first", case.first), ("failed", tickets[0]), ("skipped", tickets[1])):
        ticket.done.add_callback(lambda _, name=name: order.append(name))
    case.run()
    with pytest.raises(ValueError, match="boom"):
        tickets[0].take(HANG_GUARD_S)
    with pytest.raises(StreamSkipped):
        tickets[1].take(HANG_GUARD_S)
    assert order == ["first", "failed", "skipped"]


def test_stop_releases(case: Case) -> None:
    """The last closure ends with the stop already queued behind it."""
    last = case.stream.launch(case.stream.stop)
    case.run()
    assert case.is_released(last) and last.error is None and case.is_done()


def test_a_result_is_not_lost_if_giving_the_one_before_fails() -> None:
    given: list[str] = []

    def fails() -> None:
        raise SystemExit

    hold(fails)
    with pytest.raises(SystemExit):
        hold(lambda: given.append("second"))
    release()
    release()
    assert given == ["second"]


def test_another_stream_keeps_nothing_back() -> None:
    stream, gate = CpuStream("copy"), threading.Event()
    first = stream.launch(lambda: gate.wait(HANG_GUARD_S))
    second = stream.launch(first.done.peek)
    gate.set()
    assert second.take(HANG_GUARD_S) is True
    stream.stop()


@pytest.mark.parametrize("part", ["propose", "run_model"])
@pytest.mark.parametrize("is_program", [False, True])
def test_a_model_that_is_no_program_releases_first(is_program: bool, part: str) -> None:
    """Otherwise a result would wait for a whole step. A program releases later: drafting belongs to its preparation."""
    given: list[str] = []

    class Anything:
        """A model, a runner, a drafter, a batch and its arrays: no row has a forced token."""

        def __init__(self) -> None:
            self.is_program, self.inputs = is_program, None
            self.spec = self.arrays = self
            self.forced = self.forced_from = None
            self.vocab_size = 1

        def compute(self, *_: object) -> None:
            given.append("computed")

        propose = forward = compute

    anything = cast("Any", Anything())
    worker = Worker(anything, anything, FutureMap(1, 1), drafter=anything, runner=anything)
    hold(lambda: given.append("released"))
    getattr(worker, part)(anything)
    release()
    assert given == (["computed", "released"] if is_program else ["released", "computed"])
