"""Cells of the fuzz of whole streams: tiny random networks on Baton's own kernels, through a prefill and a decode node.

A seed draws all that a stream must not show: drafts, pools that are too small, retraction, caches, adapters beside each
other, masks that come late. The oracle is the same request alone, on a node that has none of these.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from router.text.grammars import of_regex
from shared.config.models.pieces import make_pieces
from shared.config.settings.settings import SpecConfig
from shared.core.keys import sequence_seed
from shared.core.sampling_params import PARAMETERS, SamplingParams
from shared.device.cpu import do_nothing
from shared.engine.plan import StepPlan, StepResult
from shared.grammar.compiler import GrammarCompiler
from shared.grammar.grammars import Grammars
from shared.kernel.team.team import Team
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.interface import Model
from shared.model.math.kernels import Formats
from shared.node.loop.node import Node
from shared.node.records.core import NodeCore
from shared.sched.steps.draft_length import WidthChoice, make_width_choice
from shared.speculation.drafters import make_drafter
from shared.wire.messages import Key, TokenLogprob
from tests.support.bodies.drawn_schemas import draw_possible, draw_regex
from tests.support.cores.core_rig import MAX_CONTEXT, CoreKnobs, Job, Outcome, draw_jobs, make_core, name_of, run_local
from tests.support.cores.equivalence_cells import Retractor, assert_whole_core, keys_of, poison, through_pair
from tests.support.models.draft_head import head_config, head_tensors, save_head
from tests.support.models.tiny_adapters import adapter
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.oracles.grammar_oracle import AtOnce, Later, drawn_costs
from tests.support.worlds.node_pair import Net, make_node

PIECES = make_pieces()
COMPILER = GrammarCompiler(PIECES.vocabulary)
VOCAB = len(PIECES.vocabulary.tokens)
GROUPED = "qwen2, upper layers windowed"  # in two page groups
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", GROUPED)
WINDOW = 24  # of the last two
OF_ATTENTION = ("q", "k", "o")  # all that an adapter of experts may change
FORMATS = (
    ("float32", Formats()),
    ("float32", Formats()),
    ("float32", Formats("int8")),
    ("bfloat16", Formats()),
    ("bfloat16", Formats("fp8", "int8")),
)
EAGLE = {"spec": "eagle", "spec_copies": 0, "spec_adaptive": False}
TREE = EAGLE | {"spec_topk": 2, "spec_steps": 2, "spec_width": 7}
SPECS: dict[str, dict] = {
    "none": {},
    "ngram": {"spec": "ngram", "spec_width": 4, "spec_adaptive": False},
    "chain": EAGLE,
    "tree": TREE,
    "tree and copies": TREE | {"spec_copies": 1},
    "adaptive chain": EAGLE | {"spec_width": 6, "spec_adaptive": True},
    "adaptive tree": TREE | {"spec_adaptive": True},
}
PLAIN = CoreKnobs(prefix_cache=False, overlap=False, chunk_size=MAX_CONTEXT, mix=False, spec="none")
NUM_PAGES = {1: (190, 260), 4: (50, 70), 16: (15, 20)}  # each holds the longest sequence, and few of them at once
MAX_PROMPT, MAX_TOKENS = 60, 40


@dataclass(frozen=True)
class StreamCell:
    """What one pair of nodes has."""

    family: str
    dtype: str
    formats: Formats
    spec: str
    retract_every: int
    transport: str
    slow_masks: bool
    knobs: CoreKnobs
    prefill_pages: int


def draw_cell(rng: random.Random, seed: int) -> StreamCell:
    """Families, drafts and formats take turns, so that few seeds have all of them."""
    family, spec = FAMILIES[seed % len(FAMILIES)], list(SPECS)[seed % len(SPECS)]
    dtype, formats = rng.choice(FORMATS)
    page_size = rng.choice(list(NUM_PAGES))
    num_groups = 2 if family == GROUPED else 1
    knobs = CoreKnobs(
        backend=rng.choice(["simulated", "cpu", "inline"]),
        overlap=rng.random() < 0.7,
        chunk_size=rng.choice([5, 16, 64]),
        mix=rng.random() < 0.7,
        page_size=page_size,
        num_pages=num_groups * rng.choice(NUM_PAGES[page_size]),
        max_running=rng.choice([4, 8]),
        prefix_cache=rng.random() < 0.8,
        width=SpecConfig(**SPECS[spec]).width,
        growth_reserve=rng.choice([0.0, 0.0, 1.0]),
        cold_pages=num_groups * rng.choice([0, 160 // page_size]),
        layer_ends=rng.choice([(), (1,), (1, 2)])[: 3 - num_groups],
        needs_cpu_seq_lens=rng.random() < 0.2,
        seed=seed,
    )
    transport, prefill_pages = rng.choice(["zmq", "shm"]), num_groups * rng.choice(NUM_PAGES[page_size])
    retract_every, slow_masks = rng.choice([0, 0, 9]), rng.random() < 0.4
    return StreamCell(family, dtype, formats, spec, retract_every, transport, slow_masks, knobs, prefill_pages)


def draw_requests(rng: random.Random, count: int, digests: Sequence[str]) -> list[Job]:
    return [
        replace(
            job,
            sampling=drawn_further(job, rng),
            adapter=rng.choice(["", "", *digests]),
            num_sequences=rng.choice([1, 1, 2, 3, 4]),
        )
        for job in draw_jobs(rng, count, rng.choice([None, None, 1.5]), MAX_PROMPT)
    ]


def drawn_further(job: Job, rng: random.Random) -> SamplingParams:
    """Shorter answers, biases that count among so many tokens, and grammars."""
    sampling = replace(job.sampling, max_tokens=min(job.sampling.max_tokens, MAX_TOKENS))
    if sampling.logit_bias:
        bias = {token: rng.choice([-4.0, 3.0]) for token in job.prompt[-3:]}
        sampling = replace(sampling, logit_bias=tuple(sorted(bias.items())))
    if rng.random() < 0.5:
        return sampling
    grammar = of_regex(draw_regex(rng)) if rng.random() < 0.4 else draw_possible(rng)[1]
    return replace(sampling, grammar=grammar, stop_token_ids=PIECES.vocabulary.eos_ids, allowed_token_ids=())


class DrawnTimes:
    """The real choice of widths. It measures drawn step times, so that a seed's widths are the same anywhere."""

    def __init__(self, choice: WidthChoice, seed: int) -> None:
        self._choice, self._rng = choice, random.Random(seed)
        self.widths = {1}

    def choose(self, num_rows: int) -> int:
        width = self._choice.choose(num_rows)
        self.widths.add(width)
        return width

    def observe(self, result: StepResult) -> None:
        seconds = 0.01 * self._rng.uniform(1, 1.5 + 0.1 * result.width)
        self._choice.observe(replace(result, draft_seconds=0.0, verify_seconds=seconds))


