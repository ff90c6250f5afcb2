"""StepLease: everything one launched step holds on to. Closed only by processing its result, zombies included."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shared.core.errors import IntegrityError
from shared.device.clock import Clock, Mark, StillClock
from shared.device.events import Event, Ticket
from shared.engine.boundary import Boundary, HostCopy, Packed
from shared.engine.carry import Carry
from shared.engine.masks import HostDrafts, StepMasks, named_drafts, read_drafts
from shared.engine.plan import Admission, StepPlan, StepResult
from shared.engine.results import read_result
from shared.engine.verify import Drafts
from shared.model.interface import LayerMarks


class StepTimes:
    """What one step takes on the forward stream: marked there by the worker, read after the step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._whole: list[Mark] = []
        self._drafting: list[tuple[Mark, Mark]] = []

    def mark(self) -> None:
        """Called where the step begins and where it ends."""
        self._whole.append(self._clock.mark())

    @contextmanager
    def drafting(self) -> Generator[None, None, None]:
        """Around what the drafter does."""
        begin = self._clock.mark()
        yield
        self._drafting.append((begin, self._clock.mark()))

    def seconds(self) -> tuple[float, float]:
        """(by the drafter, by all the rest)."""
        drafting = sum((self._clock.seconds(*span) for span in self._drafting), 0.0)
        return drafting, max(0.0, self._clock.seconds(self._whole[0], self._whole[-1]) - drafting)


@dataclass(slots=True, eq=False)
class StepLease:
    """Owned by the engine. `publish_ready` is made and armed at launch (S6): it fires when the new lengths may be
    read; None for a step with nothing to publish. `done` fires when the result lies on the host."""

    step: int
    work: StepPlan | Admission
    publish_ready: Event | None
    staging: torch.Tensor | None = None
    forward: Ticket[None] | None = None
    computed: Ticket[None] | None = None  # what leaves the model's output: the forward, or a pipeline's last stage
    sampled: Ticket[Packed | None] | None = None  # what goes to the host; of an admission nothing does
    result: Ticket[HostCopy | None] | None = None
    layers: LayerMarks | None = None
    carry: Carry | None = None  # from the forward to the sampling; None before, after, and once closed (H10)
    times: StepTimes = field(default_factory=lambda: StepTimes(StillClock()))
    masks: StepMasks | None = None  # where rows of the step have a grammar
    drafted: Event | None = None  # the same, with drafts: `drafts` are there
    drafts: Packed | None = None  # on the device; kept until the lease ends, for the copy to the host reads them
    host_drafts: Ticket[HostCopy | None] | None = None
    closed: bool = False
    _slots: list[Callable[[], None]] = field(default_factory=list)

    def hold(self, give_back: Callable[[], None]) -> None:
        """Keep a slot of pinned memory until the step is done."""
        self._slots.append(give_back)

    def drafts_are(self, drafts: Drafts, boundary: Boundary) -> None:
        """Called on the forward stream, as soon as the window is drafted."""
        if self.drafted is not None:
            self.drafts = boundary.pack(named_drafts(drafts))
            self.drafted.fire()

    def take_drafts(self, boundary: Boundary) -> HostCopy | None:
        """Begin to copy the drafts to the host. Runs on the copy stream; None where drafting failed."""
        return None if self.drafts is None else boundary.download(self.drafts, self)

    def drafts_on_host(self) -> HostDrafts | None:
        """Read the drafts, once `host_drafts` is done; None where it failed."""
        ticket = self.host_drafts
        if ticket is None or ticket.result is None or ticket.done.error is not None:
            return None
        return read_drafts(ticket.result.read())

    def take_staging(self) -> torch.Tensor:
        """The prompt tokens of this step, once (S9): a second taker would prefill them again."""
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
        """Whether the result lies on the host. One whose sampling is still to be launched has not."""
        return self.result is not None and self.result.done.query()

    def close(self) -> StepResult | None:
        """Give the result and drop all references. Raises what the step raised, or the device behind it, after the
        references are gone."""
        assert self.result is not None
        copy, error = self.result.result, self.result.error or self.result.done.error
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
        """Let go of everything; the step is done, and nothing of it is read any more."""
        self.closed = True
        self.carry = None
        self.drafts = None
        self.staging = None
        slots, self._slots = self._slots, []
        for give_back in slots:
            give_back()
