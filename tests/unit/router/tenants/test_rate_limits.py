"""Limits of tenants: what is taken, what comes back, and that Retry-After is neither too short nor too long."""

from __future__ import annotations

import io

import pytest
from prometheus_client import CollectorRegistry

from router.http.errors import error_headers
from router.queue.desk import Desk
from router.queue.rate_limit import AboveLimit, Allowance, RateLimits, shown_s
from router.tenants.book import Tenants
from router.tenants.keys_file import hash_of, parse_keys
from router.tenants.tenant import Tenant
from shared.core.errors import BatonError, QueueFull, RateLimited
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.observe.tenant_metrics import TenantMetrics

TICK_S = 0.001


def allowance(requests: int = 0, tokens: int = 0) -> Allowance:
    return RateLimits().of(Tenant("t", requests, tokens))


def refused(own: Allowance, num_tokens: int, now: float) -> RateLimited:
    with pytest.raises(RateLimited) as failed:
        own.charge(num_tokens, now)
    return failed.value


def waits(error: BatonError) -> dict[str, int]:
    return {name.decode(): int(value) for name, value in error_headers(error, 99) if name.startswith(b"retry-after")}


@pytest.mark.parametrize("begin", [0.0, 123.456, 8_640_000.789])
@pytest.mark.parametrize("limit", [7, 60, 1000, 999_983])
def test_waiting_for_retry_after_suffices_and_a_tick_less_fails(limit: int, begin: float) -> None:
    own = allowance(tokens=limit)
    first = limit // 3 + 1
    own.charge(first, begin)
    cost, now = limit - first // 2, begin + 0.1
    wait_ms = waits(refused(own, cost, now))["retry-after-ms"]
    refused(own, cost, now + wait_ms / 1000 - TICK_S)
    own.charge(cost, now + wait_ms / 1000)


def test_both_limits_or_neither_are_charged() -> None:
    own = allowance(requests=10, tokens=100)
    own.charge(80, 0.0)
    for _ in range(20):
        assert refused(own, 80, 0.0).retry_after_s == pytest.approx(36.0)
    assert own.headers(0.0)[b"x-ratelimit-remaining-requests"] == b"9"


def test_what_was_not_used_comes_back() -> None:
    own = allowance(tokens=100)
    charge = own.charge(90, 0.0)
    refused(own, 50, 0.0)
    charge.settle(40, 0.0)
    assert own.headers(0.0)[b"x-ratelimit-remaining-tokens"] == b"60"
    own.charge(60, 0.0)
    refused(own, 1, 0.0)
    charge.settle(0, 0.0)  # settled twice: nothing more comes back
    refused(own, 1, 0.0)


def test_what_was_not_let_in_costs_nothing() -> None:
    own = allowance(requests=1, tokens=100)
    own.charge(90, 0.0).cancel(0.0)
    own.charge(100, 0.0)


def test_giving_back_late_makes_no_more_than_a_minute_s_worth() -> None:
    own = allowance(tokens=100)
    charge = own.charge(100, 0.0)
    charge.settle(0, 0.0)
    own.charge(100, 600.0)
    refused(own, 1, 600.0)


def test_what_time_has_earned_back_is_not_given_back_again() -> None:
    own = allowance(tokens=1000)
    first, second = own.charge(1000, 0.0), own.charge(1000, 60.0)
    first.settle(10, 60.1)
    refused(own, 900, 60.1)
    second.settle(10, 90.0)  # half of it is earned back
    own.charge(1000, 90.0)
    assert own.spent.tokens == 1000 + 500 + 1000, "other routers are told the same"


def test_long_requests_save_up_no_burst() -> None:
    own = allowance(tokens=1000)
    for charge in [own.charge(1000, 60.0 * minute) for minute in range(10)][:-1]:
        charge.settle(10, 540.0)
        refused(own, 900, 540.0)


def test_a_request_above_the_limit_is_no_429() -> None:
    """Clients try those again by themselves, and it never helps."""
    with pytest.raises(AboveLimit) as failed:
        allowance(tokens=100).charge(101, 0.0)
    assert failed.value.status == 400