@dataclass
class Went:
    """How often each thing happened. A fuzz that never reached a case proves nothing about it."""

    counts: Counter[str] = field(default_factory=Counter)

    def on(self, core: NodeCore) -> None:
        launch, evict = core.engine.launch, core.kv.cache.evict

        def count_plan(plan: StepPlan):  # noqa: ANN202
            self.counts["masked rows"] += sum(plan.constrained)
            self.counts["rows with forced drafts"] += 0 if plan.forced is None else len(plan.forced.begins)
            self.counts["rows with adapters"] += int((plan.adapters > 0).sum())
            self.counts["steps with and without adapters"] += len(set((plan.adapters > 0).tolist())) == 2
            return launch(plan)

        def count_pages(n: int):  # noqa: ANN202
            pages = evict(n)
            self.counts["pages evicted"] += len(pages)
            return pages

        core.engine.launch = count_plan  # type: ignore[method-assign]
        core.kv.cache.evict = count_pages  # type: ignore[method-assign]
        core.kv.allocator.on_free = lambda pages: poison(core, pages)

    def off(self, cell: StreamCell, p: Node, d: Node, forced: int) -> None:
        for node in (p, d):
            totals = node.ctx.core.queues.counters
            assert not totals.offload_failures
            for name in ("retractions", "cached_prompt_tokens", "mixed_steps", "restored_pages", "readmissions"):
                self.counts[name.replace("_", " ")] += getattr(totals, name)
            widths = node.ctx.core.scheduler.planner.widths
            if isinstance(widths, DrawnTimes):
                self.counts["widths that an adaptive choice changed"] += len(widths.widths) - 1
            if cell.spec != "none":
                self.counts[f"drafts accepted, {cell.spec}"] += totals.spec_accepted_tokens
        self.counts["retractions"] -= forced
        self.counts["retractions forced"] += forced
        self.counts["hand-offs"] += int(d.ctx.metrics.counters()["handoffs"])

    def count_jobs(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.counts[f"requests with n = {job.num_sequences}"] += 1
            self.counts["streams"] += job.num_sequences
            self.counts["requests with an adapter"] += bool(job.adapter)
            for one in PARAMETERS:
                if one.neutral is not None and getattr(job.sampling, one.name) != one.neutral:
                    self.counts[f"requests with {one.name}"] += 1
            self.counts["greedy requests"] += job.sampling.temperature == 0

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))


