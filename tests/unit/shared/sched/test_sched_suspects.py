"""A step fails: the rows of it run again, each alone, so that a bad request fails alone and a dead device is told from
bad requests."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from shared.core.errors import DeviceLost, StepFailed
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from shared.engine.plan import RowId
from shared.model.math.interface import ModelInputs, ModelOutput
from shared.node.assembly.warm_up import warm_up
from shared.node.records.core import NodeCore
from shared.observe.log import Logger
from shared.sched.loop import MOST_IN_A_ROW
from shared.wire.messages import Installed, Ready
from tests.support.cores.core_rig import CoreKnobs, Job, Outcome, assert_streams, assert_whole, make_core, run_local
from tests.support.cores.steps import plans_of
from tests.support.worlds.node_pair import Net, assert_clean, expected, make_node

BACKENDS = ("inline", "cpu", "simulated")
POISON = 94  # at position 0: the request fails with its first chunk
FAR = 160  # a request fails when it comes so far


def good_job(rid: int, num_prompt: int = 0, max_tokens: int = 30) -> Job:
    rng = random.Random(rid)
    prompt = tuple(rng.randrange(POISON) for _ in range(num_prompt or rng.randrange(5, 60)))
    return Job(rid, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.8), rid)


def bad_job(rid: int, how: str = "at once", max_tokens: int = 30) -> Job:
    job = good_job(rid, FAR - 10 if how == "later" else 40, max_tokens)
    return job if how == "later" else Job(rid, (POISON, *job.prompt[1:]), job.sampling, job.seed)


def is_bad(inputs: ModelInputs) -> bool:
    return bool(((inputs.positions == 0) & (inputs.input_ids == POISON)).any() or (inputs.positions >= FAR).any())


class Forward:
    """Instead of a model's forward. `fails` is asked before each call; what it raises is `error`."""

    def __init__(
        self, core: NodeCore, fails: Callable[[ModelInputs], bool], error: type[Exception] = RuntimeError
    ) -> None:
        self._forward, self.fails, self.error = core.model.forward, fails, error
        self.rows: list[int] = []  # of each call
        core.model.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, inputs: ModelInputs, kv: object) -> ModelOutput:
        self.rows.append(len(inputs.layout.cu_q_lens) - 1)
        if self.fails(inputs):
            raise self.error("injected")
        return self._forward(inputs, kv)  # type: ignore[arg-type]


def judge(outcome: Outcome, good: Sequence[Job], bad: Sequence[Job]) -> None:
    assert_streams(good, outcome)
    for job in bad:
        end, stream = outcome.ends[f"r{job.rid}"], outcome.streams[f"r{job.rid}"]
        assert end.reason is FinishReason.ERROR and isinstance(end.error, StepFailed) and "injected" in str(end.error)
        assert stream == job.expected()[: len(stream)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("width", "mix"), [(1, True), (4, True), (1, False)])
@pytest.mark.parametrize("how", ["at once", "later"])
def test_a_bad_request_fails_alone(backend: str, overlap: bool, width: int, mix: bool, how: str) -> None:
    core = make_core(CoreKnobs(backend, overlap, chunk_size=64, width=width, mix=mix, seed=3))
    Forward(core, is_bad)
    good, bad = [good_job(rid) for rid in range(6)], bad_job(9, how)
    outcome = run_local(core, [*good[:3], bad, *good[3:]], rng=random.Random(5))
    judge(outcome, good, [bad])
    assert core.loop.num_failed_steps == 2, "once in company, once alone"
    assert_whole(core)


@pytest.mark.parametrize("backend", ["inline", "simulated"])
@pytest.mark.parametrize("seed", range(3))
def test_many_bad_requests_fail_alone_and_leave_the_node_up(backend: str, seed: int) -> None:
    rng = random.Random(seed)
    knobs = CoreKnobs(backend, chunk_size=rng.choice([16, 64]), width=rng.choice([1, 4]), num_pages=90, seed=seed)
    core = make_core(knobs)
    Forward(core, is_bad)
    bad = [bad_job(rid, rng.choice(["at once", "later"])) for rid in range(20, 20 + rng.randrange(1, 9))]
    good = [good_job(rid) for rid in range(rng.randrange(0, 9))]
    jobs = [*good, *bad]
    rng.shuffle(jobs)
    every = rng.choice([0, 7])
    outcome = run_local(core, jobs, rng=rng, retract_every=every)
    judge(outcome, good, bad)
    assert every or core.loop.num_failed_steps <= 2 * len(bad), "one that is retracted in time fails once more"
    late = [good_job(rid) for rid in (50, 51)]
    assert_streams(late, run_local(core, late))
    assert_whole(core)


def test_bad_requests_in_a_row_do_not_end_an_idle_node() -> None:
    core = make_core(CoreKnobs())
    Forward(core, is_bad)
    for rid in range(2 * MOST_IN_A_ROW):
        try:
            outcome = run_local(core, [bad_job(rid)])
        except DeviceLost as error:
            raise AssertionError("its device works") from error
        judge(outcome, [], [bad_job(rid)])
    assert_streams([good_job(50)], run_local(core, [good_job(50)]))
    assert_whole(core)


