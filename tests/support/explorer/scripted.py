"""Schedules written by hand, for rules that random orders seldom hit. Each raises AssertionError when its rule is
broken; the mutants that must fail it say so. The core is on a world that moves only when told to."""

from __future__ import annotations

from contextlib import ExitStack

from shared.core.sampling_params import SamplingParams
from shared.device.stream import Work
from shared.engine.transfer_jobs import TransferJobs
from shared.node.records.core import NodeCore
from tests.support.cores.core_rig import CoreKnobs, Job, make_core
from tests.support.cores.simulated_streams import World
from tests.support.explorer.cases import Mutant, Site, inject


def pulls_wait_for_all_of_the_newest_step(mutant: Mutant | None = None) -> None:
    """forward(1) sample(1) forward(2) | sample(2): until the very last is over, a pull may not write a page."""
    with ExitStack() as stack:
        world, core = _two_steps_in_flight(stack, mutant)
        jobs: TransferJobs[str, None] = TransferJobs(core.engine)
        jobs.launch("pull", lambda: None, "pull", after_newest_step=True)
        while len(core.streams.forward.items) > 1 or _head_label(core) != "sample(2)":
            assert world.run_stream("transfer") == 0, f"a pull ran before {_head_label(core)}"
            world.run("forward")
        assert world.run_stream("transfer") == 0, "a pull ran beside the sampling closure, whose draft-extend writes"
        world.run_stream("forward")
        assert world.run_stream("transfer") == 1


def recovery_drains_what_still_runs(mutant: Mutant | None = None) -> None:
    """The copy of step 1 fails while step 2 runs: rows and pages may go only when step 2 is over."""
    with ExitStack() as stack:
        world, core = _two_steps_in_flight(stack, mutant, fail_copy=True)
        while not core.engine.leases[0].done.peek():
            world.run_stream("copy")
            if not core.engine.leases[0].done.peek():
                world.run("forward")
        core.loop.step()
        assert core.loop.num_failed_steps == 1
        forward = core.streams.forward
        left = [item for item in forward.items if isinstance(item, Work) and item.epoch < forward.epoch]
        assert not left, f"recovered, and {len(left)} closures of the old epoch still run"


def _two_steps_in_flight(stack: ExitStack, mutant: Mutant | None, fail_copy: bool = False) -> tuple[World, NodeCore]:
    world = World.script()
    core = make_core(CoreKnobs("simulated", width=4, page_size=4, chunk_size=16), world)
    stack.callback(core.close)
    if fail_copy:
        inject(core, "copy", 1)
    if mutant is not None:
        mutant.apply(Site(core, (), stack))
    for rid in (0, 1):
        sampling = SamplingParams(max_tokens=30, temperature=0.0)
        core.scheduler.intake.submit(Job(rid, tuple(range(10 + rid)), sampling, rid).request())
    core.loop.step()
    core.loop.step()
    assert len(core.engine.leases) == 2
    return world, core


def _head_label(core: NodeCore) -> str:
    head = core.streams.forward.head()
    return head.label if head is not None else "nothing"


SCRIPTS = {
    "pulls": pulls_wait_for_all_of_the_newest_step,
    "drain": recovery_drains_what_still_runs,
}
