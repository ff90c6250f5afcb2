"""Apply limits and shares across all routers: exchange what each router has charged its tenants. Sans-IO.

    our counters --write, every PERIOD_S--> Spending --nodes--> other routers --read--> their meters and their queue

Counts are cumulative, so a lost, late or repeated body does no lasting harm. The receiver charges the increase since
the last body, and gives a decrease back. Counts from before the receiver began are only a baseline. Routers with the
same keys file share the secret that signs bodies. Nodes don't have this secret. A body also has the sender's limits:
if they differ from ours for long, one router's keys file is old.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from router.fleet.leaving import By
from router.fleet.registry import RegisteredNode
from router.queue.fair_queue import FairQueue
from router.queue.rate_limit import REQUESTS, TOKENS, RateLimits
from router.tenants.book import Tenants
from router.tenants.keys_file import NO_KEYS
from router.tenants.tenant import Tenant
from shared.wire.messages import Spending
from shared.wire.ranges import MAX_NAME, Count

PERIOD_S = 0.5
DIFFERS_S = 10.0  # limits differ for a moment while a new keys file is spread
REPEAT_S = 5.0  # after this time an unchanged body is repeated, because the last one may be lost
MAX_ROWS = 512  # rows in one body; with the longest names they take 61 KiB
MAX_ROUTERS = 64
NUM_CARRIERS = 3
MAC_BYTES = 32
PURPOSE = b"baton: what routers charged tenants"


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One tenant's counts at one router. `since_ms`: the router's age when the counts began."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    since_ms: Count
    requests: Count
    tokens: Count
    started: Count
    requests_per_minute: Count = 0
    tokens_per_minute: Count = 0

    @property
    def limits(self) -> tuple[int, int]:
        return self.requests_per_minute, self.tokens_per_minute


class SpendingBody(msgspec.Struct, frozen=True, array_like=True):
    age_ms: Count  # the sending router's age
    rows: Annotated[list[Row], Meta(max_length=MAX_ROWS)]


class Reading(Enum):
    DONE = "done"
    UNSIGNED = "unsigned"
    OTHER_VERSION = "other version"


class SpentCounts(NamedTuple):
    requests: int = 0
    tokens: int = 0
    started: int = 0


@dataclass(slots=True)
class Account:
    """One tenant's account at another router: the last counts, and the units that our meters took for these counts."""

    counts: SpentCounts
    taken: dict[str, int] = field(default_factory=lambda: {REQUESTS: 0, TOKENS: 0})


@dataclass(slots=True)
class Life:
    """The state of another router's newest epoch."""

    epoch: int
    number: int = -1
    heard_at: float = 0.0
    accounts: dict[str, Account] = field(default_factory=dict)
    differs_since: dict[str, float] = field(default_factory=dict)  # by the tenant's name


class LimitDifference(NamedTuple):
    """(requests, tokens) per minute of a tenant, here and at another router."""

    tenant: str
    ours: tuple[int, int]
    theirs: tuple[int, int]


class Seal:
    def __init__(self, secret: str) -> None:
        self._key = hmac.digest(secret.encode(), PURPOSE, "sha256")

    def close(self, router_id: str, epoch: int, number: int, payload: bytes) -> bytes:
        return self._mac(router_id, epoch, number, payload) + payload

    def open(self, message: Spending) -> bytes | None:
        """Return the payload; None for a wrong signature."""
        mac, payload = message.body[:MAC_BYTES], message.body[MAC_BYTES:]
        right = self._mac(message.router_id, message.router_epoch, message.number, payload)
        return payload if hmac.compare_digest(mac, right) else None

    def _mac(self, router_id: str, epoch: int, number: int, payload: bytes) -> bytes:
        head = msgspec.msgpack.encode([router_id, epoch, number])
        return hmac.digest(self._key, head + payload, "sha256")