def test_who_came_through_steps_with_the_others_again() -> None:
    core = make_core(CoreKnobs(chunk_size=200))
    forward = Forward(core, is_bad)
    good = [good_job(rid, 20, 60) for rid in range(4)]
    outcome = run_local(core, [*good, bad_job(9)], rng=random.Random(1))
    judge(outcome, good, [bad_job(9)])
    assert max(forward.rows[-20:]) == 4, "all four decode together in the end"
    assert sum(rows == 1 for rows in forward.rows) < 30


def test_others_step_between_two_suspects() -> None:
    """Those who were not in the failed step need not wait until all the suspects are through."""
    core = make_core(CoreKnobs(overlap=False, chunk_size=500, prefix_cache=False, mix=False))
    plans = plans_of(core)
    decoding = good_job(0, 20, 60).request()
    core.scheduler.intake.submit(decoding)
    while len(decoding.output_ids) < 3:
        core.loop.step(block=True)
    Forward(core, is_bad)
    suspects = [good_job(rid, 20, 1) for rid in range(1, 5)]
    for job in [*suspects, bad_job(9)]:
        core.scheduler.intake.submit(job.request())
    before = len(plans)
    while core.loop.num_failed_steps < 2:
        core.loop.step(block=True)
    ours = [plan for plan in plans[before:] if plan.row_ids[0].key.router_id != "probe"]
    rids = [{row_id.key.rid for row_id in plan.row_ids} for plan in ours]
    alone = [names for names in rids if len(names) == 1 and names != {"r0"}]
    assert alone == [{"r1"}, {"r2"}, {"r3"}, {"r4"}, {"r9"}]
    assert sum(names == {"r0"} for names in rids) >= 4
    run_local(core, [])
    assert decoding.output_ids == good_job(0, 20, 60).expected()


@pytest.mark.parametrize("nth", [3, 9, 14])
def test_a_suspect_that_comes_back_from_the_cold_tier_goes_on(nth: int) -> None:
    """With all its KV back it still runs alone, by the chunk of its last token: an admission is shared."""
    core = make_core(CoreKnobs("simulated", page_size=4, prefix_cache=False, cold_pages=80, seed=2))
    calls: list[int] = []
    Forward(core, lambda inputs: calls.append(1) or len(calls) == nth)
    good = [good_job(rid) for rid in range(4)]
    assert_streams(good, run_local(core, good, rng=random.Random(2)))
    assert core.loop.num_failed_steps == 1
    assert core.queues.counters.readmissions == 0
    assert nth == 3 or core.queues.counters.restored_pages


def test_a_failed_step_of_a_former_life_leaves_the_next_alone() -> None:
    """The request gave its memory away while that step was in flight."""
    core, job = make_core(CoreKnobs(chunk_size=16)), good_job(0, 40)
    request = job.request()
    core.scheduler.intake.submit(request)
    while len(request.output_ids) < 5:
        core.loop.step(block=True)
    former = RowId(request.key, request.incarnation)
    core.queues.retract(request)
    for _ in range(2):  # the first makes a suspect of whom it names, the second ends him
        core.scheduler.results.step_failed((former,), (), StepFailed("injected"))
    run_local(core, [])
    assert request.output_ids == job.expected()
    assert_whole(core)


# ---- hand-offs


def test_a_bad_prompt_fails_alone_on_a_prefill_node() -> None:
    """The others' first chunks are granted and announced: their pages stay, and only the failed chunk runs again."""
    p, d = make_node("prefill", "p0", CoreKnobs(chunk_size=48)), make_node("decode", "d0", CoreKnobs())
    Forward(p.ctx.core, is_bad)
    net = Net([p, d])
    bad, good = good_job(9, FAR + 8), [good_job(rid, 150) for rid in range(3)]
    keys = [net.generate(p, job, d) for job in (bad, *good)]
    net.run(until=lambda: p.ctx.core.loop.num_failed_steps > 0)
    assert len(p.ctx.core.queues.prefilling) > 1 and net.messages(Ready), "others were in the step, and announced"
    net.run()
    assert [net.router.streams[key] for key in keys[1:]] == [expected(job) for job in good]
    assert net.router.end(keys[0]).error_code == "step_failed" and len(net.messages(Installed)) == 3
    assert p.ctx.core.loop.num_failed_steps == 2
    assert_clean(p, d)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_hand_off_recomputes_only_what_the_failed_step_lost(nth: int) -> None:
    core = make_core(CoreKnobs(page_size=4, chunk_size=16, overlap=False))
    first, job = good_job(1, 20), good_job(2, 60)
    prompt = first.prompt + job.prompt[20:]
    run_local(core, [first])
    again = Job(3, prompt, job.sampling, 3)
    core.queues.counters.prompt_tokens = 0
    calls: list[int] = []
    Forward(core, lambda inputs: calls.append(1) or len(calls) == nth)
    req = again.request(handoff_to="decode")
    core.scheduler.intake.submit(req)
    row = 0
    while req.state.value != "handed_off":
        core.loop.step(block=True)
        assert row in (0, req.row), "it keeps its row"
        row = req.row
    assert core.loop.num_failed_steps == 1 and req.output_ids == again.expected()[:1]
    assert core.queues.counters.prompt_tokens == 60 - 20 + 16, "20 were cached, and one chunk ran twice"
    core.queues.complete_handoff(req.key)
    run_local(core, [])
    assert_whole(core)


