"""A long queue in front of full memory: what a plan tries, and who may go before whom."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from shared.core.request import Request
from shared.core.sampling_params import SamplingParams
from shared.core.states import PageState
from shared.node.records.core import NodeCore
from shared.sched.steps.settings import SchedSettings
from tests.support.cores.core_rig import CoreKnobs, Job, make_core, run_local
from tests.support.cores.light_scheduler import LightScheduler

WAITING = 1000
STEM = tuple(random.Random(1).randrange(95) for _ in range(32))


def prompt_of(rid: int, num_tokens: int, stem: tuple[int, ...] = ()) -> tuple[int, ...]:
    rng = random.Random(rid)
    return stem + tuple(rng.randrange(95) for _ in range(num_tokens - len(stem)))


def handoff(
    core: NodeCore, rid: int, num_tokens: int = 40, stem: tuple[int, ...] = (), granted: bool = False
) -> Request:
    job = Job(rid, prompt_of(rid, num_tokens, stem), SamplingParams(max_tokens=4, temperature=0.0), rid)
    req = job.request(handoff_to="decode")
    core.scheduler.intake.submit(req)
    if granted:
        core.queues.set_granted(req.key)
    return req


def settle(core: NodeCore) -> None:
    """All who fit are handed off, and wait for their decode nodes."""
    core.loop.step(block=True)
    while core.queues.prefilling or not core.loop.idle:
        core.loop.step(block=True)
    core.queues.take_events()


def count_tries(core: NodeCore) -> list[int]:
    """The prompts' lengths, of all that are looked up in the prefix cache from now on: the first that a try costs."""
    tried: list[int] = []
    find = core.kv.cache.find

    def counted(keys: np.ndarray, *args: object) -> object:
        tried.append(len(keys))
        return find(keys, *args)  # type: ignore[arg-type]

    core.kv.cache.find = counted  # type: ignore[method-assign, assignment]
    return tried


@pytest.mark.parametrize("stem", [(), STEM], ids=["own prompts", "a cached prefix"])
@pytest.mark.parametrize("kind", ["ungranted", "granted", "both"])
def test_a_plan_tries_one_of_each_kind_in_vain(kind: str, stem: tuple[int, ...]) -> None:
    core = make_core(CoreKnobs(page_size=4, num_pages=21 if stem else 40, chunk_size=64))
    pinned = []
    for rid in range(3):
        pinned.append(handoff(core, rid, 40, stem, granted=True))
        settle(core)
    assert all(req.state.value == "handed_off" for req in pinned), "they keep the memory until it is taken over"
    for rid in range(3, 3 + WAITING):
        handoff(core, rid, 60, stem, granted=kind == "granted" or kind == "both" and rid % 2 == 0)
    tried = count_tries(core)
    assert core.scheduler.planner.plan() is None
    assert len(tried) <= 2 and len(core.queues.waiting) == WAITING
    for req in list(core.queues.requests.values()):
        core.queues.abort(req.key)
    core.close()


def test_a_small_ungranted_prompt_does_not_overtake_a_large_one() -> None:
    core = make_core(CoreKnobs(page_size=4, num_pages=24, prefix_cache=False))
    first = handoff(core, 0, 40)
    settle(core)
    large, small = handoff(core, 1, 60), handoff(core, 2, 8)
    settle(core)
    assert [req.state.value for req in (first, large, small)] == ["handed_off", "waiting", "waiting"]
    core.queues.complete_handoff(first.key)
    settle(core)
    assert [req.state.value for req in (large, small)] == ["handed_off", "handed_off"]
    for req in (large, small):
        core.queues.complete_handoff(req.key)
    run_local(core, [])
    core.close()


def test_one_with_a_grant_goes_before_those_who_are_held_back() -> None:
    core = make_core(CoreKnobs(page_size=4, num_pages=24, prefix_cache=False))
    first = handoff(core, 0, 40, granted=True)
    settle(core)
    large, granted = handoff(core, 1, 60), handoff(core, 2, 8, granted=True)
    settle(core)
    assert [req.state.value for req in (first, large, granted)] == ["handed_off", "waiting", "handed_off"]
    for req in (first, large, granted):
        core.queues.abort(req.key)
    run_local(core, [])
    core.close()


LONG, PAGE, POOL, CHUNK = 131_072, 16, 10_000, 64
CACHED = 120_000  # tokens of the long prompts, which have them in common


