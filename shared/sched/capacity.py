"""Room for rows that step and for prompts that wait: the liveness rules of `shared/sched/page_budget.py`, carried out.

Decides who reserves, who is admitted and who gives way for it. Knows nothing of steps, plans or results.
"""

from __future__ import annotations

from shared.core.request import Request, RequestState
from shared.core.states import PageState
from shared.kv.manager import KVManager, page_count
from shared.sched.events import HandoffUnpinned
from shared.sched.page_budget import pick_victim
from shared.sched.queues import Queues
from shared.sched.settings import SchedSettings
from shared.sched.ungranted import UngrantedPins, waits_for_sibling

S = RequestState


class Capacity:
    """Asked in each round of planning: first for the running rows, then for those who wait."""

    def __init__(self, kv: KVManager, settings: SchedSettings, queues: Queues) -> None:
        self.settings = settings
        self._kv = kv
        self._queues = queues
        self._budget = queues.budget

    def reserve_running(self, width: int) -> set[Request]:
        """Rows that step: not surely at their end, and with pages for what they may commit (rule a)."""
        stepping: set[Request] = set()
        batch = self._queues.running
        order = sorted(range(len(batch)), key=lambda i: batch.reqs[i].arrival)
        for i in order:
            req = batch.reqs[i]
            outputs = int(batch.seq_lens.lo[i]) + 1 - len(req.prompt_ids)
            if outputs >= req.sampling.max_tokens or req.state is not S.RUNNING:
                continue
            if self.make_room(req, int(batch.seq_lens.hi[i]) + width):
                stepping.add(req)
        return {req for req in stepping if req.state is S.RUNNING}

    def make_room(self, req: Request, num_tokens: int) -> bool:
        while not self._budget.cover(req.row, num_tokens):
            missing = page_count(num_tokens, self.settings.page_size) - int(self._kv.rows.num_pages[req.row])
            if self._kv.num_available + self._budget.num_held >= missing:
                return False  # rule d: skip this step
            victim = pick_victim(self._queues.holders())
            if victim is None and self._queues.pins_handoffs():
                return False
            # Alone and still short: its lock pins pages that the cache had under the same keys as its own (two equal
            # prompts were computed side by side). Beginning again it takes those, and then it fits: `submit` saw to it.
            victim = victim or req
            self._queues.retract(victim)
            if victim is req:
                return False
        return True

    def headroom(self) -> int:
        queues = self._queues
        num_begun = len(queues.prefilling) + len(queues.restoring)
        return self._budget.headroom(len(queues.running) + len(queues.granted) + num_begun)

    def admit_waiting(self, oldest_offer: int | None) -> None:
        """Admit by arrival. Nobody is overtaken for memory by his own kind, and a grant goes before those without one.

        The first without a grant that does not fit holds back all who have none; the first of the others ends the
        round. So a plan tries one of each kind in vain, however long the queue is."""
        queues = self._queues
        pins = UngrantedPins(self._kv, self.settings, queues.ungranted.values())
        for req in list(queues.waiting):
            if oldest_offer is not None and req.arrival > oldest_offer:
                return  # an Offer is older: it gets memory first
            if not req.may_begin:
                continue  # its grammar is being compiled
            if req.constraint is not None and req.constraint.error is not None:
                queues.fail(req.key, req.constraint.error)
                continue
            is_ungranted = req.key in queues.ungranted
            if is_ungranted and pins.is_full:
                continue
            if self._kv.cache.enabled and waits_for_sibling(req, queues.requests):
                continue
            if is_ungranted:
                self._admit_ungranted(req, pins)
                continue
            while not self._admit(req):
                victim = pins.pop_youngest()
                if victim is None:
                    return
                self._unpin(victim)

    def _admit_ungranted(self, req: Request, pins: UngrantedPins) -> None:
        if pins.have_room(req) and self._admit(req):
            pins.add(req)
        else:
            pins.is_full = True

    def _admit(self, req: Request) -> bool:
        ids, extra = req.all_ids(), 0 if req.handoff_to is not None else self.settings.width
        cached = self._budget.reserve(req, ids, extra, self.headroom(), PageState.ACTIVE)
        if cached is None:
            return False
        queues = self._queues
        queues.waiting.remove(req)
        if queues.offload.restore(req, ids, cached):
            req.to(S.RESTORING)
        else:
            queues.begin_prefill(req, ids, cached)
        return True

    def _unpin(self, req: Request) -> None:
        """An ungranted hand-off gives way and is prefilled again later; its first token will be the same."""
        if self._queues.handed_off.pop(req.key, None) is not None:
            req.output_ids.pop()
        self._queues.events.append(HandoffUnpinned(req))
        self._queues.retract(req)