# ---- the device


def dies(core: NodeCore, nth: int = 1, error: type[Exception] = RuntimeError) -> None:
    """From its nth forward on."""
    calls: list[int] = []
    Forward(core, lambda inputs: calls.append(1) or len(calls) >= nth, error)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_jobs", [1, 5])
@pytest.mark.parametrize("nth", [1, 7])
def test_a_dead_device_ends_the_node_and_blames_no_request(backend: str, num_jobs: int, nth: int) -> None:
    core, outcome = make_core(CoreKnobs(backend, chunk_size=16)), Outcome()
    dies(core, nth)
    for rid in range(num_jobs):
        core.scheduler.intake.submit(good_job(rid).request())
    with pytest.raises(DeviceLost, match="injected"):
        for _ in range(500):
            core.loop.step(block=True)
    outcome.take(core)
    assert core.loop.num_failed_steps <= MOST_IN_A_ROW and not outcome.ends


def test_a_node_does_not_come_up_on_a_dead_device() -> None:
    core, said = make_core(CoreKnobs()), io.StringIO()
    dies(core)
    with pytest.raises(DeviceLost):
        warm_up(core, Logger("d", said))
    assert "warm" not in said.getvalue()


def test_a_dead_device_ends_a_prefill_node() -> None:
    """Its hand-offs can't begin again, for their layers have gone ahead."""
    core, outcome = make_core(CoreKnobs(chunk_size=16, layer_ends=(1,))), Outcome()
    dies(core)
    core.scheduler.intake.submit(good_job(0).request(handoff_to="decode"))
    with pytest.raises(DeviceLost):
        for _ in range(50):
            core.loop.step(block=True)
    outcome.take(core)
    assert not outcome.ends


def test_requests_that_leave_in_time_do_not_hide_a_dead_device() -> None:
    core = make_core(CoreKnobs())
    dies(core)
    with pytest.raises(DeviceLost):
        for rid in range(MOST_IN_A_ROW):
            req = good_job(rid).request()
            core.scheduler.intake.submit(req)
            failed = core.loop.num_failed_steps
            while core.loop.num_failed_steps == failed:
                core.loop.step(block=True)
            core.queues.abort(req.key)
    assert core.loop.num_failed_steps == MOST_IN_A_ROW


@pytest.mark.parametrize("place", ["forward", "copy"])
def test_a_device_error_is_believed_if_an_empty_step_fails_too(place: str) -> None:
    core = make_core(CoreKnobs())
    if place == "forward":
        dies(core, 1, torch.AcceleratorError)
    else:
        launch = core.streams.copy.launch
        core.streams.copy.launch = lambda fn, *args, **kwargs: launch(_lost, *args, **kwargs)  # type: ignore
    core.scheduler.intake.submit(good_job(0).request())
    with pytest.raises(DeviceLost):
        for _ in range(20):
            core.loop.step(block=True)
    assert core.loop.num_failed_steps == 1, "nobody had to try it again"


def _lost() -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_device_errors_that_pass_leave_the_other_streams_right() -> None:
    core = make_core(CoreKnobs(chunk_size=16))
    calls: list[int] = []
    Forward(core, lambda inputs: calls.append(1) or len(calls) % 9 == 0, torch.AcceleratorError)
    good = [good_job(rid) for rid in range(4)]
    outcome = run_local(core, good)
    assert core.loop.num_failed_steps > 2
    failed = {rid for rid, end in outcome.ends.items() if end.reason is FinishReason.ERROR}
    assert_streams([job for job in good if f"r{job.rid}" not in failed], outcome)


@pytest.mark.parametrize("knobs", [{}, {"encoder": True}, {"width": 4}, {"page_size": 1}], ids=str)
def test_the_step_of_nobody_s_takes_nothing_and_touches_nobody(hazards, knobs: dict) -> None:  # noqa: ANN001
    """While rows decode, with the pool in use."""
    core = hazards.watch(make_core(CoreKnobs("simulated", seed=4, **({"page_size": 4} | knobs))))
    job = replace(good_job(1), window=knobs.get("window", 0), encoder=knobs.get("encoder", False))
    req = job.request()
    core.scheduler.intake.submit(req)
    while len(req.output_ids) < 5:
        core.loop.step(block=True)
    while core.engine.leases:
        core.engine.wait_oldest()
        core.loop._process_results()
    free = core.kv.num_available
    core.loop._ask_device()
    assert core.kv.num_available == free and not core.engine.leases
    assert_streams([], run_local(core, []))
    assert req.output_ids == job.expected()
    assert_whole(core)
