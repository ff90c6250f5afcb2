"""Reserve memory for running rows and waiting prompts, by the rules of `shared/sched/memory/page_budget.py`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from shared.core.request import Request, RequestState
from shared.core.states import PageState
from shared.kv.manager import KVManager
from shared.sched.memory.page_budget import Shortage, pick_victim
from shared.sched.memory.room import NoRoom
from shared.sched.memory.ungranted import UngrantedPins
from shared.sched.planning.growth import Growth
from shared.sched.requests.queues import Queues
from shared.sched.steps.events import HandoffUnpinned
from shared.sched.steps.settings import SchedSettings

S = RequestState


class Freed(Enum):
    """Whose memory was reclaimed. `LENT`: the cache's, by the end of a loan or a pull."""

    NOTHING = 0
    LENT = 1
    HELD = 2


class Capacity:
    def __init__(self, kv: KVManager, settings: SchedSettings, queues: Queues) -> None:
        self.settings = settings
        self._kv = kv
        self._queues = queues
        self._budget = queues.budget
        self.growth = Growth(settings, queues)
        # the request that took memory from ungranted hand-offs last; until it begins, these get none back
        self._taker: Request | None = None
        self._no_room = NoRoom(queues.budget)
        self._no_room_ungranted = NoRoom(queues.budget)

    def reserve_running(self, width: int) -> set[Request]:
        """Return the rows of the next step, with pages for all tokens that the step may commit (rule a)."""
        stepping: set[Request] = set()
        batch = self._queues.running
        order = sorted(range(len(batch)), key=lambda i: batch.reqs[i].arrival)
        for i in order:
            req = batch.reqs[i]
            if self._least_outputs(i) >= req.ask.sampling.max_tokens or req.state is not S.RUNNING:
                continue
            if self.make_room(req, int(batch.seq_lens.hi[i]) + width):
                stepping.add(req)
        return {req for req in stepping if req.state is S.RUNNING}

    def _least_outputs(self, index: int) -> int:
        """Return a lower bound of the answer's length after the steps in flight."""
        batch = self._queues.running
        req = batch.reqs[index]
        # each step in flight adds at least one token
        return max(
            int(batch.seq_lens.lo[index]) + 1 - len(req.ask.prompt_ids),
            len(req.output_ids) + int(batch.in_flight[index]),
        )

    def make_room(self, req: Request, num_tokens: int) -> bool:
        while not self._budget.cover(req.row, num_tokens):
            missing = self.settings.num_pages(num_tokens) - int(self._kv.rows.num_pages[req.row])
            lacking = Shortage(missing - self._kv.num_available)
            if lacking.pages <= self._budget.num_held:
                return False  # rule d: skip this step
            if self._reclaim(lacking, self._pins(), row=req) is Freed.NOTHING or not req.row:
                return False
        return True

    def _reclaim_for(self, req: Request, lacking: Shortage, pins: UngrantedPins | None) -> Freed:
        """Reclaim for a request that waits, but begin nothing for growth that is only foreseen."""
        if req is not self._taker and 0 < lacking.pages <= self.keep_free(req) - self.headroom():
            return Freed.NOTHING
        return self._reclaim(lacking, pins)

    def _reclaim(self, lacking: Shortage, pins: UngrantedPins | None, row: Request | None = None) -> Freed:
        """Let one holder of memory give way, in the order of rules f and c.

        The order: loans, pulls, ungranted hand-offs (if `pins` are given), all others (if a running `row` asks). A
        loan's pages are free at once, but it has no row. A pull's memory is free after its copies.
        """
        queues = self._queues
        if (lacking.pages and queues.end_loan()) or queues.give_up_pull():
            return Freed.LENT
        ungranted = pins.pop_youngest() if pins is not None else None
        if ungranted is not None:
            self._unpin(ungranted)
            return Freed.HELD
        if row is None:
            return Freed.NOTHING
        victim = pick_victim(queues.holders())
        if victim is None and queues.pins_handoffs():
            return Freed.NOTHING
        # Without a victim, the row is the only holder of pages, and still lacks some. Its lock also pins the cached
        # pages of an equal prompt that ran at the same time. When it begins again, it uses these pages and fits.
        queues.retract(victim or row)
        self.growth.doubt()
        return Freed.HELD

    def wanted(self) -> int:
        waiting = (req.num_tokens for req in self._queues.waiting if req.may_begin)
        return self.headroom() + sum(map(self.settings.num_pages, waiting))

    def keep_free(self, req: Request | None = None) -> int:
        """Return how many pages must stay free, for the rows that began and for `req` (rule a)."""
        return max(self.headroom(), self.growth.pages(req))

    def headroom(self) -> int:
        queues = self._queues
        num_begun = len(queues.prefilling) + len(queues.restoring)
        return self._budget.headroom(len(queues.running) + len(queues.granted) + num_begun)

    def admit_waiting(self) -> None:
        """Admit requests in order of arrival. A request that finds no room holds back younger ones of its kind.

        Ungranted hand-offs are one kind. All other requests are the second kind, and take memory from ungranted ones.
        """
        pins = self._pins()
        self._queues.prefixes.new_round()
        if self._taker is not None and self._taker.state is not S.WAITING:
            self._taker = None
        for req in self._candidates(pins):
            if req.key in self._queues.ungranted:
                self._admit_ungranted(req, pins)
            elif not self._admit_other(req, pins):
                return

    def _candidates(self, pins: UngrantedPins) -> Iterator[Request]:
        """Yield the waiting requests that may begin if they fit."""
        queues = self._queues
        for req in list(queues.waiting):
            if queues.oldest_offer is not None and req.arrival > queues.oldest_offer:
                return  # an older Offer gets memory first
            if not req.may_begin:
                continue  # its grammar is compiling
            if req.constraint is not None and req.constraint.error is not None:
                queues.fail(req.key, req.constraint.error)
                continue
            if req.key in queues.ungranted and (pins.is_full or self._taker is not None):
                continue
            if not queues.prefixes.makes_wait(req):
                yield req

    def _admit_other(self, req: Request, pins: UngrantedPins) -> bool:
        while (lacking := self._admit(req, self._no_room, pins)) is not None:
            if self._reclaim_for(req, lacking, pins if self._pins_help(lacking, pins) else None) is not Freed.HELD:
                return False  # rule f: the next round uses the memory of a loan or pull
            self._taker = req
        return True

    def _pins(self) -> UngrantedPins:
        return UngrantedPins(self._kv, self.settings, self._queues.ungranted.values())

    def _pins_help(self, lacking: Shortage, pins: UngrantedPins) -> bool:
        """Return whether ungranted hand-offs have enough pages, and held pages are too few (rule d)."""
        if not lacking.pages:
            return not self._budget.holds_rows
        return 0 < lacking.pages - self._budget.num_held <= pins.num_pages

    def _admit_ungranted(self, req: Request, pins: UngrantedPins) -> None:
        has_room = pins.have_room(req)
        lacking = self._admit(req, self._no_room_ungranted) if has_room else None
        if has_room and lacking is None:
            pins.add(req)
            return
        pins.is_full = True
        if lacking is not None:
            self._reclaim_for(req, lacking, pins=None)

    def _admit(self, req: Request, no_room: NoRoom, pins: UngrantedPins | None = None) -> Shortage | None:
        """Begin the request and return None, or return its shortage."""
        keep_free = self.keep_free(req)
        lacking = no_room.lacking(req, keep_free)
        if lacking is not None and (pins is None or not self._pins_help(lacking, pins)):
            return lacking
        ids, extra = req.all_ids(), 0 if req.handoff_to is not None else self.settings.width
        cached = self._budget.reserve(req, ids, extra, keep_free, PageState.ACTIVE)
        if isinstance(cached, Shortage):
            no_room.note(req, cached, keep_free)
            return cached
        queues = self._queues
        queues.waiting.remove(req)
        if queues.offload.restore(req, ids, cached):
            req.to(S.RESTORING)
        else:
            queues.begin_prefill(req, ids, cached)
        self.growth.begin(req)
        return None

    def _unpin(self, req: Request) -> None:
        """Retract an ungranted hand-off, whose first token will be computed again."""
        if self._queues.handed_off.pop(req.key, None) is not None:
            req.output_ids.pop()
        self._queues.events.append(HandoffUnpinned(req))
        self._queues.retract(req)
