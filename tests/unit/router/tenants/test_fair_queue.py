"""The order in which requests start: priorities, shares by tokens, refunds, and who makes room."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.queue.fair_queue import MOST_DEBT, QUANTUM, FairQueue
from router.requests.journal import OpenRequest
from router.requests.new_request import NewRequest
from router.tenants.tenant import Tenant
from shared.core.sampling_params import SamplingParams

A, B, C = (Tenant(name) for name in "abc")
HIGH, LOW = Tenant("high", priority=1), Tenant("low", priority=-1)
COUNT = iter(range(1 << 30))


def request(tenant: Tenant, cost: int = 100, rank: int = 0) -> OpenRequest:
    sampling = SamplingParams(max_tokens=cost - 10)
    return OpenRequest(f"r{next(COUNT)}", NewRequest([1] * 10, 1, sampling, 0, tenant=tenant, rank=rank), 60.0)


def filled(*parts: tuple[Tenant, int, int]) -> FairQueue:
    """(tenant, requests, cost of each)"""
    queue = FairQueue()
    for tenant, num, cost in parts:
        for _ in range(num):
            queue.push(request(tenant, cost))
    return queue


def check_counts(queue: FairQueue) -> None:
    for line in queue:
        assert line.requests and line.num_tokens == sum(request.cost for request in line.requests)
    assert len(queue) == sum(len(line.requests) for line in queue)


def started(queue: FairQueue, num: int) -> list[str]:
    names = []
    for _ in range(num):
        names.append(queue.take_next().asked.tenant.name)
        check_counts(queue)
    return names


def test_a_tenant_s_lower_ranks_start_first() -> None:
    """Equal ranks start in order."""
    queue, requests = FairQueue(), [request(A, rank=rank) for rank in (0, 5, 0, -1, 5, -1)]
    for one in requests:
        queue.push(one)
        check_counts(queue)
    assert [requests.index(queue.take_next()) for _ in requests] == [3, 5, 0, 2, 1, 4]


def test_only_lower_and_equal_ranks_are_ahead() -> None:
    queue = FairQueue()
    for rank in (0, 5, -5):
        queue.push(request(A, rank=rank))
    assert [queue.ahead(A, 100, rank) for rank in (-6, -5, 0, 5)] == [0, 100, 200, 300]


def test_a_higher_priority_always_goes_first() -> None:
    queue = filled((LOW, 2, 100), (A, 2, 100), (HIGH, 2, 90_000))
    assert started(queue, 6) == ["high"] * 2 + ["a"] * 2 + ["low"] * 2


@pytest.mark.parametrize(("first", "second"), [(1000, 1000), (300, 9000), (20_000, 500)])
def test_tenants_share_by_tokens_whatever_their_requests_cost(first: int, second: int) -> None:
    queue = filled((A, 4000, first), (B, 4000, second))
    tokens: Counter[str] = Counter()
    while sum(tokens.values()) < 1_000_000:
        one = queue.take_next()
        tokens[one.asked.tenant.name] += one.cost
    assert abs(tokens["a"] - tokens["b"]) <= QUANTUM + 2 * max(first, second)


def test_a_tenant_that_floods_does_not_delay_the_others() -> None:
    queue = filled((A, 500, 2000), (B, 3, 2000), (C, 3, 2000))
    order = started(queue, 18)
    assert order.count("b") == order.count("c") == 3


def test_small_requests_of_a_flood_alternate_with_others() -> None:
    """A quantum that is larger than many requests would let all of them go ahead of one."""
    queue = filled((A, 500, 36), (B, 5, 36))
    assert started(queue, 30).count("b") == 5


def test_what_an_answer_did_not_need_is_given_back() -> None:
    """One tenant's answers end after a tenth of what they may take: it starts ten times as many."""
    queue = filled((A, 2000, 1000), (B, 2000, 1000))
    names: Counter[str] = Counter()
    for _ in range(550):
        one = queue.take_next()
        names[one.asked.tenant.name] += 1
        one.sequences[0].ids = [1] * (90 if one.asked.tenant is A else 990)
        queue.over(one)
    assert 8.5 <= names["a"] / names["b"] <= 11.5


def between(queue: FairQueue, cost: int, used: int, rounds: int = 20) -> list[int]:
    """B asks again when its last request is over, beside a backlog of A. Return A's tokens before each start of B."""
    found, tokens = [], 0
    queue.push(request(B, cost))
    while len(found) < rounds:
        queue.push(request(A))
        one = queue.take_next()
        check_counts(queue)
        tokens += one.cost if one.asked.tenant is A else 0
        one.sequences[0].ids = [1] * (used - 10 if one.asked.tenant is B else 90)
        queue.over(one)
        if one.asked.tenant is B:
            found.append(tokens)
            tokens = 0
            queue.push(request(B, cost))
    return found


@pytest.mark.parametrize("cost", [200, 8192, 32_768])
def test_a_light_tenant_waits_for_what_it_used_not_might_use(cost: int) -> None:
    waits = between(filled((A, 50, 100)), cost, 200)
    assert waits[0] <= cost + QUANTUM
    assert sum(waits[1:]) / len(waits[1:]) == pytest.approx(200, abs=20)


def test_a_tenant_that_used_more_than_expected_pays_it_later() -> None:
    waits = between(filled((A, 50, 100)), 200, 2000)
    assert sum(waits[1:]) / len(waits[1:]) == pytest.approx(2000, abs=100)


@pytest.mark.parametrize("used", [20, 50_000])
def test_what_is_owed_is_forgotten_once_nobody_waits(used: int) -> None:
    queue = filled((A, 1, 5000), (B, 1, 5000))
    both = [queue.take_next(), queue.take_next()]
    for one in both:
        one.sequences[0].ids = [1] * (used if one.asked.tenant is A else 4990)
        queue.over(one)
    for tenant in (A, B) * 50:
        queue.push(request(tenant, 1000))
    assert 24 <= started(queue, 50).count("a") <= 26