class Ledger:
    """Owned by the event loop. Without a `secret` nothing is written or read."""

    def __init__(
        self, identity: tuple[str, int], secret: str, tenants: Tenants, limits: RateLimits, queue: FairQueue, now: float
    ) -> None:
        self._identity, self._began = identity, now
        self._seal = Seal(secret) if secret else None
        self._tenants, self._limits, self._queue = tenants, limits, queue
        self._file, self._named = NO_KEYS, dict[str, Tenant]()
        self._number = 0
        self._due, self._repeat_at = now, now
        self._since_ms: dict[str, int] = {}
        self._written: dict[str, Row] = {}  # rows as they were last written, the oldest first
        self._lives: dict[str, Life] = {}  # by the other router's id
        self.differences: list[LimitDifference] = []  # found by the last `read`
        self._oldest_epoch = 0  # an unknown router's epoch must be newer, so forgotten epochs are not read again

    # ---- our counts

    def write(self, now: float) -> Spending | None:
        """Return the next message if one is due, and if counts have changed or must be repeated."""
        if self._seal is None or now < self._due:
            return None
        self._due = now + PERIOD_S
        age_ms = self._age_ms(now)
        rows = self._chosen(self._rows(age_ms), now)
        if not rows:
            return None
        self._repeat_at = now + REPEAT_S
        self._number += 1
        payload = msgspec.msgpack.encode(SpendingBody(age_ms, rows))
        return Spending(*self._identity, self._number, self._seal.close(*self._identity, self._number, payload))

    def _rows(self, age_ms: int) -> dict[str, Row]:
        """Return the counts of all tenants in the keys file. A tenant without a limit may get one later."""
        named, started = self._by_name(), self._queue.started
        rows = {}
        for name, spent in self._limits.spent.items():
            tenant = named.get(name)
            if tenant is not None:
                since_ms = self._since_ms.setdefault(name, age_ms)
                rows[name] = Row(name, since_ms, spent.requests, spent.tokens, started[name], *tenant.limits)
        return rows

    def _chosen(self, rows: Mapping[str, Row], now: float) -> list[Row]:
        """Return the next body's rows: changed rows first, then the rows that were written longest ago."""
        known = [name for name in self._written if name in rows]
        in_turn = [name for name in rows if name not in self._written] + known
        changed = [name for name in in_turn if self._written.get(name) != rows[name]]
        if not changed and now < self._repeat_at:
            return []
        both = dict.fromkeys([*changed, *in_turn])
        chosen = [rows[name] for name in islice(both, MAX_ROWS)]
        for row in chosen:
            self._written.pop(row.name, None)
            self._written[row.name] = row
        return chosen

    def _by_name(self) -> dict[str, Tenant]:
        if self._file is not self._tenants.now:
            self._file = self._tenants.now
            self._named = {tenant.name: tenant for tenant in self._tenants.all()}
        return self._named

    def _age_ms(self, now: float) -> int:
        return round(1000 * (now - self._began))

    # ---- other routers' counts

    def read(self, message: Spending, now: float) -> Reading:
        """Charge tenants for another router's counts."""
        self.differences.clear()
        if self._seal is None or not self._is_news(message):
            return Reading.DONE
        payload = self._seal.open(message)
        if payload is None:
            return Reading.UNSIGNED
        try:
            body = msgspec.msgpack.decode(payload, type=SpendingBody)
        except msgspec.MsgspecError:
            return Reading.OTHER_VERSION
        life = self._life_of(message, now)
        life.number, life.heard_at = message.number, now
        own_age_ms = self._age_ms(now)
        for row in body.rows:
            self._compare(life, row, now)
            self._take_row(life, row, is_from_before=body.age_ms - row.since_ms > own_age_ms, now=now)
        return Reading.DONE

    def _is_news(self, message: Spending) -> bool:
        life = self._lives.get(message.router_id)
        if message.router_id == self._identity[0]:
            return False
        if life is None:
            return message.router_epoch > self._oldest_epoch
        return (message.router_epoch, message.number) > (life.epoch, life.number)

    def _life_of(self, message: Spending, now: float) -> Life:
        life = self._lives.get(message.router_id)
        if life is None or life.epoch != message.router_epoch:
            life = self._lives[message.router_id] = Life(message.router_epoch, heard_at=now)
        if len(self._lives) > MAX_ROUTERS:
            quietest = min(self._lives, key=lambda name: self._lives[name].heard_at)
            self._oldest_epoch = max(self._oldest_epoch, self._lives.pop(quietest).epoch)
        return life

    def _compare(self, life: Life, row: Row, now: float) -> None:
        tenant = self._by_name().get(row.name)
        if tenant is None or row.limits == tenant.limits:
            life.differs_since.pop(row.name, None)
        elif now - life.differs_since.setdefault(row.name, now) >= DIFFERS_S:
            self.differences.append(LimitDifference(row.name, tenant.limits, row.limits))

    def _take_row(self, life: Life, row: Row, *, is_from_before: bool, now: float) -> None:
        counts = SpentCounts(row.requests, row.tokens, row.started)
        account = life.accounts.get(row.name)
        if account is None:
            account = life.accounts[row.name] = Account(counts if is_from_before else SpentCounts())
        before, account.counts = account.counts, counts
        tenant = self._by_name().get(row.name)
        if tenant is None:  # our copy of the keys file lacks the tenant
            return
        self._charge(tenant, account, REQUESTS, counts.requests - before.requests, now)
        self._charge(tenant, account, TOKENS, counts.tokens - before.tokens, now)
        self._queue.started_elsewhere(row.name, counts.started - before.started)

    def _charge(self, tenant: Tenant, account: Account, unit: str, more: int, now: float) -> None:
        meter = self._limits.of(tenant).meters[unit]
        if more > 0:
            account.taken[unit] += meter.take_for_others(more, now)
        elif more < 0:
            back = min(-more, account.taken[unit])
            account.taken[unit] -= back
            meter.give_back(back)


def carriers(nodes: Iterable[RegisteredNode]) -> list[RegisteredNode]:
    """Return the nodes that carry our counts. Routers with the same nodes choose the same carriers."""
    live = (node for node in nodes if not node.is_silent and not (node.leaving and By.LIST in node.leaving.by))
    return sorted(live, key=lambda node: node.node_id)[:NUM_CARRIERS]
