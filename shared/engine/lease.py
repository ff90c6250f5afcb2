"""Define StepLease: everything that a launched step holds until its result is processed.

Results of zombies (rows whose request ended or was retracted after planning) are processed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shared.core.errors import IntegrityError
from shared.device.clock import Clock, Mark, StillClock
from shared.device.events import Event, StreamSkipped, Ticket
from shared.engine.boundary import HostCopy, Packed
from shared.engine.forward_batch import ForwardBatch
from shared.engine.masks import StepDrafts, StepMasks
from shared.engine.plan import Admission, StepPlan, StepResult
from shared.engine.results import read_result
from shared.engine.verify import Drafts
from shared.model.math.interface import Carried, LayerMarks, ModelOutput


@dataclass(frozen=True, slots=True)
class Carry:
    """What a step's forward leaves for its sampling. Each pipeline stage replaces it."""

    fb: ForwardBatch
    output: Carried | ModelOutput  # a ModelOutput after the last stage
    drafts: Drafts | None


class StepTimes:
    """Measures a step's time by clock marks on the forward stream."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._whole: list[Mark] = []
        self._drafting: list[tuple[Mark, Mark]] = []

    def mark(self) -> None:
        self._whole.append(self._clock.mark())

    @contextmanager
    def drafting(self) -> Generator[None, None, None]:
        begin = self._clock.mark()
        yield
        self._drafting.append((begin, self._clock.mark()))

    def seconds(self) -> tuple[float, float]:
        """Return the seconds that the drafter took, and the seconds of all other work."""
        drafting = sum((self._clock.seconds(*span) for span in self._drafting), 0.0)
        return drafting, max(0.0, self._clock.seconds(self._whole[0], self._whole[-1]) - drafting)


@dataclass(slots=True, eq=False)
class StepLease:
    """A launched step's data, owned by the engine.

    `publish_ready`, armed at launch (S6), fires when the new lengths may be read. It is None if the step
    publishes no lengths. `done` fires when the result is on the host.
    """

    step: int
    work: StepPlan | Admission
    publish_ready: Event | None
    staging: torch.Tensor | None = None
    forward: Ticket[None] | None = None
    computed: Ticket[None] | None = None  # the forward's ticket; in a pipeline, the last stage's ticket
    sampled: Ticket[Packed | None] | None = None  # its value: the results for the host; None for an admission
    result: Ticket[HostCopy | None] | None = None
    layers: LayerMarks | None = None
    # None before the forward and after the sampling (H10)
    carry: Carry | None = None
    times: StepTimes = field(default_factory=lambda: StepTimes(StillClock()))
    masks: StepMasks | None = None  # set if a row has a grammar
    drafts: StepDrafts | None = None  # set if masks need them
    closed: bool = False
    _slots: list[Callable[[], None]] = field(default_factory=list)

    def hold(self, give_back: Callable[[], None]) -> None:
        self._slots.append(give_back)

    def take_staging(self) -> torch.Tensor:
        """Return the prompt tokens (S9). Raises IntegrityError at a second call, which would prefill again."""
        staging, self.staging = self.staging, None
        if staging is None:
            raise IntegrityError(f"step {self.step}: prompt staging was consumed twice")
        return staging

    @property
    def done(self) -> Event:
        assert self.result is not None, "lease was never launched"
        return self.result.done

    @property
    def has_ended(self) -> bool:
        return self.result is not None and self.result.done.query()

    def close(self) -> StepResult | None:
        """Drop all references. Return the result, or raise the error of the step or the device."""
        assert self.result is not None
        copy, error = self.result.result, _error_of(self.result)
        if isinstance(error, StreamSkipped):  # after a failed copy of drafts, the copy of results is skipped
            error = (_error_of(self.drafts.copy) if self.drafts is not None else None) or error
        try:
            if error is not None:
                raise error
            if copy is None:
                return None
            assert isinstance(self.work, StepPlan)
            return read_result(self.work, copy.read(), self.times.seconds())
        finally:
            self.drop()

    def drop(self) -> None:
        """Release everything. The step must be done, and nothing may read its data."""
        self.closed = True
        self.carry = None
        self.drafts = None
        self.staging = None
        slots, self._slots = self._slots, []
        for give_back in slots:
            give_back()


def _error_of(ticket: Ticket[HostCopy | None] | None) -> BaseException | None:
    return None if ticket is None else ticket.error or ticket.done.error