def test_nothing_is_given_back_to_a_tenant_that_was_away() -> None:
    """What it started alone cost nobody anything."""
    queue, alone = FairQueue(), [request(A, 50_000) for _ in range(20)]
    for one in alone:
        queue.push(one)
        queue.take_next()
    for _ in range(100):
        queue.push(request(A, 1000))
        queue.push(request(B, 1000))
    for one in alone:
        queue.over(one)
    order = started(queue, 100)
    assert 40 <= order.count("a") <= 60


def test_a_request_leaves_from_wherever_it_waits() -> None:
    queue, requests = FairQueue(), [request(A) for _ in range(5)]
    for one in requests:
        queue.push(one)
    for one in (requests[2], requests[0], requests[4]):
        assert queue.remove(one) and not queue.remove(one)
        check_counts(queue)
    assert [queue.take_next(), queue.take_next()] == [requests[1], requests[3]]


def test_the_heaviest_tenant_s_youngest_request_makes_room() -> None:
    queue = filled((A, 3, 100), (B, 9, 100), (C, 2, 100))
    youngest = [line for line in queue if line.tenant is B][0].requests[-1]
    assert queue.heaviest(A, 100, 1) == [youngest]
    assert len(queue) == 14, "the caller ends it"
    assert queue.heaviest(B, 100, 1) is None, "who is heaviest makes no room for its own"
    assert queue.heaviest(A, 2000, 1) is None, "nor who would be the heaviest then"


def test_the_lowest_priority_makes_room_first() -> None:
    queue = filled((HIGH, 50, 1000), (LOW, 1, 10))
    assert [one.asked.tenant for one in queue.heaviest(A, 100, 1) or ()] == [LOW]
    assert queue.heaviest(LOW, 10, 1) is None
    assert queue.heaviest(A, 100, 2) is None, "there are not so many"


def test_how_much_starts_before_a_newcomer() -> None:
    queue = filled((HIGH, 2, 1000), (A, 3, 1000), (B, 50, 1000), (LOW, 9, 1000))
    assert queue.ahead(HIGH, 500) == 2000
    assert queue.ahead(A, 500) == 2000 + 3000 + 3500
    assert queue.ahead(C, 500) == 2000 + 500 + 500
    assert queue.ahead(LOW, 500) == 2000 + 53_000 + 9000


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_it_adds_up_and_nobody_is_left(seed: int) -> None:
    rng, queue = random.Random(seed), FairQueue()
    waiting: list[OpenRequest] = []
    running: list[OpenRequest] = []
    for _ in range(600):
        what = rng.random()
        if what < 0.45:
            waiting.append(request(rng.choice((A, B, C, HIGH, LOW)), rng.choice((20, 500, 30_000))))
            queue.push(waiting[-1])
        elif what < 0.7 and waiting:
            running.append(queue.take_next())
            waiting.remove(running[-1])
            assert all(running[-1].asked.tenant.priority >= one.asked.tenant.priority for one in waiting)
        elif what < 0.8 and waiting:
            assert queue.remove(waiting.pop(rng.randrange(len(waiting))))
        elif running:
            queue.over(running.pop(rng.randrange(len(running))))
        check_counts(queue)
        assert len(queue) == len(waiting)
    started(queue, len(waiting))
    for one in (*running, *waiting):
        queue.over(one)
    assert len(queue) == 0 and not queue._lines and not queue._paid


# ---- what other routers start


def test_what_was_not_needed_elsewhere_is_given_back_once() -> None:
    queue = filled((A, 100, 1000), (B, 100, 1000))
    queue.started_elsewhere("a", 10_000)
    queue.started_elsewhere("a", -4000)
    assert started(queue, 6) == ["b"] * 6
    queue.started_elsewhere("a", -50_000)
    assert started(queue, 40).count("a") <= 20 + 7, "no more than it was charged"


def test_a_tenant_that_does_not_wait_here_owes_nothing() -> None:
    queue = filled((B, 100, 1000))
    queue.started_elsewhere("a", 50_000)
    for _ in range(100):
        queue.push(request(A, 1000))
    assert 4 <= started(queue, 10).count("a") <= 6
    queue.started_elsewhere("b", -50_000)
    assert 4 <= started(queue, 10).count("a") <= 6, "nor is it given back what it was not charged"


def test_nobody_is_further_behind_than_the_stated_debt() -> None:
    queue = filled((A, 200, 1000), (B, 200, 1000))
    for _ in range(100):
        queue.started_elsewhere("a", 1 << 30)
    assert started(queue, MOST_DEBT // 1000 + 2).count("b") >= MOST_DEBT // 1000
    assert started(queue, 10).count("a") >= 4


def test_what_all_started_elsewhere_gives_a_newcomer_no_lead() -> None:
    queue = filled((A, 100, 1000), (B, 100, 1000))
    for _ in range(50):
        queue.started_elsewhere("a", 1000)
        queue.started_elsewhere("b", 1000)
    for _ in range(100):
        queue.push(request(C, 1000))
    assert 9 <= started(queue, 30).count("c") <= 11


def test_started_tokens_are_counted_less_the_unused() -> None:
    queue = filled((A, 2, 1000), (B, 1, 500))
    requests = [queue.take_next() for _ in range(3)]
    assert queue.started == {"a": 2000, "b": 500}
    for one in requests:
        one.sequences[0].ids = [1] * 40
        queue.over(one)
    assert queue.started == {"a": 100, "b": 50}