class Node:
    """A prefill node's scheduler without memory. One prompt computes, for many steps; `holder` keeps all other pages
    but a few. `asked`: what was done for each prompt's tokens or pages, by name."""

    def __init__(self) -> None:
        self.light = LightScheduler(SchedSettings(PAGE, 2 * LONG, CHUNK, CHUNK), POOL, WAITING + 100)
        self.queues, self.kv = self.light.queues, self.light.queues.budget.kv
        self.stem = np.random.default_rng(1).integers(0, 95, CACHED)
        self._fill_cache()
        self.submit(0, np.random.default_rng(2).integers(0, 95, 20 * CHUNK))
        self.round()
        self.holder = self.kv.alloc_row("holder", PageState.HELD)
        assert self.holder is not None and self.kv.grow(self.holder, self.kv.allocator.num_free - 3)
        self.asked: list[str] = []
        for of, name in (
            (self.kv.cache, "find"),
            (self.kv.cache, "_lock"),
            (self.queues.budget, "prefix_keys"),
            (self.queues.prefixes, "_leader_of"),
        ):
            self._count(of, name)

    def _fill_cache(self) -> None:
        first = self.submit(-1, self.stem)
        row = self.kv.alloc_row("first")
        assert row is not None and self.kv.grow(row, CACHED // PAGE)
        self.kv.insert_prefix(row, self.queues.budget.prefix_keys(first, self.stem), CACHED)
        self.kv.release(row)
        self.queues.abort(first.key)

    def _count(self, of: object, name: str) -> None:
        real = getattr(of, name)
        setattr(of, name, lambda *args, **more: (self.asked.append(name), real(*args, **more))[1])

    def submit(self, rid: int, ids: np.ndarray) -> Request:
        job = Job(rid, (1,), SamplingParams(max_tokens=4, temperature=0.0), rid)
        req = job.request(handoff_to="decode")
        req.ask = replace(req.ask, prompt_ids=np.asarray(ids, np.int64))
        self.light.scheduler.intake.submit(req)
        self.queues.set_granted(req.key)
        return req

    def round(self) -> list[str]:
        """A step ends, and another one begins. Returns what was asked in its plan."""
        self.asked = []
        self.light.round()
        return self.asked

    def long_prompts(self, num: int = 10) -> list[Request]:
        own = np.random.default_rng(3).integers(0, 95, (num, LONG - CACHED))
        return [self.submit(rid, np.concatenate([self.stem, own[rid - 1]])) for rid in range(1, num + 1)]

    def release(self) -> None:
        assert self.holder is not None
        self.kv.release(self.holder)


def test_who_finds_no_room_is_asked_again_when_there_is_more() -> None:
    """Ten long prompts with a long cached prefix, in front of a thousand others: while there is no room, a plan looks
    at no token of theirs, though another prompt's pages enter the cache with each step."""
    node = Node()
    prompts = node.long_prompts()
    for rid in range(11, WAITING):
        node.submit(rid, np.arange(40) % 95)
    asked = node.round()
    assert asked.count("find") == 1 and "_lock" not in asked[asked.index("find") :], "nothing is pinned in vain"
    stamps = [page.used for page in node.kv.cache._nodes.values() if not page.refs]
    before = node.kv.cache.num_cached
    of_the_computing = {"prefix_keys", "_lock"}  # its new pages enter the cache
    for _ in range(8):
        assert set(node.round()) <= of_the_computing and node.asked.count("prefix_keys") <= 1
    assert node.kv.cache.num_cached > before and not any(req.row for req in prompts)
    assert stamps == [page.used for page in node.kv.cache._nodes.values() if not page.refs], "nothing was used"
    node.release()
    for _ in range(4):  # few prompts are hashed in one round
        node.round()
    assert [bool(req.row) for req in prompts[:4]] == [True] * 3 + [False], "there is no room for the fourth"
    node.queues.abort(prompts[0].key)
    node.round()
    assert prompts[3].row, "the first has left"


def test_who_waits_for_room_follows_a_later_leader() -> None:
    """A pull begins to bring pages that the prompt lacks."""
    node = Node()
    first, second = node.long_prompts(2)
    node.round()
    assert "_leader_of" not in node.round() and not node.queues.prefixes.follows(first)
    second.ask = first.ask
    second.page_names = None
    node.queues.prefixes.begin(second)
    node.round()
    assert node.queues.prefixes.follows(first)
    node.queues.prefixes.leave(second)
    node.round()
    assert not node.queues.prefixes.follows(first)
