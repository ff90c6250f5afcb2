"""Admission and grants keep memory for the growth that answers under way will have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from shared.core.request import Request, RequestState
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from shared.kv.manager import KVManager
from shared.kv.pages import PageAllocator
from shared.kv.prefix_cache import PrefixCache
from shared.kv.rows import ReqToTokenPool
from shared.kv.window_cache import WindowCache
from shared.node.records.report import node_load
from shared.observe.metrics import ClusterMetrics, NodeReport
from shared.observe.node_metrics import NodeMetrics
from shared.sched.planning.growth import Growth
from shared.sched.requests.answer_lengths import ALL, CELL, ENOUGH, LATEST, LengthEstimator
from shared.sched.requests.queues import Queues
from shared.sched.scheduler import Scheduler, make_scheduler
from shared.sched.steps.settings import SchedSettings
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, assert_whole, draw_jobs, make_core, run_local
from tests.support.worlds.node_pair import Net, assert_clean, make_node

PAGE = 16


def a_request(rid: int, max_tokens: int = 400, prompt: int = 32, handoff_to: str | None = None) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Job(rid, tuple(range(rid, rid + prompt)), sampling, rid).request(handoff_to)


def a_scheduler(num_pages: int, share: float = 1.0) -> Scheduler:
    return make_scheduler(SchedSettings(PAGE, 1024, growth_reserve=share), num_pages + 1, 64)


def learned(lengths: LengthEstimator, ended: Sequence[int], reason: FinishReason, tenant: int = ALL) -> LengthEstimator:
    for length in ended:
        req = a_request(0)
        req.ask, req.output_ids = replace(req.ask, tenant=tenant), [1] * length
        lengths.learn(req, reason)
    return lengths


def alive(lengths: LengthEstimator, at: int, ahead: int, running: Sequence[int] = (), group: int = ALL) -> float:
    """The share of answers with `at` tokens that go on for `ahead` more."""
    cells = np.asarray(running, np.int64) // CELL
    return float(lengths.survival(group, cells).alive(np.asarray([at // CELL]), np.asarray([ahead // CELL]))[0, 0])


# ---- what streams see


def test_streams_are_exact_with_memory_kept_for_growth() -> None:
    core = make_core(CoreKnobs(num_pages=30, max_running=8, growth_reserve=1.0, width=4))
    jobs = draw_jobs(random.Random(3), 30)
    outcome = run_local(core, jobs, retract_every=20)
    assert_streams(jobs, outcome)
    assert_whole(core)
    core.close()


# ---- who may begin


def test_a_request_begins_alone_however_long_it_may_get() -> None:
    scheduler = a_scheduler(num_pages=30, share=4.0)
    scheduler.intake.submit(a_request(0, max_tokens=440))
    scheduler.planner.plan()
    assert not scheduler.queues.waiting


@pytest.mark.rule("La")
def test_requests_of_one_round_count_for_each_other() -> None:
    begun = {}
    for share in (0.0, 1.0):
        scheduler = a_scheduler(num_pages=100, share=share)
        for rid in range(40):
            scheduler.intake.submit(a_request(100 * rid))
        scheduler.planner.plan()
        begun[share] = 40 - len(scheduler.queues.waiting)
    assert begun[0.0] > 20 and 3 <= begun[1.0] <= 6, "27 pages each at most"


@pytest.mark.rule("La")
def test_a_grant_leaves_what_the_others_will_need() -> None:
    for share, granted in ((0.0, 20), (1.0, 4)):
        scheduler = a_scheduler(num_pages=100, share=share)
        cached = [scheduler.grants.grant(a_request(100 * rid), "p") for rid in range(20)]
        assert sum(found is not None for found in cached) == pytest.approx(granted, abs=1)


def test_a_hand_off_needs_no_memory_for_its_answer() -> None:
    scheduler = a_scheduler(num_pages=100)
    for rid in range(20):
        req = a_request(100 * rid, handoff_to="d")
        scheduler.intake.submit(req)
        scheduler.queues.set_granted(req.key)
    scheduler.planner.plan()
    assert not scheduler.queues.waiting


def test_cached_pages_do_not_count_as_coming_back() -> None:
    """Two rows will end soon, four have just begun. What is in the cache, others may use for longer."""
    kept = {}
    for cached in (0, 320):
        scheduler = a_scheduler(num_pages=400)
        learned(scheduler.queues.lengths, [160] * LATEST, FinishReason.STOP)
        for rid in range(6):
            req = a_request(1000 * rid, prompt=328)
            assert scheduler.grants.grant(req, "p") == 0
            req.cached_tokens, req.output_ids = cached, [1] * (150 if rid < 2 else 0)
        scheduler.capacity.growth._look()
        kept[cached] = scheduler.capacity.growth.pages()
    assert kept[320] > kept[0] + 8


def test_a_row_as_long_as_its_window_grows_no_more() -> None:
    settings = SchedSettings(PAGE, 1024, growth_reserve=1.0)
    needs = []
    for cache in (PrefixCache(PAGE), WindowCache(PAGE, 64)):
        kv = KVManager(ReqToTokenPool(8, 80), PageAllocator(400), cache)
        queues = Queues(kv, settings, None)
        for rid in range(4):
            req = a_request(rid, prompt=64)
            queues.granted[req.key] = req
        needs.append(Growth(settings, queues).pages())
    assert needs[0] > 10 and needs[1] == 0


def test_two_engines_learn_apart() -> None:
    one, other = a_scheduler(100), a_scheduler(100)
    before = other.capacity.growth.pages(a_request(1))
    learned(one.queues.lengths, [5] * LATEST, FinishReason.STOP)
    other.grants.grant(a_request(1), "p")
    one.grants.grant(a_request(1), "p")
    assert before == 0
    assert one.capacity.growth.pages(a_request(2)) < other.capacity.growth.pages(a_request(2))


def test_the_node_tells_how_much_it_keeps() -> None:
    core = make_core(CoreKnobs(num_pages=100, max_running=8, growth_reserve=1.0))
    for rid in range(3):
        core.scheduler.intake.submit(a_request(100 * rid))
    core.loop.step(block=True)
    load = node_load(core, NodeMetrics(), [], {})
    assert load.kept_pages == core.scheduler.capacity.keep_free() > 20
    registry = CollectorRegistry()
    report = NodeReport("d", "decode", 1, 99, load.pages, load.rows, 0, 1, {}, {}, kept_pages=load.kept_pages)
    ClusterMetrics(registry).update(report)
    labels = {"node": "d", "role": "decode"}
    assert registry.get_sample_value("baton_kv_kept_pages", labels) == load.kept_pages
    core.close()


# ---- how long answers go on


def test_answers_that_go_on_are_longer_than_those_that_ended() -> None:
    """The first ends of a burst are its short ones."""
    lengths = learned(LengthEstimator(), [40] * 10, FinishReason.STOP)
    assert alive(lengths, 0, 320) < 0.2
    assert alive(lengths, 0, 320, running=[320] * 30) > 0.6


def test_remaining_life_depends_on_the_length_so_far() -> None:
    lengths = learned(LengthEstimator(), [20] * 30 + [400] * 10, FinishReason.STOP)
    assert alive(lengths, 0, 320) < 0.3, "most answers are short"
    assert alive(lengths, 64, 256) > 0.6, "this one is not"


def test_an_answer_cut_by_its_limit_could_have_been_longer() -> None:
    cut = learned(LengthEstimator(), [100] * 30, FinishReason.LENGTH)
    ended = learned(LengthEstimator(), [100] * 30, FinishReason.STOP)
    assert alive(ended, 0, 160) < 0.2 < 0.6 < alive(cut, 0, 160)


def test_an_answer_beyond_all_others_may_still_go_on() -> None:
    lengths = learned(LengthEstimator(), [100] * LATEST, FinishReason.STOP)
    assert alive(lengths, 2000, 512, running=[2000]) > 0.7
    assert alive(lengths, 2000, 8000, running=[2000]) < 0.05, "but its growth is not endless"


def test_a_tenant_s_own_answers_count_when_there_are_enough() -> None:
    lengths = learned(LengthEstimator(), [20] * 40, FinishReason.STOP, tenant=1)
    learned(lengths, [600] * (ENOUGH - 1), FinishReason.STOP, tenant=2)
    assert (lengths.group_of(1), lengths.group_of(2), lengths.group_of(3)) == (1, ALL, ALL)
    learned(lengths, [600], FinishReason.STOP, tenant=2)
    assert alive(lengths, 0, 160, group=lengths.group_of(2)) > 0.6
    assert alive(lengths, 0, 160, group=lengths.group_of(1)) < 0.1


def test_the_decode_node_learns_a_tenant_s_lengths() -> None:
    p, d = make_node("prefill", "p0", CoreKnobs()), make_node("decode", "d0", CoreKnobs())
    net = Net([p, d])
    net.generate(p, Job(1, (1, 2, 3), SamplingParams(max_tokens=40, temperature=0.0), 0, tenant=7), d)
    net.run()
    assert set(d.ctx.core.queues.lengths._ended) == {ALL, 7}
    assert_clean(p, d)


def test_a_hand_off_says_nothing_about_its_answer() -> None:
    core, req = make_core(CoreKnobs()), a_request(0, handoff_to="d")
    core.scheduler.intake.submit(req)
    while req.state is not RequestState.HANDED_OFF:
        core.loop.step(block=True)
    core.queues.abort(req.key)
    assert not core.queues.lengths._ended, "only its first token was computed here"
    core.close()


def test_a_retraction_makes_the_node_forget_early_answers() -> None:
    core = make_core(CoreKnobs(num_pages=9, max_running=8, prefix_cache=False))
    learned(core.queues.lengths, [20] * LATEST, FinishReason.STOP)
    before = alive(core.queues.lengths, 0, 160)
    jobs = [Job(rid, tuple(range(rid, rid + 20)), SamplingParams(max_tokens=60, temperature=0.0), 0) for rid in (1, 2)]
    run_local(core, jobs)
    assert core.queues.counters.retractions == 1
    assert len(core.queues.lengths._ended[ALL]) < LATEST
    assert alive(core.queues.lengths, 0, 160) > before
    core.close()


def test_a_retracted_row_is_not_foreseen() -> None:
    core = make_core(CoreKnobs(num_pages=200, max_running=20, growth_reserve=1.0))
    for rid in range(20):
        core.submit(a_request(rid, max_tokens=100, prompt=5))
    while len(core.queues.running) < 20:
        core.loop.step(block=True)
    capacity = core.scheduler.capacity
    before = capacity.growth.pages()
    core.queues.retract(core.queues.running.reqs[-1])
    capacity.growth.doubt()
    assert capacity.growth.pages() < before
    core.close()


def test_tenants_are_forgotten_when_there_are_too_many() -> None:
    lengths = LengthEstimator()
    for tenant in range(1, 1000):
        learned(lengths, [20], FinishReason.STOP, tenant)
    assert len(lengths._ended) <= 256 and ALL in lengths._ended
