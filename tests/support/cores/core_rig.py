"""A node's core on HashLM, and the workloads and cells that the equivalence tests draw by seed."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.device.streams import StreamSet, make_streams
from shared.engine.drafter import Drafter
from shared.engine.plan import StepResult
from shared.grammar.grammars import Grammars, NoGrammars
from shared.kv.pool import KVPool
from shared.model.hashlm.draft import HashDraft
from shared.model.hashlm.model import HashLM
from shared.model.hashlm.shard import split
from shared.model.math.interface import AdapterSpec, Carried, Model, ModelInputs, Stage
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.records.core import NodeCore
from shared.ranks.tp import Ranks
from shared.sched.steps.draft_length import WidthChoice
from shared.sched.steps.events import Emitted, Ended, Scored
from shared.sched.steps.settings import SchedSettings
from shared.speculation.copying import CopyingDrafter
from shared.speculation.eagle import EagleWorkerV2
from shared.speculation.multi_layer_eagle import MultiLayerEagleWorkerV2
from shared.speculation.ngram import NgramWorkerV2
from shared.wire.messages import TokenLogprob
from tests.support.cores.boundary import PoisonedSlots
from tests.support.cores.simulated_streams import World, simulated_streams
from tests.support.oracles.grammar_oracle import GRAMMARS, allows_of, following, make_grammars
from tests.support.oracles.hash_seq2seq import HashSeq2Seq
from tests.support.oracles.hashlm_reference import long_stream, reference_stream, seq2seq_stream

EOS = 95
# behind an even token no 8, and of what is left to draw some
BAD_WORDS = tuple((first, 8) for first in range(0, EOS, 2)) + ((9,), (3, 4, 5), *((4, i, 6) for i in range(60)))
MAX_CONTEXT = 512
MAX_RETRACTIONS = 20  # forced ones: a prompt retracted every few steps for ever would never end


@dataclass(frozen=True)
class Job:
    """One request of a workload: what goes in, and by `expected` what must come out."""

    rid: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    window: int = 0  # the model's
    lower_window: int | None = None  # of its lower layer, if it differs
    adapter: str = ""  # digest
    encoder: bool = False  # whether the model has one
    cache_salt: int = 0
    tenant: int = 0
    seq_index: int = 0  # of several sequences of one request; they differ in their seeds
    num_sequences: int = 1  # of a request that nodes get
    short_context: int = 0  # the model's

    def request(self, handoff_to: str | None = None) -> Request:
        key = RequestKey("test", 1, f"r{self.rid}", 0, self.seq_index)
        prompt = np.asarray(self.prompt, np.int64)
        ask = NodeAsk(prompt, self.sampling, self.seed, self.adapter, self.cache_salt, self.tenant)
        return Request(key, ask, self.rid, handoff_to=handoff_to)

    def expected(self) -> list[int]:
        return self.expected_of(self.seed)

    def expected_of(self, seed: int) -> list[int]:
        num = self.sampling.max_tokens
        if self.encoder:
            return seq2seq_stream(self.prompt, self.sampling, seed, num)
        more = {"window": self.window, "lower_window": self.lower_window, "adapter": self.adapter}
        if self.short_context:
            return long_stream(self.prompt, self.sampling, seed, self.short_context)
        return reference_stream(self.prompt, self.sampling, seed, num, **more, allows=allows_of(self.sampling.grammar))


@dataclass(frozen=True)
class CoreKnobs:
    backend: str = "inline"
    overlap: bool = True
    chunk_size: int = 64
    mix: bool = True
    page_size: int = 16
    num_pages: int = 200
    max_running: int = 8
    prefix_cache: bool = True
    spec: str = "eagle"  # none, ngram, eagle or mtp; eagle and mtp with HashDraft. Without effect at width 1
    width: int = 1
    topk: int = 1  # above 1 eagle drafts trees, of so many levels:
    steps: int = 1
    copies: int = 0  # spec_copies
    draw_widths: bool = False  # each step of another width, up to `width`; a tree whole or not at all
    hit_rate: int = 70
    needs_cpu_seq_lens: bool = False
    shared_memory: bool = False
    max_ungranted_pages: int = 1 << 30
    growth_reserve: float = 0.0
    cold_pages: int = 0  # the cold tier's, in memory and
    cold_file_pages: int = 0  # in its file
    window: int = 0  # the model's sliding window, of all its layers
    lower_window: int | None = None  # of its lower layer, if it differs: two page groups
    layer_ends: tuple[int, ...] = ()  # (1,): hand-offs travel in two parts
    encoder: bool = False  # the model is HashSeq2Seq
    stages: int = 1  # above 1: the model is a pipeline; see stages_of
    seed: int = 0
    adapters: tuple[str, ...] = ()  # digests, which are their names too
    short_context: int = 0  # the model's
    spare_adapters: int = 0  # slots for adapters that come later
    apart: bool = False  # tensors are copies out of slots, as on a device with memory of its own


class DrawnWidths:
    """A WidthChoice that learns nothing."""

    def __init__(self, widths: Sequence[int], seed: int) -> None:
        self._widths, self._rng = widths, random.Random(seed)

    def choose(self, num_rows: int) -> int:
        return self._rng.choice(self._widths)

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""


def make_drafter(knobs: CoreKnobs, model: HashLM) -> Drafter | None:
    if knobs.width == 1 or knobs.spec == "none":
        return None
    if knobs.spec == "ngram":
        return NgramWorkerV2()
    layers = [HashDraft(model, knobs.hit_rate, layer) for layer in range(knobs.width - 1)]
    vocab_size = model.spec.vocab_size
    head: Drafter = EagleWorkerV2(layers[0], vocab_size, knobs.topk, knobs.steps)
    if knobs.spec == "mtp":
        head = MultiLayerEagleWorkerV2(layers, vocab_size)
    return CopyingDrafter(head, knobs.copies) if knobs.copies else head


def stages_of(model: HashLM, num_stages: int) -> tuple[Stage, ...]:
    """Split the model: a layer in the first stage, one in the last. Stages between pass on their input."""
    if num_stages == 1:
        return ()
    lower, upper = split(model)
    return lower, *[pass_on] * (num_stages - 2), upper


def pass_on(inputs: ModelInputs, carried: Carried | None, kv: KVPool) -> Carried:
    assert carried is not None
    return carried


def streams_of(knobs: CoreKnobs, world: World | None) -> StreamSet:
    if knobs.backend == "simulated":
        return simulated_streams(world or World(knobs.seed), knobs.stages)
    return make_streams(knobs.backend, num_stages=knobs.stages)


def make_core(
    knobs: CoreKnobs,
    world: World | None = None,
    drafter: Drafter | None = None,
    *,
    model: Model | None = None,
    ranks: Ranks | None = None,
    grammars: Grammars | NoGrammars | None = None,
    widths: WidthChoice | None = None,
) -> NodeCore:
    """`ranks`: where the model is one rank's part. The others replace what the knobs name."""
    adapters = tuple(AdapterSpec(name, name) for name in knobs.adapters)
    model = model or HashLM(
        max_context=MAX_CONTEXT,
        window=knobs.window,
        lower_window=knobs.lower_window,
        adapters=adapters,
        num_spare=knobs.spare_adapters,
        short_context=knobs.short_context,
    )
    drafter = drafter or make_drafter(knobs, model)
    served: Model = HashSeq2Seq(MAX_CONTEXT) if knobs.encoder else model
    settings = SchedSettings(
        page_size=knobs.page_size,
        max_context=MAX_CONTEXT,
        chunk_size=knobs.chunk_size,
        mixed_chunk_size=knobs.chunk_size,
        width=knobs.width if drafter is not None else 1,
        mix=knobs.mix,
        needs_cpu_seq_lens=knobs.needs_cpu_seq_lens,
        max_ungranted_pages=knobs.max_ungranted_pages,
        growth_reserve=knobs.growth_reserve,
        layer_ends=knobs.layer_ends,
    )
    sizes = CoreSizes(
        knobs.num_pages,
        knobs.max_running,
        knobs.prefix_cache,
        knobs.shared_memory,
        knobs.cold_pages,
        knobs.cold_file_pages,
    )
    streams = streams_of(knobs, world)
    drawn = (1, settings.width) if knobs.topk > 1 else range(1, settings.width + 1)
    widths = DrawnWidths(drawn, knobs.seed) if knobs.draw_widths else widths
    stages = stages_of(model, knobs.stages)
    how = {
        "overlap": knobs.overlap,
        "widths": widths,
        "ranks": ranks,
        "stages": stages,
        "grammars": grammars or make_grammars(),
        "boundary": PoisonedSlots() if knobs.apart else None,
    }
    return assemble_core(served, streams, settings, sizes, drafter=drafter, **how)


