"""Work on the transfer stream, or the cold tier's, whose completion is an input of the next tick, never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared.core.errors import BatonError, HandoffFailed
from shared.device.events import Ticket
from shared.engine.engine import Engine

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class JobDone(Generic[T, R]):
    """`error` is set, or `value` is what the job gave."""

    tag: T
    value: R | None
    error: BatonError | None


class TransferJobs(Generic[T, R]):
    """Jobs of one kind, in launch order. A job that raises fails alone: the error travels as its result, so the
    stream's epoch lives on and nobody else's job is skipped."""

    def __init__(self, engine: Engine, is_cold: bool = False) -> None:
        """`is_cold`: copies of the cold tier, on a stream of their own. Nothing orders them beside hand-offs but their
        ends: a page goes from the one to the other when the host has seen the last copy of it end."""
        self._engine = engine
        self._is_cold = is_cold
        self._open: deque[tuple[T, Ticket[R | BatonError]]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def launch(self, tag: T, job: Callable[[], R], label: str, after_newest_step: bool = False) -> None:
        """`after_newest_step`: the job writes pages that a launched step may still read or write, as a finished
        request's last step does: it waits for the newest one."""
        streams = self._engine.streams
        stream = streams.cold if self._is_cold else streams.transfer
        if after_newest_step:
            self._engine.stages.flush()
        newest = self._engine.last_done
        if after_newest_step and newest is not None:
            stream.wait(newest)
        self._open.append((tag, stream.launch(lambda: _guarded(job), label=label)))

    def synchronize(self) -> None:
        """Wait for the oldest, if there is one; `take_done` gives it then."""
        if self._open:
            self._open[0][1].done.synchronize()

    def take_done(self) -> list[JobDone[T, R]]:
        done: list[JobDone[T, R]] = []
        while self._open and self._open[0][1].done.query():
            tag, ticket = self._open.popleft()
            result, error = ticket.result, ticket.error
            if isinstance(result, BatonError):
                self._engine.heard(result)
                done.append(JobDone(tag, None, result))
            elif error is not None:  # skipped, or the device failed behind it
                self._engine.heard(error)
                done.append(JobDone(tag, None, HandoffFailed(str(error))))
            else:
                done.append(JobDone(tag, result, None))
        return done


def _guarded(job: Callable[[], R]) -> R | BatonError:
    try:
        return job()
    except BatonError as error:
        return error
    except Exception as error:
        failed = HandoffFailed(f"{type(error).__name__}: {error}")
        failed.__cause__ = error
        return failed
