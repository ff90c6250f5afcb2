"""One run of the explorer: everything drawn from a seed, or followed from a record, and judged by every oracle.

detector   unordered pairs, wrong owners, stale generations, tensors around accessors       (with detect=True)
stream     every stream is the reference's, every request ends well, nothing leaks, nobody waits for ever
accept     each verify accepts what HashDraft's hash says
latency    lengths are published before draft-extend begins
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from unittest.mock import patch

from decode_node.side import DecodeSide
from shared.core.request import RequestState
from shared.node.loop.node import Node
from shared.node.records.core import NodeCore
from shared.wire.codec import to_wire
from shared.wire.messages import Key, Prebuilt, Ready
from tests.support.cores import core_rig as rig
from tests.support.cores.core_rig import (
    CoreKnobs,
    Job,
    Outcome,
    assert_streams,
    assert_whole,
    draw_jobs,
    retract_somebody,
)
from tests.support.cores.equivalence_cells import SPECS, Watch, assert_whole_core, most_accepted
from tests.support.cores.simulated_streams import DeadlockError
from tests.support.explorer.subjects import HASHED, NUM_DRAFTS, Subject, greedy_jobs, real_heads
from tests.support.explorer.timeline import render
from tests.support.explorer.world import ExplorerWorld, Schedule
from tests.support.hazards.attach import Hazards, watching
from tests.support.hazards.detector import HazardError
from tests.support.worlds.node_pair import Net, expected, make_node

PAIRS = ("pair", "cold", "real_pair")  # of nodes; those of "cold" have a cold tier
REAL = ("real", "real_pair")  # a model of floats with its own MTP layers
COLD_PAGES = 30
ROUNDS = 6000  # only a livelock needs more
SCENARIOS = ("plain", "spec", "lengths", "pair", "fault", "ngram", "mtp", "tree", "cold", "real", "real_pair")
ONE_CORE_WIDTH = {"plain": 1, "spec": 4, "lengths": 4, "fault": 4, "ngram": 4, "mtp": 4, "tree": 7}


@dataclass(frozen=True)
class Case:
    """`rids`: which of the drawn jobs take part (None: all); `schedules`: one per world (None: drawn)."""

    scenario: str
    seed: int
    rids: tuple[int, ...] | None = None
    schedules: tuple[Schedule, ...] | None = None


@dataclass
class Verdict:
    """`oracle`: who found it, '' when nothing was found. `schedules` are what the worlds decided."""

    oracle: str = ""
    message: str = ""
    schedules: tuple[Schedule, ...] = ()
    rids: tuple[int, ...] = ()
    num_steps: int = 0
    worlds: list[ExplorerWorld] = field(default_factory=list)

    def timeline(self, last: int = 60) -> str:
        return "\n\n".join(f"{world.describe()}\n{render(world, last)}" for world in self.worlds)


@dataclass
class Site:
    """What a mutant may change: the core whose streams are explored, and the nodes where there are two."""

    core: NodeCore
    nodes: tuple[Node, ...]
    stack: ExitStack


class Mutant(Protocol):
    def apply(self, site: Site) -> None: ...


class LatencyError(AssertionError):
    """Lengths that the host may be waiting for were published later than need be."""


def draw_knobs(case: Case, rng: random.Random) -> tuple[CoreKnobs, list[Job]]:
    page_size = rng.choice([1, 4, 16])
    tight = {1: 260, 4: 70, 16: 20}[page_size]
    knobs = CoreKnobs(
        backend="simulated",
        chunk_size=rng.choice([7, 32, 64]),
        mix=rng.random() < 0.7,
        page_size=page_size,
        num_pages=tight if case.scenario in PAIRS else rng.choice([tight, 3 * tight]),
        max_running=rng.choice([3, 6]),
        prefix_cache=rng.random() < 0.6,
        width=ONE_CORE_WIDTH.get(case.scenario) or rng.choice([1, 4]),
        spec=case.scenario if case.scenario in ("ngram", "mtp") else "eagle",
        needs_cpu_seq_lens=case.scenario == "lengths",
        seed=case.seed,
    )
    if case.scenario == "tree":
        knobs = replace(knobs, **SPECS["tree"])
    if case.scenario == "cold":
        knobs = replace(knobs, cold_pages=COLD_PAGES, cold_file_pages=COLD_PAGES)
    if case.scenario in REAL:
        knobs = replace(knobs, spec="mtp", width=1 + NUM_DRAFTS, needs_cpu_seq_lens=case.seed % 2 == 1)
        jobs = greedy_jobs(rng, 6)
    else:
        jobs = draw_jobs(rng, 12 if case.scenario in PAIRS else 8, max_prompt=50)
    return knobs, jobs if case.rids is None else [job for job in jobs if job.rid in case.rids]


def run_case(case: Case, mutant: Mutant | None = None, detect: bool = True) -> Verdict:
    """Never raises for what it looks for."""
    rng = random.Random(case.seed)
    knobs, jobs = draw_knobs(case, rng)
    verdict = Verdict(rids=tuple(job.rid for job in jobs))
    subject = real_heads()[1] if case.scenario in REAL else HASHED
    with ExitStack() as stack:
        hazards = None
        try:
            hazards = stack.enter_context(_maybe_watching(detect))
            stack.enter_context(_worlds(case, verdict))
            run = _run_pair if case.scenario in PAIRS else _run_faulty if case.scenario == "fault" else _run_local
            verdict.num_steps = run(Exploration(subject, knobs, jobs, rng, hazards, mutant, stack))
            if hazards is not None:
                hazards.detector.check()
        except Exception as error:
            _judge(verdict, error, hazards)
    verdict.schedules = tuple(world.schedule for world in verdict.worlds)
    return verdict


def _judge(verdict: Verdict, error: Exception, hazards: Hazards | None) -> None:
    """Whatever went wrong in the end, a hazard that was seen before names the cause."""
    if hazards is not None and hazards.detector.errors and not isinstance(error, HazardError):
        try:
            hazards.detector.check()
        except HazardError as hazard:
            error = hazard
    names = {HazardError: "detector", LatencyError: "latency", DeadlockError: "deadlock", AssertionError: "stream"}
    verdict.oracle = next((name for kind, name in names.items() if isinstance(error, kind)), "crash")
    if verdict.oracle == "stream" and "accepted" in str(error):
        verdict.oracle = "accept"
    verdict.message = f"{type(error).__name__}: {error}"


@contextmanager
def _maybe_watching(detect: bool) -> Iterator[Hazards | None]:
    """Like `watching`, but the verdict is taken by the caller."""
    if not detect:
        yield None
        return
    hazards = None
    try:
        with watching() as hazards:
            yield hazards
    except HazardError:
        if hazards is None:
            raise


@contextmanager
def _worlds(case: Case, verdict: Verdict) -> Iterator[None]:
    """Every core that the rig makes gets a world of ours."""

    def make(seed: int) -> ExplorerWorld:
        index = len(verdict.worlds)
        schedule = case.schedules[index] if case.schedules is not None else None
        eager = case.scenario in PAIRS and index == 0  # quick pages meet late steps
        lazy = case.scenario in PAIRS and index == 1
        verdict.worlds.append(ExplorerWorld(seed * 2 + index, schedule, eager=eager, lazy=lazy))
        return verdict.worlds[-1]

    with patch.object(rig, "World", make):
        yield


def watch_latency(core: NodeCore) -> None:
    """S4: publish comes right after verify; a host that waits for lengths does not wait for the draft model."""
    drafter = core.engine.worker.drafter
    if drafter is None:
        return
    extend, step = drafter.extend, core.loop.step
    late: list[str] = []

    def timed(fb, *rest):  # noqa: ANN001, ANN202
        lease = next((lease for lease in core.engine.leases if lease.step == fb.plan.step), None)
        if lease is not None and lease.publish_ready is not None and not lease.publish_ready.fired:
            late.append(f"step {fb.plan.step}: draft-extend began before its lengths were published")
        return extend(fb, *rest)

    def checked(block: bool = False) -> bool:
        moved = step(block)
        if late:
            raise LatencyError(late[0])
        return moved

    drafter.extend, core.loop.step = timed, checked  # type: ignore[method-assign]


@dataclass(frozen=True)
class Exploration:
    """A case's knobs and jobs, and who watches."""

    subject: Subject
    knobs: CoreKnobs
    jobs: list[Job]
    rng: random.Random
    hazards: Hazards | None
    mutant: Mutant | None
    stack: ExitStack

    def make_core(self, **changes: Any) -> NodeCore:
        core = self.subject.make(replace(self.knobs, **changes))
        self.stack.callback(core.close)
        return core

    def watch(self, core: NodeCore, name: str = "") -> NodeCore:
        Watch()._check_accepts(core, most_accepted(self.knobs), self.subject.accepts)
        watch_latency(core)
        if self.hazards is not None:
            self.hazards.watch(core, name)
        return core

    def mutate(self, core: NodeCore, nodes: tuple[Node, ...] = ()) -> None:
        if self.mutant is not None:
            self.mutant.apply(Site(core, nodes, self.stack))


