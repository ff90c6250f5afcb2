"""Reserve memory for running rows and waiting prompts, by the rules of `shared/sched/page_budget.py`."""

from __future__ import annotations

from shared.core.request import Request, RequestState
from shared.core.states import PageState
from shared.kv.manager import KVManager, page_count
from shared.sched.events import HandoffUnpinned
from shared.sched.page_budget import Shortage, pick_victim
from shared.sched.queues import Queues
from shared.sched.settings import SchedSettings
from shared.sched.ungranted import UngrantedPins

S = RequestState


class Capacity:
    def __init__(self, kv: KVManager, settings: SchedSettings, queues: Queues) -> None:
        self.settings = settings
        self._kv = kv
        self._queues = queues
        self._budget = queues.budget
        # the request that took memory from ungranted hand-offs last; until it begins, these get none back
        self._taker: Request | None = None

    def reserve_running(self, width: int) -> set[Request]:
        """Return the rows of the next step, with pages for all tokens that the step may commit (rule a)."""
        stepping: set[Request] = set()
        batch = self._queues.running
        order = sorted(range(len(batch)), key=lambda i: batch.reqs[i].arrival)
        for i in order:
            req = batch.reqs[i]
            if self._least_outputs(i) >= req.sampling.max_tokens or req.state is not S.RUNNING:
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
            int(batch.seq_lens.lo[index]) + 1 - len(req.prompt_ids), len(req.output_ids) + int(batch.in_flight[index])
        )

    def make_room(self, req: Request, num_tokens: int) -> bool:
        while not self._budget.cover(req.row, num_tokens):
            missing = page_count(num_tokens, self.settings.page_size) - int(self._kv.rows.num_pages[req.row])
            if self._kv.num_available + self._budget.num_held >= missing:
                return False  # rule d: skip this step
            if self._queues.end_loan() or self._queues.give_up_pull():
                continue  # rule f: a loan frees its pages now, a pull frees them after its copies
            ungranted = self._pins().pop_youngest()
            if ungranted is not None:
                self._unpin(ungranted)
                continue
            victim = pick_victim(self._queues.holders())
            if victim is None and self._queues.pins_handoffs():
                return False
            # This row is the only holder of pages, and still lacks some. Its lock also pins the cached pages of an
            # equal prompt that ran at the same time. When the row begins again, it uses these pages and fits.
            victim = victim or req
            self._queues.retract(victim)
            if victim is req:
                return False
        return True

    def wanted(self) -> int:
        waiting = (req.num_tokens for req in self._queues.waiting if req.may_begin)
        return self.headroom() + sum(page_count(num_tokens, self.settings.page_size) for num_tokens in waiting)

    def headroom(self) -> int:
        queues = self._queues
        num_begun = len(queues.prefilling) + len(queues.restoring)
        return self._budget.headroom(len(queues.running) + len(queues.granted) + num_begun)

    def admit_waiting(self) -> None:
        """Admit requests in order of arrival. A request that finds no room holds back younger ones of its kind.

        Ungranted hand-offs are one kind. All other requests are the second kind, and take memory from ungranted ones.
        """
        queues = self._queues
        pins = self._pins()
        queues.prefixes.new_round()
        if self._taker is not None and self._taker.state is not S.WAITING:
            self._taker = None
        for req in list(queues.waiting):
            if queues.oldest_offer is not None and req.arrival > queues.oldest_offer:
                return  # an older Offer gets memory first
            if not req.may_begin:
                continue  # its grammar is compiling
            if req.constraint is not None and req.constraint.error is not None:
                queues.fail(req.key, req.constraint.error)
                continue
            is_ungranted = req.key in queues.ungranted
            if is_ungranted and (pins.is_full or self._taker is not None):
                continue
            if queues.prefixes.makes_wait(req):
                continue
            if is_ungranted:
                self._admit_ungranted(req, pins)
                continue
            while (lacking := self._admit(req)) is not None:
                if self._gives_way():
                    return  # rule f: the next round uses the freed memory
                victim = pins.pop_youngest() if self._pins_help(lacking, pins) else None
                if victim is None:
                    return
                self._taker = req
                self._unpin(victim)

    def _pins(self) -> UngrantedPins:
        return UngrantedPins(self._kv, self.settings, self._queues.ungranted.values())

    def _pins_help(self, lacking: Shortage, pins: UngrantedPins) -> bool:
        """Return whether ungranted hand-offs have enough pages, and held pages are too few (rule d)."""
        if not lacking.pages:
            return not self._budget.holds_rows
        return 0 < lacking.pages - self._budget.num_held <= pins.num_pages

    def _admit_ungranted(self, req: Request, pins: UngrantedPins) -> None:
        has_room = pins.have_room(req)
        if has_room and self._admit(req) is None:
            pins.add(req)
            return
        pins.is_full = True
        if has_room:
            self._gives_way()  # rule f

    def _gives_way(self) -> bool:
        """End a loan or a pull. The end of a pull also frees a row."""
        return (self._kv.rows.num_free > 0 and self._queues.end_loan()) or self._queues.give_up_pull()

    def _admit(self, req: Request) -> Shortage | None:
        """Begin the request and return None, or return its shortage."""
        ids, extra = req.all_ids(), 0 if req.handoff_to is not None else self.settings.width
        cached = self._budget.reserve(req, ids, extra, self.headroom(), PageState.ACTIVE)
        if isinstance(cached, Shortage):
            return cached
        queues = self._queues
        queues.waiting.remove(req)
        if queues.offload.restore(req, ids, cached):
            req.to(S.RESTORING)
        else:
            queues.begin_prefill(req, ids, cached)
        return None

    def _unpin(self, req: Request) -> None:
        """Retract an ungranted hand-off, whose first token will be computed again."""
        if self._queues.handed_off.pop(req.key, None) is not None:
            req.output_ids.pop()
        self._queues.events.append(HandoffUnpinned(req))
        self._queues.retract(req)
