"""Decide which requests are admitted, which wait, and which start. Sans-IO.

open --no room--> queue --nodes have room, in turn--> start
  |                 |--deadline, client gone, pushed out by a lighter tenant
  '--queue full, or the deadline can't be met: refused immediately, with Retry-After
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.fleet.registry import RegisteredNode, Registry, not_held_back, of_role
from router.queue.fair_queue import FairQueue
from router.queue.pace import Pace
from router.requests.answer_lengths import AnswerLengths
from router.requests.journal import Journal, OpenRequest
from router.tenants.tenant import Tenant
from shared.core.errors import DeadlineExceeded, DeadlineUnreachable, QueueFull


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Requests that arrive together. `cost`: their expected tokens. `within_s`: seconds until their deadline.
    `rank`: their place among the tenant's requests."""

    tenant: Tenant
    num_requests: int
    cost: int
    within_s: float
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """One tenant's part of the queue, for /admin/status."""

    tenant: str
    priority: int
    requests: int
    tokens: int
    oldest_s: float


class AdmissionQueue:
    def __init__(self, registry: Registry, journal: Journal, max_open: int, max_queued: int) -> None:
        self._registry, self._journal = registry, journal
        self._max_open, self._max_queued = max_open, max_queued
        self.queue, self.answers, self._pace = FairQueue(), AnswerLengths(), Pace()

    def check(self, new: Newcomer, now: float) -> list[OpenRequest]:
        """Return the queued requests to drop. Raise QueueFull, DeadlineExceeded or DeadlineUnreachable."""
        self._check_deadline(new)
        return self.victims(new.tenant, new.num_requests, new.cost, now)

    def victims(self, tenant: Tenant, num_requests: int, cost: int, now: float) -> list[OpenRequest]:
        """Return the queued requests to drop for new ones. Raise QueueFull."""
        excess = len(self.queue) + num_requests - self._max_queued
        num = math.ceil(max(0, excess - self.room(now))) if excess > 0 else 0
        victims = self.queue.heaviest(tenant, cost, num) if num else []
        if victims is None:
            raise self.full(num_requests)
        return victims

    def _check_deadline(self, new: Newcomer) -> None:
        """Raise an error if the deadline can't be met. The wait is estimated only if the queue's pace is known: a wrong
        estimate could refuse requests for ever."""
        if new.within_s <= 0:
            raise DeadlineExceeded("the request arrived after its deadline")
        wait_s = self._pace.seconds(self.queue.ahead(new.tenant, new.cost, new.rank)) if len(self.queue) else None
        if wait_s is None:
            return
        late_s = wait_s + self._pace.service_s(new.cost) - new.within_s
        if late_s > 0:
            raise DeadlineUnreachable(
                f"the request would take {late_s:.1f} s longer than its client waits; try again",
                retry_after_s=late_s,
            )

    def full(self, num_requests: int) -> QueueFull:
        waiting = len(self.queue)
        mean = sum(line.num_tokens for line in self.queue) / max(1, waiting)
        seconds = self._pace.seconds(mean * num_requests) if waiting else None
        return QueueFull(f"{waiting} requests wait already; try again", retry_after_s=seconds)

    def push(self, request: OpenRequest, now: float) -> None:
        request.queued_at = now
        self.queue.push(request)

    def next(self, now: float) -> OpenRequest | None:
        if not len(self.queue) or self.room(now) <= 0:
            self._pace.note(now, 0, is_backed_up=bool(len(self.queue)))
            return None
        request = self.queue.take_next()
        self._pace.note(now, request.cost, is_backed_up=bool(len(self.queue)))
        request.started_at = now
        return request

    def is_hopeless(self, request: OpenRequest, now: float) -> bool:
        """Return whether a request that has waited can't end before its deadline. A request that leaves the
        queue empty starts anyway, to test the estimate."""
        cost = request.asked.cost(self.answers.expected(request.asked.tenant))
        late = now + self._pace.service_s(cost) > request.deadline
        return late and bool(len(self.queue)) and request.queued_at < now

    def over(self, request: OpenRequest, now: float) -> None:
        if request.is_done:
            self.answers.ended(request)
            self._pace.ended(request, now)
        self.queue.over(request)

    def room(self, now: float) -> float:
        """Return how many sequences may start now. Without nodes, only the limit on open requests applies, and
        placement raises NoNodes."""
        nodes = self._registry.usable(now)
        prefills = not_held_back(of_role("prefill", nodes))
        decodes = not_held_back(of_role("decode", nodes))
        if nodes and not any(map(has_room_for_prompts, prefills or decodes)):
            return 0
        free = sum(map(free_sequences, decodes or prefills)) if nodes else math.inf
        return min(free, self._max_open - (len(self._journal) - len(self.queue)))

    def waiting(self, now: float) -> list[Waiting]:
        return [
            Waiting(
                line.tenant.name,
                line.tenant.priority,
                len(line.requests),
                line.num_tokens,
                round(now - min(request.queued_at for request in line.requests), 3),
            )
            for line in self.queue
        ]


def free_sequences(node: RegisteredNode) -> float:
    return max(0, node.figures.room.most_sequences - node.ours.open_sequences)


def has_room_for_prompts(node: RegisteredNode) -> bool:
    return node.ours.open_prompt_tokens < node.figures.room.most_prompt_tokens