def name_of(key: RequestKey) -> str:
    """Of a stream: the request's, and of further sequences their number."""
    return f"{key.rid}.{key.seq_index}" if key.seq_index else key.rid


@dataclass
class Outcome:
    """By `name_of`. `logprobs` are of the streams' tokens, `scores` of the prompts'."""

    streams: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))
    scores: dict[str, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[str, Ended] = field(default_factory=dict)
    num_steps: int = 0

    def take(self, core: NodeCore) -> list[object]:
        """Move the scheduler's events in here; gives back those that are not tokens or ends."""
        others: list[object] = []
        for event in core.queues.take_events():
            if isinstance(event, Emitted):
                stream = self.streams[name_of(event.key)]
                known = stream[event.first_pos : event.first_pos + len(event.ids)]
                assert list(event.ids[: len(known)]) == known, f"{event.key} repeated other tokens"
                assert event.first_pos <= len(stream), f"{event.key} left a gap"
                stream.extend(event.ids[len(known) :])
                self.logprobs[name_of(event.key)].extend(event.logprobs[len(known) :])
            elif isinstance(event, Ended):
                assert name_of(event.key) not in self.ends, f"{event.key} ended twice"
                self.ends[name_of(event.key)] = event
            else:
                if isinstance(event, Scored):
                    self.scores[name_of(event.key)].extend(event.logprobs)
                others.append(event)
        return others


def draw_jobs(rng: random.Random, count: int, temperature: float | None = None, max_prompt: int = 150) -> list[Job]:
    """Prompts with shared beginnings, so that the prefix cache matters; all sampling features somewhere."""
    stems = [tuple(rng.randrange(95) for _ in range(rng.randrange(5, max_prompt))) for _ in range(3)]
    jobs = []
    for rid in range(count):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)] + tuple(rng.randrange(95) for _ in range(rng.randrange(0, 20)))
        jobs.append(Job(rid, prompt, draw_sampling(rng, temperature), rng.getrandbits(63)))
    return jobs