def _run_local(run: Exploration) -> int:
    core = run.watch(run.make_core())
    run.mutate(core)
    outcome = _drive(core, run.jobs, run.rng)
    for rid, end in outcome.ends.items():
        assert end.reason.value in ("stop", "length"), f"{rid} ended with {end.error!r}"
    assert_streams(run.jobs, outcome)
    return core.loop.num_steps


def _run_faulty(run: Exploration) -> int:
    """One closure raises. Nobody fails: the rows of that step begin again."""
    core = run.watch(run.make_core())
    inject(core, run.rng.choice(["model", "extend", "copy"]), run.rng.randrange(2, 20))
    run.mutate(core)
    outcome = _drive(core, run.jobs, run.rng)
    assert_streams(run.jobs, outcome)
    return core.loop.num_steps


def inject(core: NodeCore, place: str, nth: int) -> None:
    """The nth call at that place raises."""
    calls = [0]

    def faulty(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == nth:
                raise RuntimeError(f"injected at {place}")
            return fn(*args, **kwargs)

        return run

    if place == "model":
        core.model.forward = faulty(core.model.forward)  # type: ignore[method-assign]
    elif place == "extend":
        drafter = core.engine.worker.drafter
        assert drafter is not None
        drafter.extend = faulty(drafter.extend)  # type: ignore[method-assign]
    else:
        copy = core.streams.copy
        launch = copy.launch
        copy.launch = lambda fn, *args, **kwargs: launch(faulty(fn), *args, **kwargs)  # type: ignore[method-assign]


def _drive(core: NodeCore, jobs: list[Job], rng: random.Random) -> Outcome:
    """Submit in waves, step with and without blocking, retract somebody now and then, until nothing is left."""
    outcome, left, rounds, retractions = Outcome(), list(jobs), 0, 0
    every = rng.choice([0, 5, 11])
    while left or core.queues.requests or not core.loop.idle:
        rounds += 1
        assert rounds < ROUNDS, f"no end after {rounds} rounds: {len(core.queues.requests)} requests open"
        while left and rng.random() < 0.5:
            core.scheduler.intake.submit(left.pop(0).request())
        core.loop.step(block=rng.random() < 0.5)
        outcome.take(core)
        if every and rounds % every == 0 and retractions < 12:
            retractions += 1
            retract_somebody(core, rng)
    assert_whole(core)
    return outcome


def _run_pair(run: Exploration) -> int:
    knobs, hazards = run.knobs, run.hazards
    p = make_node("prefill", "p0", knobs, core=run.make_core(num_pages=3 * knobs.num_pages))
    d = make_node("decode", "d0", knobs, core=run.make_core())
    for node, name in ((p, "p0"), (d, "d0")):
        run.watch(node.ctx.core, name)
    if hazards is not None:
        hazards.watch_transfers(p.ctx.core, list(p.side.inflight._senders.values()))  # type: ignore[union-attr]
        hazards.watch_transfers(d.ctx.core, list(d.side.transfers.copies.receivers.values()))  # type: ignore[union-attr]
    run.mutate(d.ctx.core, (p, d))
    _carry((p, d), run.jobs, run.rng, knobs.seed)
    for node in (p, d):
        assert_whole_core(node.ctx.core)
    return p.ctx.core.loop.num_steps + d.ctx.core.loop.num_steps


@dataclass
class Disturber:
    """Takes requests of the decode node back or away, by preference while pulls write or offers wait for memory:
    then a step that still runs meets the next owner of its pages."""

    net: Net
    node: Node
    rng: random.Random
    retractions: int
    aborts: int
    aborted: set[Key] = field(default_factory=set)

    def over(self, keys: Iterable[Key]) -> bool:
        """The router hears nothing more of what it aborted."""
        return all(self.net.router.ends[key] or key in self.aborted for key in keys)

    def maybe(self) -> None:
        core, side = self.node.ctx.core, self.node.side
        assert isinstance(side, DecodeSide)
        running = [req for req in core.queues.running.reqs if req.state is RequestState.RUNNING]
        granted = core.queues.granted
        pulled = [h.request for h in side.transfers.open.values() if h.num_pulling and h.key in granted]
        if pulled and self.retractions and self.rng.random() < 0.1:
            self.retractions -= 1
            core.queues.retract(self.rng.choice(pulled))
        elif running and self.aborts and self.rng.random() < (0.2 if side.prealloc.requests() else 0.01):
            self.aborts -= 1
            key = to_wire(self.rng.choice(running).key)
            self.aborted.add(key)
            self.net.abort(self.node, key)
        elif running and self.retractions and self.rng.random() < 0.02:
            self.retractions -= 1
            core.queues.retract(self.rng.choice(running))


def _carry(nodes: tuple[Node, Node], jobs: list[Job], rng: random.Random, seed: int) -> None:
    """Messages by hand; pages and records may be late. Every fourth prompt goes to the decode node alone."""
    p, d = nodes
    net, left, rounds = Net(nodes, seed), list(jobs), 0
    net.hold = lambda src, dst, message: isinstance(message, Ready | Prebuilt) and rng.random() < 0.1
    disturber = Disturber(net, d, rng, rng.choice([0, 8]), rng.choice([0, 4]))
    keys = {}
    while left or not all(node.idle for node in nodes) or not disturber.over(keys.values()):
        rounds += 1
        assert rounds < ROUNDS, f"no end after {rounds} rounds"
        while left and rng.random() < 0.3:
            job = left.pop(0)
            keys[job.rid] = net.generate(d, job) if job.rid % 4 == 0 else net.generate(p, job, d)
        if not sum([net.tick(name) for name in net.nodes]) or rounds % 7 == 0:
            net.release_held(shuffle=True)
        disturber.maybe()
    for job in jobs:
        _judge_stream(net, keys[job.rid], job, keys[job.rid] in disturber.aborted)


def _judge_stream(net: Net, key: Key, job: Job, aborted: bool) -> None:
    """An aborted stream may end anywhere, but said nothing wrong."""
    ends, stream, wanted = net.router.ends[key], net.router.streams[key], expected(job)
    if aborted:
        wanted = wanted[: len(stream)]
    else:
        assert [end.reason in ("stop", "length") for end in ends] == [True], f"{key} ended with {ends}"
    assert stream == wanted, f"stream of r{job.rid}: {job.sampling}"
