"""A node lends what its own requests do not need, and no peer gets all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from prefill_node import loans
from shared.core.page_identity import KEY_BYTES, ROOT, identities
from shared.kv.group_cache import Cache, GroupCache
from shared.kv.prefix_cache import PrefixCache
from shared.kv.window_cache import WindowCache
from shared.wire.messages import Lent, Pull, Ready
from tests.support.cores.core_rig import CoreKnobs
from tests.support.worlds.node_pair import expected, name_of
from tests.support.worlds.prefix_pulls import PullPair, job

TIGHT = CoreKnobs(num_pages=41)  # 40 pages, 5 of which may be lent to one peer


def lending(knobs: CoreKnobs = TIGHT) -> PullPair:
    """`s` has lent 5 pages, which nobody copies."""
    rig = PullPair(s_knobs=knobs)
    rig.warm(job(1))
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    rig.ask(job(2))
    rig.net.run()
    assert rig.lender.loans.open
    return rig


def test_pages_that_prompts_wait_for_are_not_lent() -> None:
    rig = PullPair(s_knobs=TIGHT)
    rig.warm(job(1))
    rig.net.hold = lambda source, target, message: isinstance(message, Pull)
    rig.ask(job(2))
    rig.net.run()
    ((_, _, pull),) = rig.net.kept
    first = rig.net.generate(rig.s, job(7, tokens=330, max_tokens=100, seed=3))
    rig.net.run(until=lambda: bool(rig.net.router.streams[first]))
    rig.net.generate(rig.s, job(8, tokens=300, seed=4))
    rig.net.run(until=lambda: bool(rig.s.ctx.core.queues.waiting))
    lent = rig.say(pull.message)
    assert not lent.num_pages and "its own requests" in lent.reason and rig.s.ctx.core.queues.waiting
    rig.net.at(2.0)
    rig.rest()


@pytest.mark.rule("Lf")
def test_a_loan_ends_where_a_prompt_needs_its_pages() -> None:
    rig, jobs = lending(), [job(7, tokens=280, max_tokens=60, seed=3), job(8, tokens=280, seed=4)]
    keys = [rig.net.generate(rig.s, one) for one in jobs]
    rig.net.run()
    assert [rig.net.router.streams[key] for key in keys] == [expected(one) for one in jobs]
    assert rig.count("loans_gave_way", rig.s) == 1 and not rig.lender.loans.open
    assert rig.count("pull.refused") == 1, "the other node heard of it, and computes"
    rig.rest()


@pytest.mark.rule("Lf")
def test_a_loan_ends_where_a_hand_off_needs_its_pages() -> None:
    rig, jobs = lending(), [job(7, tokens=280, max_tokens=60, seed=3), job(8, tokens=280, seed=4)]
    rig.net.no_way.add((name_of(rig.s), name_of(rig.d)))
    keys = [rig.net.generate(rig.s, one, rig.d) for one in jobs]
    rig.net.run()
    assert rig.count("loans_gave_way", rig.s) == 1
    assert all(req.row for req in rig.s.ctx.core.requests.values())
    for key in keys:
        rig.net.abort(rig.s, key)
    rig.rest()


@pytest.mark.rule("Lf")
def test_a_loan_ends_where_a_running_row_needs_its_pages() -> None:
    """Two rows of 18 pages in the end: nobody is retracted."""
    rig, jobs = lending(), [job(7, tokens=200, max_tokens=85, seed=3), job(8, tokens=200, max_tokens=85, seed=4)]
    keys = [rig.net.generate(rig.s, one) for one in jobs]
    rig.net.run()
    assert [rig.net.router.streams[key] for key in keys] == [expected(one) for one in jobs]
    assert rig.count("loans_gave_way", rig.s) == 1 and not rig.s.ctx.core.queues.counters.retractions
    rig.rest()


def test_a_loan_stays_where_a_prompt_lacks_a_row_alone() -> None:
    rig = lending(CoreKnobs(max_running=1))
    jobs = [job(7, tokens=40, max_tokens=60, seed=3), job(8, tokens=40, seed=4)]
    keys = [rig.net.generate(rig.s, one) for one in jobs]
    rig.net.run()
    assert all(rig.net.router.ends[key] for key in keys) and rig.lender.loans.open
    rig.net.at(2.0)
    rig.rest()


def test_a_loan_stays_where_only_foreseen_growth_is_lacking() -> None:
    rig = lending(replace(TIGHT, growth_reserve=1.0))
    speaks = rig.net.generate(rig.s, job(7, tokens=40, max_tokens=300, seed=3))
    rig.net.run(until=lambda: bool(rig.net.router.streams[speaks]))
    waits = rig.net.generate(rig.s, job(8, tokens=240, max_tokens=8, seed=4))
    rig.net.run(until=lambda: len(rig.net.router.streams[speaks]) >= 100)
    assert rig.s.ctx.core.queues.waiting and rig.lender.loans.open
    rig.net.abort(rig.s, waits)
    rig.net.at(2.0)
    rig.rest()


def test_no_peer_gets_all_that_may_be_lent() -> None:
    """16 pages may be lent in all, and 8 of them to one: 5 are, and 5 more would be too many."""
    rig = PullPair(s_knobs=CoreKnobs(num_pages=65))
    rig.warm(job(9, seed=5))
    rig.warm(job(1))
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    rig.ask(job(2))
    rig.ask(job(10, seed=5))
    rig.net.run()
    first, second = (lent for lent in rig.said(Lent, rig.s) if isinstance(lent, Lent))
    assert first.num_pages == 5 and not second.num_pages and "to one node" in second.reason
    rig.net.at(2.0)
    rig.rest()


NAME_PAGE, NUM_PAGES = 4, 6
KEYS = np.arange(NAME_PAGE * NUM_PAGES, dtype=np.int64)


def filled(cache: Cache, num_pages: int) -> Cache:
    """The cache with the first pages of KEYS."""
    lock = cache.match(KEYS, 0).lock
    pages = np.arange(1, 1 + num_pages * len(cache.windows), dtype=np.int32)
    lock, _ = cache.insert(KEYS, pages, lock)
    cache.unlock(lock)
    return cache


@pytest.mark.parametrize("num_cached", [0, 2, NUM_PAGES])
@pytest.mark.parametrize(
    "cache", [lambda: PrefixCache(NAME_PAGE), lambda: WindowCache(NAME_PAGE, 6), lambda: GroupCache(NAME_PAGE, (0, 6))]
)
def test_only_what_is_not_cached_is_hashed(
    cache: Callable[[], Cache], num_cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = []

    def counted(keys: bytes, page_size: int, parent: bytes = ROOT) -> Iterator[bytes]:
        hashed.append(len(keys) // (page_size * KEY_BYTES))
        return identities(keys, page_size, parent)

    lender = filled(cache(), num_cached)
    found = lender.find(KEYS, len(KEYS))
    monkeypatch.setattr(loans, "identities", counted)
    *_, last = identities(KEYS.tobytes(), NAME_PAGE)
    assert loans.last_name(lender, found, KEYS) == last
    assert hashed == [NUM_PAGES - num_cached]
