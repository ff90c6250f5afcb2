"""Two cores and the shortest hand-off there can be between them: grant, one pull, admit. No messages, no peers that
die: what is proven here is the cores' half. Page bytes go straight from pool to pool on the decode core's transfer
stream."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shared.core.keys import RequestKey
from shared.core.request import Request, RequestState
from shared.device.events import Ticket
from shared.model.math.interface import Model
from shared.node.records.core import NodeCore
from shared.sched.steps.events import Ended, GrantRevoked, PrefillDone
from shared.sched.steps.prebuilt import Arrival
from tests.support.cores.core_rig import CoreKnobs, Job, Outcome, make_core, retract_somebody
from tests.support.cores.simulated_streams import World


@dataclass(eq=False)
class Handoff:
    """One request on its way: `prefill` and `decode` are the two nodes' records of it."""

    prefill: Request
    decode: Request
    cached: int | None = None  # prefix that the decode core has; None: not granted
    done: PrefillDone | None = None
    pull: Ticket | None = None
    held_row: int = 0
    over: bool = False


@dataclass
class CorePair:
    prefill: NodeCore
    decode: NodeCore
    handoffs: dict[RequestKey, Handoff] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)

    def submit(self, job: Job) -> Handoff:
        handoff = Handoff(job.request(handoff_to="decode"), job.request())
        self.handoffs[handoff.decode.key] = handoff
        self.prefill.scheduler.intake.submit(handoff.prefill)
        return handoff

    def tick(self) -> None:
        """One round of both nodes' loops; waits for a step when nothing else can happen."""
        moved = self.prefill.loop.step()
        moved |= self.decode.loop.step()
        self._take_events()
        moved |= sum(self._advance(handoff) for handoff in list(self.handoffs.values())) > 0
        if not moved:
            self.wait()

    def wait(self) -> None:
        self.prefill.loop.step(block=True)
        self.decode.loop.step(block=True)
        for handoff in self.handoffs.values():
            if handoff.pull is not None:
                handoff.pull.done.synchronize()
        self._take_events()

    def _take_events(self) -> None:
        for event in self.outcome.take(self.prefill):
            if isinstance(event, PrefillDone):
                self.handoffs[event.request.key].done = event
        for event in self.outcome.take(self.decode):
            if isinstance(event, GrantRevoked):
                self.handoffs[event.request.key].held_row = event.row

    def _advance(self, handoff: Handoff) -> bool:
        """Do the next step that this hand-off can take now. Return whether there was one."""
        if handoff.cached is None:
            return self._grant(handoff)
        if handoff.pull is not None and handoff.pull.done.query():
            self._land(handoff)
        elif handoff.prefill.finished or handoff.held_row and handoff.pull is None:
            self._give_up(handoff)
        elif handoff.done is not None and handoff.pull is None:
            self._pull(handoff)
        else:
            return False
        return True

    def _grant(self, handoff: Handoff) -> bool:
        if handoff.prefill.finished:
            del self.handoffs[handoff.decode.key]
            return True
        if self.decode.scheduler.queues.waiting:
            return False  # retracted requests come first for memory
        if self.decode.scheduler.queues.prefixes.makes_wait(handoff.decode, "p"):
            return False
        handoff.cached = self.decode.scheduler.grants.grant(handoff.decode, "p")
        if handoff.cached is not None:
            self.prefill.scheduler.queues.set_granted(handoff.prefill.key)
        return handoff.cached is not None

    def _give_up(self, handoff: Handoff) -> None:
        """Drop a hand-off that ended with its first token, or whose grant was revoked before its pull began."""
        if handoff.decode.state is RequestState.GRANTED:
            _abort_quietly(self.decode, handoff.decode.key)
            self._take_events()
        self.decode.scheduler.queues.budget.release_held(handoff.held_row)
        if not handoff.prefill.finished:  # the request lives on at the decode core and is computed there
            _abort_quietly(self.prefill, handoff.prefill.key)
        del self.handoffs[handoff.decode.key]

    def _pull(self, handoff: Handoff) -> None:
        assert handoff.done is not None and handoff.cached is not None
        kv, settings = self.decode.kv, self.decode.settings
        first = handoff.cached // kv.page_size * kv.num_groups
        last = settings.num_pages(handoff.done.committed)
        target = kv.rows.pages_of(handoff.decode.row)[first:last]
        is_read = target != 0
        source = self.prefill.kv.rows.pages_of(handoff.prefill.row)[first:last][is_read]
        target = target[is_read]
        transfer = self.decode.streams.transfer
        self.decode.engine.stages.flush()
        if self.decode.engine.last_done is not None:
            transfer.wait(self.decode.engine.last_done)
        handoff.pull = transfer.launch(lambda: self._copy(source, target), label=f"pull({handoff.decode.key.rid})")

    def _copy(self, source: np.ndarray, target: np.ndarray) -> Generator[None, None, None]:
        for mine, theirs in zip(target.tolist(), source.tolist(), strict=True):
            self.decode.pool.page_view(mine)[:] = self.prefill.pool.page_view(theirs)
            yield

    def _land(self, handoff: Handoff) -> None:
        done = handoff.done
        assert done is not None and handoff.pull is not None and handoff.pull.error is None
        if handoff.held_row:
            self.decode.scheduler.queues.budget.release_held(handoff.held_row)
        elif handoff.decode.state is RequestState.GRANTED:
            self.decode.loop.admit(
                [Arrival(handoff.decode, done.token, done.committed, done.logprobs, done.draft_state)]
            )
        self.prefill.scheduler.queues.complete_handoff(handoff.prefill.key)
        del self.handoffs[handoff.decode.key]

    @property
    def busy(self) -> bool:
        cores = (self.prefill, self.decode)
        return bool(self.handoffs) or any(core.queues.requests or not core.loop.idle for core in cores)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def _abort_quietly(core: NodeCore, key: RequestKey) -> None:
    """Abort a hand-off on one core, and drop the event: the request itself goes on."""
    core.queues.abort(key)
    kept = [event for event in core.queues.take_events() if not (isinstance(event, Ended) and event.key == key)]
    core.queues.events.extend(kept)


def make_pair(
    knobs: CoreKnobs, prefill_pages: int = 600, worlds: tuple[World, World] | None = None, model: Model | None = None
) -> CorePair:
    """`model`: another than the knobs name, for both cores."""
    first, second = worlds or (None, None)
    prefill = make_core(replace(knobs, num_pages=prefill_pages, seed=knobs.seed + 1), first, model=model)
    return CorePair(prefill, make_core(knobs, second, model=model))


def run_pair(
    pair: CorePair,
    jobs: Sequence[Job],
    *,
    retract_every: int = 0,
    rng: random.Random | None = None,
    budget: int = 20000,
    max_retractions: int = 20,
) -> Outcome:
    """All jobs through both cores, in a few waves; every now and then a victim at the decode core."""
    left, loops, retractions = list(jobs), 0, 0
    rng = rng or random.Random(0)
    while left or pair.busy:
        loops += 1
        assert loops < budget, f"no end after {loops} rounds: {len(pair.handoffs)} hand-offs open"
        while left and rng.random() < 0.5:
            pair.submit(left.pop(0))
        pair.tick()
        if retract_every and loops % retract_every == 0 and retractions < max_retractions:
            retract_somebody(pair.decode, rng)
            retractions += 1
    pair.outcome.num_steps = pair.prefill.loop.num_steps + pair.decode.loop.num_steps
    return pair.outcome
