"""Routers that share tenants, in a time of their own: production limits, queues and ledgers, and a network that delays,
loses, reorders and triples what they write.

    clients -> Allowance.charge -> runs for a while -> settle
    every 0.25 s: Ledger.write -> network -> Ledger.read
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.queue.fair_queue import FairQueue
from router.queue.rate_limit import RateLimits
from router.queue.spending import Ledger, Reading
from router.requests.journal import OpenRequest
from router.requests.new_request import NewRequest
from router.tenants.book import Tenants
from router.tenants.keys_file import hash_of, parse_keys
from router.tenants.tenant import Tenant
from shared.core.errors import RateLimited
from shared.core.sampling_params import SamplingParams
from shared.wire.codec import decode, encode
from shared.wire.messages import Spending

TICK_S = 0.25
SECRET = "the routers' own"
PROMPT = 10


def keys_text(names: Sequence[str], *, requests: int = 0, tokens: int = 0, secret: str = SECRET) -> str:
    lines = [f'stream_secret = "{secret}"']
    for name in names:
        limits = f"requests_per_minute = {requests}\ntokens_per_minute = {tokens}"
        lines += [f"[tenants.{name}]", f'keys = ["{hash_of(name)}"]', limits]
    return "\n".join(lines)


class TenantBooks:
    """One router's tenants: what app.py builds."""

    def __init__(self, router_id: str, epoch: int, text: str, now: float = 0.0) -> None:
        self.name, self.tenants = router_id, Tenants(parse_keys(text))
        self.limits, self.queue = RateLimits(), FairQueue()
        secret = self.tenants.now.stream_secret
        self.ledger = Ledger((router_id, epoch), secret, self.tenants, self.limits, self.queue, now)

    def tenant(self, name: str) -> Tenant:
        return next(tenant for tenant in self.tenants.all() if tenant.name == name)

    def left(self, name: str, unit: str, now: float) -> int:
        return self.limits.of(self.tenant(name)).meters[unit].remaining(now)


@dataclass(frozen=True)
class Network:
    """`cut`: router that neither hears nor is heard, and until when. `deaf`: only doesn't hear."""

    most_delay_s: float = 1.0
    loss: float = 0.2
    cut: str = ""
    deaf: bool = False
    until: float = 1e9

    def carries(self, source: str, target: str, now: float) -> bool:
        return now >= self.until or not (target == self.cut or (source == self.cut and not self.deaf))


class World:
    """Owned by one test."""

    def __init__(self, num: int, text: str, seed: int, network: Network = Network()) -> None:  # noqa: B008
        self.rng, self.network, self.now = random.Random(seed), network, 0.0
        self.routers = [TenantBooks(f"r{index}", 100 + index, text) for index in range(num)]
        self.used: Counter[str] = Counter()  # tokens by router
        self.admitted: Counter[str] = Counter()  # requests by router
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._agenda, (when, self._count, action))

    def run(self, seconds: float) -> None:
        for index, router in enumerate(self.routers):
            self.at(self.now + index * TICK_S / len(self.routers), lambda it=router: self._tick(it))  # type: ignore[misc]
        while self._agenda and self._agenda[0][0] < seconds:
            self.now, _, action = heapq.heappop(self._agenda)
            action()

    def _tick(self, router: TenantBooks) -> None:
        message = router.ledger.write(self.now)
        if message is not None:
            self._send(router.name, message)
        self.at(self.now + TICK_S, lambda: self._tick(router))

    def _send(self, source: str, message: Spending) -> None:
        for router in self.routers * 3:
            if self.rng.random() < self.network.loss or not self.network.carries(source, router.name, self.now):
                continue
            later = self.now + self.rng.uniform(0.0, self.network.most_delay_s)
            self.at(later, lambda it=router: self._read(it, message))  # type: ignore[misc]

    def _read(self, router: TenantBooks, message: Spending) -> None:
        copy = decode(encode(message))
        assert isinstance(copy, Spending) and router.ledger.read(copy, self.now) is Reading.DONE

    def clients(self, router: TenantBooks, name: str, per_s: float, most: int) -> None:
        """Ask at random moments for up to `most` tokens, and use a part of them."""

        def come() -> None:
            cost = self.rng.randint(most // 5, most)
            try:
                charge = router.limits.of(router.tenant(name)).charge(cost, self.now)
            except RateLimited:
                pass
            else:
                num_used = self.rng.randint(cost // 2, cost)
                self.used[router.name] += num_used
                self.admitted[router.name] += 1
                self.at(self.now + self.rng.uniform(0.1, 3.0), lambda: charge.settle(num_used, self.now))
            self.at(self.now + self.rng.expovariate(per_s), come)

        self.at(self.now + self.rng.expovariate(per_s), come)

    def starts(self, router: TenantBooks, per_s: float, started: Counter[str]) -> None:
        """Start the queue's next request so often; its tenant has another at once."""

        def start() -> None:
            request = router.queue.take_next()
            started[request.asked.tenant.name] += request.cost
            router.queue.push(self.waiting(request.asked.tenant))
            self.at(self.now + self.rng.expovariate(per_s), start)

        self.at(self.now + self.rng.expovariate(per_s), start)

    def waiting(self, tenant: Tenant, cost: int = 0) -> OpenRequest:
        self._count += 1
        sampling = SamplingParams(max_tokens=cost - PROMPT if cost else self.rng.randint(100, 4000))
        return OpenRequest(f"w{self._count}", NewRequest([1] * PROMPT, 1, sampling, 0, tenant=tenant), 1e9)
