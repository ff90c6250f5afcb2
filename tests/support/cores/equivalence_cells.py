"""Cells of the equivalence matrix: what is drawn by seed, how a cell is run, and what is watched while it runs.

The oracle is the stream; beside it every verify must accept what HashDraft's hash says, freed pages are poisoned, and
the books must add up while everything is in flight.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from shared.core.request import Request, RequestState
from shared.engine.plan import StepPlan, StepResult
from shared.kv.pages import PageIds
from shared.node.loop.node import Node
from shared.node.records.core import NodeCore
from shared.sched.steps.events import Emitted, Ended
from shared.wire.messages import Key, Prebuilt, Ready
from tests.support.cores.core_rig import CoreKnobs, Job, draw_jobs, make_core
from tests.support.oracles.grammar_oracle import KINDS, following
from tests.support.oracles.hash_draft import expected_accept_len
from tests.support.worlds.node_pair import Net, expected, make_node, sibling

POISON = 0xA5
HIT_RATE = 70
MAX_RETRACTIONS = 20  # forced ones: a prompt that is retracted every few steps for ever would never end
AXES: dict[str, tuple] = {
    "overlap": (True, False),
    "chunk_size": (3, 16, 64),
    "page_size": (1, 16, 64),
    "mode": ("disaggregated", "local", "mixed"),
    "retract": (True, False),
    "temperature": (0.0, 0.8),
    "prefix_cache": (True, False),
    "spec": ("off", "ngram", "chain", "tree", "mtp", "copies"),
    "backend": ("simulated", "cpu", "simulated", "inline"),  # twice as often: only it finds what is unordered
    "host_lengths": (True, False),
    "offload": ("off", "memory", "file"),
    "stages": (1, 2),
    "grammar": ("none", "none", "none", "json", "regex", "choice", "tool"),
}
NEVER = ("stages", 2, "grammar")  # a pipeline follows no grammar
SPECS: dict[str, dict] = {
    "off": {},
    "ngram": {"spec": "ngram", "width": 4},
    "chain": {"spec": "eagle", "width": 4},
    "tree": {"spec": "eagle", "width": 7, "topk": 2, "steps": 2},  # all that can be drafted is verified
    "mtp": {"spec": "mtp", "width": 4},
    "copies": {"spec": "eagle", "width": 6, "topk": 2, "steps": 3, "copies": 1},
}
COLD_TOKENS = {"off": (0, 0), "memory": (320, 0), "file": (64, 512)}  # memory, file
NUM_PAGES = {1: (300, 600, 900), 16: (22, 40, 100), 64: (7, 12, 30)}
AcceptRule = Callable[[Request, int, int], int]  # (request, committed length, width) -> what a verify accepts


def by_hash(request: Request, committed: int, width: int) -> int:
    return expected_accept_len(committed, width, HIT_RATE)


@dataclass(frozen=True)
class Cell:
    overlap: bool
    chunk_size: int
    page_size: int
    mode: str
    retract: bool
    temperature: float
    prefix_cache: bool
    spec: str
    backend: str
    host_lengths: bool
    offload: str
    stages: int
    grammar: str

    def pairs(self) -> set[tuple[str, object, str, object]]:
        values = [(axis.name, getattr(self, axis.name)) for axis in fields(self)]
        return {(*one, *other) for one, other in itertools.combinations(values, 2)}


def all_pairs() -> set[tuple[str, object, str, object]]:
    found = set()
    for (one, values), (other, others) in itertools.combinations(AXES.items(), 2):
        found |= {(one, a, other, b) for a in values for b in others}
    return {pair for pair in found if pair[:3] != NEVER or pair[3] == "none"}


def draw_cell(rng: random.Random) -> Cell:
    cell = Cell(**{name: rng.choice(values) for name, values in AXES.items()})
    return cell if cell.grammar == "none" else replace(cell, stages=1)


def knobs_of(cell: Cell, rng: random.Random, seed: int) -> CoreKnobs:
    return CoreKnobs(
        backend=cell.backend,
        overlap=cell.overlap,
        chunk_size=cell.chunk_size,
        mix=cell.mode == "mixed" or (cell.mode == "disaggregated" and rng.random() < 0.5),
        page_size=cell.page_size,
        num_pages=rng.choice(NUM_PAGES[cell.page_size]),
        max_running=rng.choice([3, 6]),
        prefix_cache=cell.prefix_cache,
        **SPECS[cell.spec],
        hit_rate=HIT_RATE,
        needs_cpu_seq_lens=cell.host_lengths,
        stages=cell.stages,
        cold_pages=COLD_TOKENS[cell.offload][0] // cell.page_size,
        cold_file_pages=COLD_TOKENS[cell.offload][1] // cell.page_size,
        seed=seed,
    )


@dataclass
class Watch:
    """Counts, and the checks that look inside."""

    decode_steps: int = 0
    steps: int = 0
    verifies: int = 0
    retractions: int = 0
    readmissions: int = 0  # by stash, out of the cold tier
    restored_pages: int = 0
    outcomes: Counter = field(default_factory=Counter)

    def on(self, core: NodeCore, most: int = 16) -> None:
        """`most`: tokens that a verify may accept, however wide; a tree is wider than it is deep."""
        self._count_steps(core)
        self._check_accepts(core, most)
        core.kv.allocator.on_free = lambda pages: poison(core, pages)

    def _count_steps(self, core: NodeCore) -> None:
        launch = core.engine.launch

        def count(plan: StepPlan):  # noqa: ANN202
            self.steps += 1
            self.decode_steps += plan.num_prefill < plan.batch_size
            return launch(plan)

        core.engine.launch = count  # type: ignore[method-assign]

    def _check_accepts(self, core: NodeCore, most: int, right: AcceptRule = by_hash) -> None:
        process, scheduler = core.scheduler.process, core.scheduler
        drafter = core.engine.worker.drafter
        foresees = drafter is not None and not drafter.reads_history  # copies are right when they are

        def check(result: StepResult) -> None:
            for b, row_id in enumerate(result.row_ids):
                req = scheduler.queues.requests.get(row_id.key)
                alive = req is not None and req.incarnation == row_id.incarnation
                if foresees and req and alive and not req.ask.sampling.grammar and b >= result.num_prefill:
                    accepted = int(result.accept_lens[b])
                    committed = int(result.seq_lens[b]) - accepted
                    wanted = right(req, committed, min(result.width, most))
                    assert accepted == wanted, (
                        f"{row_id.key}: a verify at {committed} accepted {accepted}, not {wanted}"
                    )
                    self.verifies += 1
            process(result)

        scheduler.process = check  # type: ignore[method-assign]

    def off(self, core: NodeCore) -> None:
        """Add the counts of a finished cell. No restore from the cold tier may have failed."""
        self.readmissions += core.queues.counters.readmissions
        self.restored_pages += core.queues.counters.restored_pages
        assert not core.queues.counters.offload_failures


def most_accepted(knobs: CoreKnobs) -> int:
    return knobs.width if knobs.topk == 1 else knobs.steps + 1


def poison(core: NodeCore, pages: PageIds) -> None:
    """Freed memory never looks like KV. Written by the host at the moment of the free: the steps in flight that can
    still read it are zombies."""
    for page in pages.tolist():
        core.pool.page_view(page)[:] = POISON


def retract_somebody(core: NodeCore, rng: random.Random) -> None:
    states = (RequestState.RUNNING, RequestState.GRANTED)
    holders = [req for req in core.queues.holders() if req.state in states]
    if holders:
        core.queues.retract(rng.choice(holders))


@dataclass
class Retractor:
    """Retract a running request every `every` rounds, at most `left` times."""

    core: NodeCore
    rng: random.Random
    every: int  # 0: never
    left: int = MAX_RETRACTIONS
    rounds: int = 0

    def maybe(self) -> int:
        self.rounds += 1
        if not self.every or self.rounds % self.every or not self.left:
            return 0
        self.left -= 1
        retract_somebody(self.core, self.rng)
        return 1


def run_cell(
    seed: int,
    watch: Watch,
    num_jobs: int = 38,
    window: int = 0,
    lower_window: int | None = None,
    encoder: bool = False,
) -> Cell:
    """Draw everything from the seed, run it, compare every stream with the reference, look for leaks. With a `window`
    or an `encoder` no draft head, and with an encoder no cold tier."""
    rng = random.Random(seed)
    cell = draw_cell(rng)
    if window or lower_window or encoder:
        cell = replace(cell, spec=rng.choice(["off", "ngram"]))
    if encoder:
        cell = replace(cell, stages=1, grammar="none", offload="off")
    knobs, jobs = knobs_of(cell, rng, seed), draw_jobs(rng, num_jobs, cell.temperature)
    jobs = [under_grammar(job, cell.grammar, rng) for job in jobs]
    model = {"window": window, "lower_window": lower_window, "encoder": encoder}
    num_groups = 1 if lower_window is None else 2
    sizes = {name: num_groups * getattr(knobs, name) for name in ("num_pages", "cold_pages", "cold_file_pages")}
    knobs, jobs = replace(knobs, **sizes, **model), [replace(job, **model) for job in jobs]
    every = rng.choice([5, 9, 14]) if cell.retract else 0
    run = run_disaggregated if cell.mode == "disaggregated" else run_alone
    run(knobs, jobs, every, rng, watch)
    watch.outcomes[cell.mode] += 1
    return cell


def under_grammar(job: Job, kind: str, rng: random.Random) -> Job:
    """Most of a cell's requests follow a grammar of its kind; the others run beside them."""
    if kind == "none" or rng.random() < 0.3:
        return job
    return replace(job, sampling=following(job.sampling, rng.choice(KINDS[kind])))