class Site:
    """Folders of networks, their adapters and a draft head, each written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ids = {"vocab": VOCAB, "draft_vocab": VOCAB}
        self._head = str(save_head(folder / "head", head_tensors(**ids), head_config(**ids)))
        self._plain: dict[tuple[str, str, Formats], NodeCore] = {}
        self.model_folder = functools.cache(self._save)

    def _save(self, family: str) -> Path:
        folder = self._folder / family
        if family == GROUPED:
            write_tiny_llama(folder, layers=4, vocab=VOCAB, context=MAX_CONTEXT)
            config = json.loads((folder / "config.json").read_text())
            config |= {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
            (folder / "config.json").write_text(json.dumps(config))
        else:
            write_tiny_llama(folder, family=family, vocab=VOCAB, context=MAX_CONTEXT, window=WINDOW)
        targets = {"targets": OF_ATTENTION} if family == "qwen3_moe" else {}
        for number, rank in enumerate((4, 6)):
            adapter(folder, folder / f"adapter{number}", number, rank=rank, **targets)
        return folder

    def load(self, family: str, dtype: str, formats: Formats) -> Model:
        folder = self.model_folder(family)
        adapters = {f"a{number}": str(folder / f"adapter{number}") for number in range(2)}
        options = LoadOptions(dtype, MAX_CONTEXT, adapters=adapters, formats=formats)
        return load_model(str(folder), options)

    def plain(self, cell: StreamCell) -> NodeCore:
        """Without drafts, caches, chunks or a second row: a request is alone on it."""
        what = (cell.family, cell.dtype, cell.formats)
        if what not in self._plain:
            self._plain[what] = make_core(PLAIN, model=self.load(*what), grammars=own_grammars())
        return self._plain[what]

    @contextlib.contextmanager
    def node(self, cell: StreamCell, role: str) -> Iterator[Node]:
        """The nodes compute in threads of their own, so each has its own model."""
        model = self.load(cell.family, cell.dtype, cell.formats)
        pages = cell.prefill_pages if role == "prefill" else cell.knobs.num_pages
        shares = role == "prefill" and cell.transport == "shm"
        knobs = replace(cell.knobs, num_pages=pages, shared_memory=shares)
        spec = SpecConfig(**SPECS[cell.spec], spec_head=self._head)
        later = Later() if cell.slow_masks else None
        core = make_core(
            knobs,
            model=model,
            drafter=make_drafter(spec, cell.family, model, Team()),
            grammars=own_grammars() if later is None else own_grammars(later, drawn_costs(knobs.seed)),
            widths=DrawnTimes(make_width_choice(spec), knobs.seed),
        )
        if later is not None:
            core.loop.step = later.before(core.loop.step, knobs.seed)  # type: ignore[method-assign]
        node = make_node(role, f"{role}-0", knobs, transport=cell.transport, core=core)
        try:
            yield node
        finally:
            node.side.close()
            core.close()

    def close(self) -> None:
        for core in self._plain.values():
            core.close()


def own_grammars(executor: Later | None = None, clock: Callable[[], float] = float) -> Grammars:
    return Grammars(COMPILER, PIECES.vocabulary.eos_ids, do_nothing, executor or AtOnce(), clock)


@dataclass(frozen=True)
class Heard:
    """All that a client may see of one sequence."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    scores: list[TokenLogprob]
    reason: str


def alone(core: NodeCore, job: Job, index: int) -> Heard:
    one = replace(job, seed=sequence_seed(job.seed, index), seq_index=index, num_sequences=1)
    outcome, name = run_local(core, [one], outcome=Outcome()), name_of(one.request().key)
    scores = outcome.scores[name] if index == 0 else []
    return Heard(outcome.streams[name], outcome.logprobs[name], scores, outcome.ends[name].reason.value)


def heard(net: Net, key: Key) -> Heard:
    logprobs = net.router.logprobs[key]
    assert sorted(logprobs) == list(range(len(logprobs)))
    told = [logprobs[position] for position in range(len(logprobs))]
    return Heard(net.router.streams[key], told, net.router.scores[key], net.router.end(key).reason)


def run_streams(seed: int, num_requests: int, site: Site, went: Went) -> None:
    """Draw everything from the seed, and compare every stream with the same request alone."""
    rng = random.Random(seed)
    cell = draw_cell(rng, seed)
    plain = site.plain(cell)
    jobs = draw_requests(rng, num_requests, [own.digest for own in plain.model.spec.adapters])
    with site.node(cell, "prefill") as p, site.node(cell, "decode") as d:
        for node in (p, d):
            went.on(node.ctx.core)
        net = Net((p, d), seed)
        retractor = Retractor(d.ctx.core, rng, cell.retract_every)
        keys, forced = through_pair(net, p, d, jobs, retractor, has_threads=cell.knobs.backend == "cpu")
        for job in jobs:
            for index, key in enumerate(keys_of(job, keys)):
                expected, got = alone(plain, job, index), heard(net, key)
                assert got == expected, f"{cell}: {job}, sequence {index}: {got}, not {expected}"
        for node in (p, d):
            assert_whole_core(node.ctx.core)
        went.off(cell, p, d, forced)
    went.count_jobs(jobs)
