"""Pages that are copied here, for a hand-off or a pull: when they may have another owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from shared.core.errors import HandoffFailed
from shared.device.cpu import do_nothing
from shared.device.events import Event
from shared.node.loop.context import NodeContext
from shared.node.loop.page_copies import PageCopies
from shared.observe.step_records import StepRecords
from shared.transfer.interface import PageReceiver
from shared.wire.messages import Key, Ready
from tests.support.cores.hand_driven import HandDriven


@dataclass(eq=False)
class Row:
    row: int
    num_pulling: int = 0


class Copies:
    """PageCopies over a stream in the test's hand, and a receiver that writes down what it is asked for."""

    def __init__(self) -> None:
        self.stream, self.freed, self.pulled = HandDriven(), list[int](), list[list[int]]()
        self.engine = SimpleNamespace(
            streams=SimpleNamespace(transfer=self.stream),
            stages=SimpleNamespace(flush=do_nothing),
            last_done=None,
            heard=lambda error: None,
            records=StepRecords(),
        )
        queues = SimpleNamespace(budget=SimpleNamespace(release_held=self.freed.append))
        core = SimpleNamespace(engine=self.engine, queues=queues, pages_of=lambda row: np.arange(10) + 10 * row)
        self.receiver = SimpleNamespace(pull=self._pull, forget_dead=lambda: self.stream.log.append("tidied"))
        receivers = {"zmq": cast(PageReceiver, self.receiver)}
        self.copies: PageCopies[Row] = PageCopies(cast(NodeContext, SimpleNamespace(core=core)), receivers, "pull")

    def _pull(self, ready: Ready, frames: Sequence[bytes], pages: Sequence[int]) -> None:
        self.pulled.append([int(page) for page in pages])

    def launch(self, row: Row, first: int = 2, count: int = 3) -> None:
        key, none = Key("r", 1, "x", 0, 0), [0] * count
        self.copies.launch(row, "zmq", Ready(key, 1, first, none, none, none, None, True, 0, 0, b"", 0), ())


def test_announced_pages_go_into_their_places_of_the_row() -> None:
    books, row = Copies(), Row(4)
    books.launch(row)
    assert books.pulled == [[42, 43, 44]] and row.num_pulling == 1
    ((ended, ready, error),) = books.copies.take_done()
    assert ended is row and ready.first_page == 2 and error is None and row.num_pulling == 0


def test_a_copy_waits_for_the_newest_launched_step() -> None:
    books = Copies()
    books.engine.last_done = running = Event("a step of the pages' last owner")
    books.launch(Row(1))
    assert not books.pulled
    running.fire()
    books.stream.run()
    assert len(books.pulled) == 1


def test_a_row_is_held_until_its_last_copy_has_ended() -> None:
    books, row = Copies(), Row(4)
    books.stream.open = False
    books.launch(row)
    books.launch(row, first=5)
    assert not books.copies.end(row, now=3.0) and books.copies.free_held() == [] and not books.freed
    books.stream.run()
    assert books.copies.free_held() == [] and not books.freed, "the copies have ended, and nobody has looked"
    assert len(list(books.copies.take_done())) == 2
    assert books.copies.free_held() == [3.0] and books.freed == [4] and not books.copies.held


def test_a_row_without_copies_is_free_at_once() -> None:
    books = Copies()
    assert books.copies.end(Row(5), now=1.0) and books.freed == [5] and not books.copies.held


@pytest.mark.parametrize("error", [HandoffFailed("its digest differs"), OSError("disk on fire")])
def test_a_copy_that_failed_is_over_too(error: Exception) -> None:
    books, row = Copies(), Row(4)

    def torn(*args: object) -> None:
        raise error

    books.receiver.pull = torn
    books.launch(row)
    ((_, _, said),) = books.copies.take_done()
    assert said is not None and str(error) in said.message and row.num_pulling == 0


def test_dead_peers_are_forgotten_on_the_stream() -> None:
    books = Copies()
    books.copies.forget_dead()
    assert books.stream.log == ["forget_dead", "tidied"] and books.copies.free_held() == []