def run_alone(knobs: CoreKnobs, jobs: Sequence[Job], every: int, rng: random.Random, watch: Watch) -> None:
    core = make_core(knobs)
    watch.on(core, most_accepted(knobs))
    retractor, left = Retractor(core, rng, every), list(jobs)
    streams: dict[str, list[int]] = {f"r{job.rid}": [] for job in jobs}
    ends: dict[str, str] = {}
    try:
        for _ in _Rounds(lambda: bool(left or core.queues.requests or not core.loop.idle)):
            while left and rng.random() < 0.5:
                core.scheduler.intake.submit(left.pop(0).request())
            core.loop.step(block=True)
            for event in core.queues.take_events():
                if isinstance(event, Emitted):
                    assert event.first_pos == len(streams[event.key.rid])
                    streams[event.key.rid].extend(event.ids)
                elif isinstance(event, Ended):
                    assert ends.setdefault(event.key.rid, event.reason.value) in ("stop", "length"), event
            watch.retractions += retractor.maybe()
            if retractor.rounds % 16 == 0:
                core.check_integrity()
        for job in jobs:
            assert streams[f"r{job.rid}"] == job.expected(), f"stream of r{job.rid}: {job.sampling}"
        assert len(ends) == len(jobs)
        assert_whole_core(core)
        watch.off(core)
    finally:
        core.close()