def draw_sampling(rng: random.Random, temperature: float | None = None) -> SamplingParams:
    """Draw sampling parameters. Features added later are derived, not drawn, so that old seeds keep their workloads."""
    penalised = rng.random() < 0.4
    drawn = SamplingParams(
        max_tokens=rng.choice([1, 2, 5, 17, 40, 80]),
        temperature=rng.choice([0.0, 0.8]) if temperature is None else temperature,
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=1.2 if penalised else 1.0,
        presence_penalty=rng.choice([0.0, 0.5]) if penalised else 0.0,
        frequency_penalty=rng.choice([0.0, 0.3]) if penalised else 0.0,
        logit_bias=((7, 1.5), (8, -2.0)) if rng.random() < 0.2 else (),
        min_tokens=rng.choice([0, 0, 4]),
        stop_token_ids=(EOS,) if rng.random() < 0.7 else (),
        num_logprobs=rng.choice([-1, -1, 0, 3]),
    )
    if drawn.num_logprobs == 3 and drawn.min_tokens:
        drawn = replace(drawn, prompt_logprobs=2)
    if drawn.top_k and drawn.num_logprobs >= 0:
        drawn = replace(drawn, bad_words=BAD_WORDS)
    if drawn.top_p < 1 and drawn.min_tokens:
        drawn = replace(drawn, allowed_token_ids=tuple(range(0, EOS, 2)))
    return drawn


def some_follow_grammars(jobs: Sequence[Job]) -> list[Job]:
    """Put every third job under a grammar. The grammars take turns."""
    grammars = itertools.cycle(GRAMMARS)
    return [
        replace(job, sampling=following(job.sampling, next(grammars))) if number % 3 == 0 else job
        for number, job in enumerate(jobs)
    ]


def run_local(
    core: NodeCore,
    jobs: Sequence[Job],
    *,
    retract_every: int = 0,
    rng: random.Random | None = None,
    budget: int = 20000,
    outcome: Outcome | None = None,
) -> Outcome:
    """Submit all jobs to one core, in a few waves, and run it dry; retract somebody now and then. `outcome`: what came
    before, to be gone on with."""
    outcome = outcome or Outcome()
    left, loops, retractions = list(jobs), 0, 0
    rng = rng or random.Random(0)
    while left or core.queues.requests or not core.loop.idle:
        loops += 1
        assert loops < budget, f"no end after {loops} loops: {len(core.queues.requests)} requests open"
        while left and rng.random() < 0.5:
            core.scheduler.intake.submit(left.pop(0).request())
        core.loop.step(block=True)
        outcome.take(core)
        if retract_every and loops % retract_every == 0 and retractions < MAX_RETRACTIONS:
            retract_somebody(core, rng)
            retractions += 1
    outcome.num_steps = core.loop.num_steps
    return outcome


def retract_somebody(core: NodeCore, rng: random.Random) -> None:
    holders = [req for req in core.queues.running.reqs if req.state.value == "running"]
    if holders:
        core.queues.retract(rng.choice(holders))


def assert_whole(core: NodeCore) -> None:
    """Nothing leaked: with the cache flushed, every page and row is free again, and no lease holds a slot."""
    core.kv.check_integrity(idle=True)
    core.engine.check_integrity(idle=True)
    core.kv.flush_cache()
    core.kv.check_integrity(idle=True)
    assert core.kv.allocator.num_free == core.kv.allocator.num_total
    queues = core.queues
    assert not core.engine.leases and not queues.requests and not queues.waiting and not queues.prefilling
    assert not queues.granted and not queues.handed_off and not queues.ungranted


def assert_streams(jobs: Sequence[Job], outcome: Outcome) -> None:
    for job in jobs:
        assert outcome.streams[f"r{job.rid}"] == job.expected(), f"stream of r{job.rid} ({job.sampling})"
        assert outcome.ends[f"r{job.rid}"].reason.value in ("stop", "length")