def test_the_headers_are_openai_s() -> None:
    own = allowance(requests=60, tokens=6000)
    own.charge(1500, 10.0)
    assert own.headers(10.0) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"6000",
        b"x-ratelimit-remaining-tokens": b"4500",
        b"x-ratelimit-reset-tokens": b"15s",
    }


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0ms"), (0.0121, "13ms"), (0.9999, "1s"), (1.5, "1.5s"), (60.0, "1m0s"), (90.5, "1m30.5s")],
)
def test_times_are_written_as_openai_writes_them(seconds: float, shown: str) -> None:
    assert shown_s(seconds) == shown


def test_a_changed_limit_counts_from_now_on() -> None:
    limits = RateLimits()
    limits.of(Tenant("t", tokens_per_minute=100)).charge(100, 0.0)
    refused(limits.of(Tenant("t", tokens_per_minute=100)), 10, 0.0)
    assert refused(limits.of(Tenant("t", tokens_per_minute=1000)), 10, 0.0).retry_after_s == pytest.approx(0.6)
    assert limits.left(0.6) == [{"tenant": "t", "tokens": 10}], "a limit that it does not have is not shown"
    limits.keep(())
    limits.of(Tenant("t", tokens_per_minute=100)).charge(100, 0.0)


# ---- around a request


class Clerk:
    """A desk with a clock, a log and metrics."""

    def __init__(self) -> None:
        text = f'[tenants.a]\nkeys = ["{hash_of("a")}"]\ntokens_per_minute = 100\nrequests_per_minute = 10\n'
        self.tenants, self.registry, self.told = Tenants(parse_keys(text)), CollectorRegistry(), io.StringIO()
        self.now = 0.0
        once = LogOnce(Logger("r", self.told))
        self.desk = Desk(self.tenants, TenantMetrics(self.registry), once, clock=lambda: self.now)
        self.headers: dict[bytes, bytes] = {}

    def run(self, cost: int, used: int, *, is_let_in: bool = True, error: BatonError | None = None) -> None:
        tenant = self.tenants.find(["a"])
        assert tenant is not None
        with self.desk.charge(tenant, cost, self.headers.update) as bill:
            bill.was_admitted, bill.num_used = is_let_in, used
            if error is not None:
                raise error

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, {"tenant": "a"} | labels) or 0.0


def test_a_run_is_charged_and_settled() -> None:
    clerk = Clerk()
    clerk.run(90, 20)
    assert clerk.headers[b"x-ratelimit-remaining-tokens"] == b"10", "while it ran"
    clerk.run(80, 80)
    assert clerk.metric("baton_tenant_tokens_total") == 100
    with pytest.raises(RateLimited):
        clerk.run(10, 0)
    assert clerk.headers[b"x-ratelimit-remaining-tokens"] == b"0"
    assert clerk.metric("baton_tenant_refused_total", code="rate_limit_exceeded") == 1


def test_a_failed_run_is_settled_and_a_refused_one_costs_nothing() -> None:
    clerk = Clerk()
    for _ in range(30):
        with pytest.raises(QueueFull):
            clerk.run(100, 0, is_let_in=False, error=QueueFull("full"))
    with pytest.raises(QueueFull):
        clerk.run(100, 40, error=QueueFull("pushed out"))
    clerk.run(60, 60)
    assert clerk.metric("baton_tenant_refused_total", code="queue_full") == 31
    assert clerk.told.getvalue().count("a tenant has to wait") == 1


def test_tenants_that_left_the_file_are_forgotten() -> None:
    clerk = Clerk()
    clerk.run(100, 100)
    assert clerk.desk.limits.left(0.0) == [{"tenant": "a", "requests": 9, "tokens": 0}]
    clerk.tenants.replace(parse_keys(f'[tenants.b]\nkeys = ["{hash_of("b")}"]\n'))
    assert clerk.metric("baton_tenant_tokens_total") == 0.0 and clerk.desk.limits.left(0.0) == []