def run_disaggregated(knobs: CoreKnobs, jobs: Sequence[Job], every: int, rng: random.Random, watch: Watch) -> None:
    """A prefill and a decode node, messages carried by hand: pages and records may change their order. Every fourth
    prompt is short enough, so to say, and goes to the decode node alone."""
    nodes = (make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs))
    p, d = nodes
    for node in nodes:
        watch.on(node.ctx.core, most_accepted(knobs))
    net, retractor = Net(nodes, knobs.seed), Retractor(d.ctx.core, rng, every)
    try:
        keys, forced = through_pair(net, p, d, jobs, retractor, has_threads=knobs.backend == "cpu")
        watch.retractions += forced
        for job in jobs:
            assert net.router.streams[keys[job.rid]] == expected(job), f"stream of r{job.rid}: {job.sampling}"
            ends = net.router.ends[keys[job.rid]]
            # One grant that is retracted while the first token ends its request ends on both nodes, and equally.
            assert len(ends) == 1 or (len(ends) == 2 and ends[0] == ends[1] and ends[0].num_output_tokens == 1), ends
            assert ends[0].reason in ("stop", "length"), ends
        for node in nodes:
            assert_whole_core(node.ctx.core)
            watch.off(node.ctx.core)
    finally:
        for node in nodes:
            node.ctx.core.close()


def through_pair(
    net: Net, p: Node, d: Node, jobs: Sequence[Job], retractor: Retractor, has_threads: bool
) -> tuple[dict[int, Key], int]:
    """Run all jobs to their ends. Return their keys by rid, and how many retractions were forced."""
    rng, left, keys, forced = retractor.rng, list(jobs), dict[int, Key](), 0
    net.hold = lambda src, dst, message: isinstance(message, Ready | Prebuilt) and rng.random() < 0.2
    counted = _Rounds(lambda: bool(left) or not _ended(net, jobs, keys) or not (p.idle and d.idle))
    for rounds in counted:
        while left and rng.random() < 0.5:
            job = left.pop(0)
            local = job.rid % 4 == 0
            keys[job.rid] = net.generate(d if local else p, job, None if local else d, num_sequences=job.num_sequences)
        if not sum([net.tick(name) for name in net.nodes]):
            net.release_held(shuffle=True)
            _pause((p, d))
            counted.waited += has_threads  # which run as fast as the machine lets them
        if rounds % 7 == 0:
            net.release_held(shuffle=True)
        forced += retractor.maybe()
        if rounds % 16 == 0:
            d.ctx.core.check_integrity()
    return keys, forced


def _ended(net: Net, jobs: Sequence[Job], keys: Mapping[int, Key]) -> bool:
    return all(net.router.ends[key] for job in jobs for key in keys_of(job, keys))


def keys_of(job: Job, keys: Mapping[int, Key]) -> list[Key]:
    return [sibling(keys[job.rid], index) for index in range(job.num_sequences)] if job.rid in keys else []


def _pause(nodes: Sequence[Node]) -> None:
    """Nothing moved: on threads give them the core; a simulated world moves by being asked."""
    leases = [node.ctx.core.engine.leases for node in nodes]
    if any(open_ and open_[0].result is not None and open_[0].done.driver is None for open_ in leases):
        time.sleep(0.0002)


class _Rounds:
    """Counts rounds while there is something to do, up to a budget that only a livelock reaches. Rounds that waited
    are free: the suite's hang guard is their bound."""

    def __init__(self, go_on: Callable[[], bool], budget: int = 60_000) -> None:
        self._go_on, self._budget = go_on, budget
        self.waited = 0

    def __iter__(self) -> Iterator[int]:
        for rounds in itertools.count(1):
            if not self._go_on():
                return
            assert rounds - self.waited < self._budget, f"no end after {rounds} rounds, {self.waited} of them waiting"
            yield rounds


def assert_whole_core(core: NodeCore) -> None:
    core.check_integrity(idle=True)
    core.kv.flush_cache()
    core.check_integrity(idle=True)
    assert core.kv.allocator.num_free == core.kv.allocator.num_total
    assert not core.queues.requests and not core.engine.leases
