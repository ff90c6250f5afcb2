"""Order the requests that wait in the router. Sans-IO.

    priority 1     alice   [r r r]
    priority 0     bob     [r r r r r r]     these two take turns, by tokens
                   carol   [r]

Requests of tenants with a higher priority start first. Within a tenant, those with a lower rank (the request's field
`priority`) start first. Tenants of equal priority take turns by deficit round robin: in each round,
each tenant may start QUANTUM more tokens. A request costs its expected tokens (answer_lengths.py) until it ends, then
its used tokens. Requests that other routers start (spending.py) also lower a tenant's deficit, but at most to
MOST_DEBT below the highest deficit of the same priority.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.requests.journal import OpenRequest
from router.tenants.tenant import Tenant

QUANTUM = 128  # in tokens; most requests cost more, so tenants alternate
MOST_DEBT = 1 << 16  # in tokens


@dataclass(slots=True, eq=False)
class Line:
    """One tenant's waiting requests: the lowest rank first, and of equal ranks the oldest. Only absent lines are
    empty."""

    tenant: Tenant
    requests: deque[OpenRequest] = field(default_factory=deque)
    num_tokens: int = 0
    deficit: int = 0  # tokens that the tenant may start; if negative, other tenants start first
    elsewhere: int = 0  # tokens charged for requests of other routers

    @property
    def next_cost(self) -> int:
        return self.requests[0].cost

    def add_request(self, request: OpenRequest) -> None:
        place = len(self.requests)
        while place and self.requests[place - 1].asked.rank > request.asked.rank:
            place -= 1
        self.requests.insert(place, request)
        self.num_tokens += request.cost

    def tokens_ahead(self, rank: int) -> int:
        if not self.requests or self.requests[-1].asked.rank <= rank:
            return self.num_tokens
        return sum(request.cost for request in self.requests if request.asked.rank <= rank)


class FairQueue:
    """Owned by Admission."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}  # by tenant, in the order of turns
        self._absent: dict[str, Line] = {}  # by tenant: empty lines, kept while other tenants of their priority wait
        # rid of a started request -> the line that paid; None if no other tenant of its priority waited
        self._paid: dict[str, Line | None] = {}
        self._num = 0
        self.started: Counter[str] = Counter()  # by tenant: costs of started requests, in tokens

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines.values())

    def push(self, request: OpenRequest) -> None:
        name = request.asked.tenant.name
        if name not in self._lines:
            self._lines[name] = self._absent.pop(name, Line(request.asked.tenant))
        line = self._lines[name]
        line.tenant = request.asked.tenant  # the tenant's priority may have changed
        line.add_request(request)
        self._num += 1

    def take_next(self) -> OpenRequest:
        """Remove and return the next request. At least one request must wait."""
        top = max(line.tenant.priority for line in self)
        ring = [line for line in self if line.tenant.priority == top]
        rounds = max(0, min(-((line.deficit - line.next_cost) // QUANTUM) for line in ring))
        for line in ring:
            line.deficit += rounds * QUANTUM
        line = next(line for line in ring if line.next_cost <= line.deficit)
        request = line.requests[0]
        line.deficit -= request.cost
        self.started[line.tenant.name] += request.cost
        self._paid[request.rid] = line if len(ring) > 1 else None
        self.remove(request)
        if line.requests and line.next_cost > line.deficit:
            self._lines[line.tenant.name] = self._lines.pop(line.tenant.name)
        return request

    def remove(self, request: OpenRequest) -> bool:
        """Return False if the request does not wait."""
        line = self._lines.get(request.asked.tenant.name)
        if line is None or request not in line.requests:
            return False
        line.requests.remove(request)
        line.num_tokens -= request.cost
        self._num -= 1
        if not line.requests:
            self._absent[request.asked.tenant.name] = self._lines.pop(request.asked.tenant.name)
            self._forget(line.tenant.priority)
        return True

    def _forget(self, priority: int) -> None:
        if not any(line.tenant.priority == priority for line in self):
            self._absent = {name: line for name, line in self._absent.items() if line.tenant.priority != priority}

    def over(self, request: OpenRequest) -> None:
        if request.rid not in self._paid:
            self.remove(request)
            return
        unused = request.cost - request.num_used  # may be negative
        self.started[request.asked.tenant.name] -= unused
        line = self._paid.pop(request.rid)
        if line is not None:
            line.deficit += unused

    def started_elsewhere(self, name: str, num_tokens: int) -> None:
        """Charge a waiting tenant for tokens that another router started. A negative number gives tokens back."""
        line = self._lines.get(name)
        if line is None:
            return
        ring = [other for other in self if other.tenant.priority == line.tenant.priority]
        best = max(other.deficit for other in ring)
        if num_tokens > 0:
            num_tokens = max(0, min(num_tokens, MOST_DEBT + line.deficit - best))
        else:
            num_tokens = max(num_tokens, -line.elsewhere)
        line.elsewhere += num_tokens
        line.deficit -= num_tokens
        best = max(other.deficit for other in ring)
        for other in ring if best < 0 else ():  # the best deficit becomes 0, so a newcomer with 0 gets no lead
            other.deficit -= best

    def heaviest(self, newcomer: Tenant, cost: int, num: int) -> list[OpenRequest] | None:
        """Return the requests to drop for a newcomer; None to refuse the newcomer.

        Victims have the lowest priority. Each is the last request of the tenant with the most waiting tokens."""
        lowest = min([newcomer.priority, *(line.tenant.priority for line in self)])
        left = {line.tenant.name: list(line.requests) for line in self if line.tenant.priority == lowest}
        weights = {name: self._lines[name].num_tokens for name in left}
        if newcomer.priority == lowest:
            weights[newcomer.name] = weights.get(newcomer.name, 0) + cost
        victims: list[OpenRequest] = []
        while len(victims) < num:
            name = max(weights, key=lambda one: (weights[one], one == newcomer.name))
            if name == newcomer.name or not left[name]:
                return None
            victims.append(left[name].pop())
            weights[name] -= victims[-1].cost
        return victims

    def ahead(self, newcomer: Tenant, cost: int, rank: int = 0) -> int:
        """Estimate how many tokens go before a newcomer, if tenants of equal priority get the same number."""
        own = self._lines.get(newcomer.name)
        mine = own.tokens_ahead(rank) if own is not None else 0
        higher = sum(line.num_tokens for line in self if line.tenant.priority > newcomer.priority)
        beside = (
            min(line.num_tokens, mine + cost)
            for line in self
            if line is not own and line.tenant.priority == newcomer.priority
        )
        return higher + mine + sum(beside)
