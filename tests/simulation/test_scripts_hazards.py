"""Scripted schedules for hazards outside of the rules S1 to S12; docs/rules.md has each. Nothing runs on a stream
until the test says so."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shared.model.math.interface import Model, ModelInputs, ModelOutput
from shared.sched.steps.events import Emitted, SchedEvent
from shared.wire.messages import Heartbeat, Message, Ready
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, assert_whole, draw_jobs, make_core, run_local
from tests.support.cores.scripted_core import FORWARD, Script, job
from tests.support.cores.simulated_streams import World
from tests.support.oracles.hashlm_reference import reference_run
from tests.support.worlds.node_pair import LEASE_S, Net, assert_clean, expected, make_node, name_of

POISON = 1e9


@pytest.mark.rule("H8")
def test_planning_and_launching_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """H8: a step is planned and launched while the one before it has not begun; the host waits for no stream."""
    script = Script()
    one = job(1, 12, 12)
    (req,) = script.submit(one)
    script.run_until_running(req)
    running = script.in_flight()
    with monkeypatch.context() as patch:
        patch.setattr(World, "block", refuse_to_block)
        script.step()
    assert script.in_flight().step == running.step + 1 and len(script.core.engine.leases) == 2
    assert_streams([one], script.finish())


def refuse_to_block(*args: object) -> None:
    raise AssertionError("the host waited for a stream")


def reuse_output_buffers(model: Model) -> None:
    """As a captured graph does: every step's outputs lie where those of the step before lay."""
    forward: Callable[..., ModelOutput] = model.forward
    kept: dict[str, torch.Tensor] = {}

    def again(inputs: ModelInputs, kv: object) -> ModelOutput:
        for buffer in kept.values():
            buffer.fill_(POISON)
        output = forward(inputs, kv)
        names = [name for name in ("logits", "hidden", "aux") if getattr(output, name) is not None]
        return ModelOutput(**{name: settle(kept, name, getattr(output, name)) for name in names})

    model.forward = again  # type: ignore[method-assign]


def settle(kept: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> torch.Tensor:
    if name not in kept:
        kept[name] = torch.zeros((256, *value.shape[1:]), dtype=value.dtype)
    kept[name][: len(value)] = value
    return kept[name][: len(value)]


@pytest.mark.rule("H9")
@pytest.mark.parametrize("width", [1, 4])
def test_outputs_in_buffers_that_every_step_reuses(width: int) -> None:
    """H9: the next forward runs before the results of this step were copied to the host."""
    script = Script(width=width)
    reuse_output_buffers(script.core.model)
    said = logprobs_said(script)
    jobs = [job(rid, 9 + rid, 20, num_logprobs=2) for rid in range(3)]
    requests = script.submit(*jobs)
    script.run_until_running(*requests)
    overtaken = 0
    while script.core.queues.requests:
        for _ in range(2):
            script.step()
            while script.world.run_stream(FORWARD):
                pass  # to the end of what is launched, but for the copies
        overtaken += len(script.core.engine.leases) > 1
        script.world.run_until_idle()
    assert overtaken > 3
    assert_streams(jobs, script.finish())
    for one in jobs:
        wanted = reference_run(one.prompt, one.sampling, one.seed, one.sampling.max_tokens).logprobs
        assert said[f"r{one.rid}"] == pytest.approx(wanted, abs=1e-4)
    assert_whole(script.core)


def logprobs_said(script: Script) -> dict[str, list[float]]:
    """By request, from now on."""
    said: dict[str, list[float]] = defaultdict(list)
    take = script.core.queues.take_events

    def listen() -> list[SchedEvent]:
        events = take()
        for event in events:
            if isinstance(event, Emitted):
                said[event.key.rid] += [entry.logprob for entry in event.logprobs]
        return events

    script.core.queues.take_events = listen  # type: ignore[method-assign]
    return said


class Late(list[int]):
    """A free list that gives what was freed longest ago."""

    def pop(self, index: object = None) -> int:
        return super().pop(0)


@pytest.mark.rule("H33")
@pytest.mark.parametrize("reuse", ["at once", "late"])
def test_rows_that_are_reused_at_once_or_late(reuse: str) -> None:
    """H33: the pool's order of reuse must not matter; production reuses at once."""
    for seed in range(6):
        core = make_core(CoreKnobs(backend="simulated", page_size=4, num_pages=60, max_running=4, seed=seed))
        if reuse == "late":
            core.kv.rows._free_rows = Late(core.kv.rows._free_rows)
        jobs = draw_jobs(random.Random(seed), 12, max_prompt=60)
        assert_streams(jobs, run_local(core, jobs, retract_every=9, rng=random.Random(seed)))
        assert_whole(core)
        core.close()


@pytest.mark.rule("H37")
def test_a_retraction_finds_rows_in_the_batch_that_have_ended() -> None:
    """H37: they stay in the batch until the next plan. One row needs pages just then: whoever ended has given its own
    back already and is nobody's victim."""
    script = Script(num_pages=14, page_size=4, prefix_cache=False)
    old, young = job(1, 8, 24), job(2, 8, 24)
    first, second = script.submit(old, young)
    script.run_until_running(first, second)
    script.core.queues.abort(second.key)
    assert second in script.core.queues.running.reqs and second.row == 0
    assert [req.key.rid for req in script.core.queues.holders()] == ["r1"]
    assert not script.core.scheduler.capacity.make_room(first, 80), "there are not so many pages"
    assert first.incarnation == 1 and second.incarnation == 0, "it begins again itself"
    script.core.kv.check_integrity()
    assert_streams([old], script.finish())
    assert_whole(script.core)


# ---- nodes


@pytest.mark.rule("H42")
def test_a_node_whose_work_is_parked_goes_on_telling_and_polling() -> None:
    """H42: the decode node has no step to run, for its only request waits for pages. It tells its load all the same,
    and what arrives is installed."""
    p, d = make_node("prefill", "p0", CoreKnobs(chunk_size=32)), make_node("decode", "d0", CoreKnobs())
    net = Net([p, d])
    net.hold = lambda src, dst, message: isinstance(message, Ready)
    one = plain(1, 40)
    key = net.generate(p, one, d)
    net.run()
    assert d.ctx.core.queues.granted and d.ctx.core.loop.idle
    told: list[Message] = []
    net.on_message = lambda src, dst, m: told.append(m) if src == name_of(d) and isinstance(m, Heartbeat) else None
    for _ in range(8):
        net.at(d.ctx.facts.heartbeat_s)
        net.tick(name_of(d))
    assert len(told) == 8 and told[-1].load.rows["granted"] == 1  # type: ignore[attr-defined]
    assert 8 * d.ctx.facts.heartbeat_s < LEASE_S
    net.hold = lambda src, dst, message: False
    net.release_held()
    net.run()
    assert net.router.streams[key] == expected(one)
    assert_clean(p, d)


def plain(rid: int, length: int) -> Job:
    one = job(rid, length)
    return replace(one, sampling=replace(one.sampling, temperature=0.0))
