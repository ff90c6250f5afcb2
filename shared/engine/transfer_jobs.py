"""Run jobs on the transfer or cold-tier stream."""

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
    """Either `error` is set, or `value` is the result."""

    tag: T
    value: R | None
    error: BatonError | None


class TransferJobs(Generic[T, R]):
    """Runs jobs of one kind, in launch order.

    An error becomes the job's result: the stream's epoch goes on, and no other job is skipped.
    """

    def __init__(self, engine: Engine, is_cold: bool = False) -> None:
        """`is_cold`: the jobs are the cold tier's copies, on the cold stream.

        That stream and the transfer stream don't wait for each other. So before a page passes from one to the
        other, the host must have waited for the page's last copy.
        """
        self._engine = engine
        self._is_cold = is_cold
        self._open: deque[tuple[T, Ticket[R | BatonError]]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def launch(self, tag: T, job: Callable[[], R], label: str, after_newest_step: bool = False) -> None:
        """Launch `job`. With `after_newest_step` the job waits for the newest step, which may use the pages."""
        streams = self._engine.streams
        stream = streams.cold if self._is_cold else streams.transfer
        if after_newest_step:
            self._engine.stages.flush()
        newest = self._engine.last_done
        if after_newest_step and newest is not None:
            stream.wait(newest)
        timed = self._engine.records.timed(stream.name, label, "", lambda: _guarded(job))
        self._open.append((tag, stream.launch(timed, label=label)))

    def synchronize(self) -> None:
        """Wait for the oldest job, if any. `take_done` then returns this job."""
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
            elif error is not None:  # the job was skipped, or its device work failed
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
