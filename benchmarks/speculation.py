"""Speculation beside none, engine level: tokens/s by batch, and by kind of prompt at batch 1 with tokens per verify.

    python -m benchmarks.speculation --threads 2 [--weights file] [--head DIR] [--per-kind 12] [--width 4]
    python -m benchmarks.speculation --per-kind 0 --rounds 10 --builds 6 --batches 1 4 16 32 --only "ngram adaptive"

Prompts are those that no head was trained on, answers greedy. The contenders take turns at each prompt and batch, so
that a busy machine hurts all. `eagle chain` verifies --width tokens always; `adaptive` is what nodes do by default.
A batch's speedup is the geometric mean of its rounds' ratios, with the 95 % interval of that mean (bootstrap). Two
equal engines of one process differ by up to 6 %; the cause is not known. --builds builds the engines several times,
and computes the interval from each build's mean.
A contender that can't be had is left out, with a line saying why.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.engine_core import run_dry
from benchmarks.report import parser_with_json, report
from deploy.tools.head.prompts import OWN_PROMPTS, prompt_ids, read_kinds
from router.text.load import load_text_model
from shared.config.settings.settings import SpecConfig
from shared.core.errors import ConfigError
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.device.streams import make_streams
from shared.kernel.team.team import Team
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.kernels import Formats
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.records.core import NodeCore
from shared.sched.steps.draft_length import make_width_choice
from shared.sched.steps.settings import SchedSettings
from shared.speculation.drafters import make_drafter

BATCHES = (1, 4, 16, 32)
BATCH_TOKENS = 64
WARM_UPS = 3  # rounds of each batch that are not counted: the adaptive choice learns
KIND_TOKENS = 96
BOOTSTRAPS = 10_000
ALL = "all"
OFF = "off"
TREE_TOPK, TREE_STEPS, TREE_WIDTH = 3, 2, 6


def contenders(width: int, head: str) -> dict[str, Callable[[], SpecConfig]]:
    """By name; the first is what the others are compared with."""

    def spec(kind: str, adaptive: bool = False, **tree: int) -> Callable[[], SpecConfig]:
        shape = {"spec_width": width} | tree
        return lambda: SpecConfig(spec=kind, spec_adaptive=adaptive, spec_head=head, **shape)

    tree = {"spec_topk": TREE_TOPK, "spec_steps": TREE_STEPS, "spec_width": TREE_WIDTH}

    return {
        OFF: spec("none"),
        "ngram": spec("ngram"),
        "ngram adaptive": spec("ngram", adaptive=True),
        "eagle chain": spec("eagle", spec_copies=0),
        "eagle tree": spec("eagle", spec_copies=0, **tree),
        "eagle chain, copies": spec("eagle"),
        "eagle tree, copies": spec("eagle", **tree),
        "eagle adaptive": spec("eagle", adaptive=True),
    }


@dataclass
class Tally:
    """Totals of one contender over some prompts."""

    tokens: int = 0
    seconds: float = 0.0
    verifies: int = 0
    accepted: int = 0
    drafting: float = 0.0

    def figures(self, off: Tally) -> dict[str, float]:
        """tokens_per_verify counts steps with drafts only; speedup is against `off` in the same run."""
        mine, plain = (t.tokens / max(t.seconds, 1e-9) for t in (self, off))
        found = {"tok_s": mine, "speedup": mine / max(plain, 1e-9)}
        if self.verifies:
            found["tokens_per_verify"] = 1 + self.accepted / self.verifies
            found["drafting_share"] = self.drafting / self.seconds
        return found


@dataclass
class Engine:
    """One contender's core, with the model loaded for it alone: a head changes what the target leaves."""

    core: NodeCore
    submitted: int = 0

    @classmethod
    def of(cls, config: SpecConfig, model_name: str, formats: tuple[str, str], threads: int) -> Engine:
        """`formats`: of numbers and of weights, as --dtype and --weight-dtype."""
        team, (dtype, weights) = Team(threads), formats
        model = load_model(model_name, LoadOptions(dtype, 1024, threads, team, formats=Formats(weights=weights)))
        drafter = make_drafter(config, model_name, model, team)
        settings = SchedSettings(page_size=16, max_context=1024, width=config.width)
        streams = make_streams("cpu", on_thread_start=lambda: torch.set_num_threads(threads))
        widths = make_width_choice(config)
        sizes = CoreSizes(max(BATCHES) * 20, max(BATCHES) + 1, prefix_cache=False)
        return cls(assemble_core(model, streams, settings, sizes, drafter=drafter, widths=widths))

    def submit(self, prompts: Sequence[Sequence[int]], max_tokens: int, stops: tuple[int, ...] = ()) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stops)
        for prompt in prompts:
            self.submitted += 1
            key = RequestKey("bench", 1, f"r{self.submitted}", 0, 0)
            self.core.scheduler.intake.submit(
                Request(key, NodeAsk(np.asarray(prompt, np.int64), sampling, 0), self.submitted)
            )

    def answer(self, prompt: Sequence[int], tally: Tally) -> None:
        """One prompt alone, from its first token on."""
        scheduler = self.core.scheduler
        before = scheduler.queues.counters.totals()
        self.submit([prompt], KIND_TOKENS, self.core.model.spec.eos_ids)
        while not scheduler.queues.counters.output_tokens > before["output_tokens"]:
            self.core.loop.step(block=True)
        start, known = time.perf_counter(), scheduler.queues.counters.totals()
        while scheduler.queues.requests or not self.core.loop.idle:
            self.core.loop.step(block=True)
        scheduler.queues.take_events()
        now = scheduler.queues.counters.totals()
        tally.seconds += time.perf_counter() - start
        tally.tokens += int(now["output_tokens"] - known["output_tokens"])
        tally.verifies += int(now["spec_steps"] - known["spec_steps"])
        tally.accepted += int(now["spec_accepted_tokens"] - known["spec_accepted_tokens"])
        tally.drafting += now["spec_draft_seconds"] - known["spec_draft_seconds"]


def build(args: argparse.Namespace) -> tuple[dict[str, Engine], dict[str, str]]:
    """(contenders that are there, why the others are not)."""
    engines, missing = {}, {}
    for name, config in contenders(args.width, args.head).items():
        if args.only and name not in (OFF, *args.only):
            continue
        try:
            engines[name] = Engine.of(config(), args.model, (args.dtype, args.weights), args.threads)
        except ConfigError as error:
            missing[name] = str(error)
            print(f"left out: {name}: {error}")
    return engines, missing


def turns(engines: dict[str, Engine], index: int) -> Iterator[tuple[str, Engine]]:
    """All of them, each time beginning with another one."""
    names = list(engines)
    for name in names[index % len(names) :] + names[: index % len(names)]:
        yield name, engines[name]


Rates = dict[str, list[float]]  # tokens/s of each round, by contender


def by_batch(
    engines: dict[str, Engine], prompts: Sequence[Sequence[int]], rounds: int, batches: Sequence[int], first: int
) -> dict[int, Rates]:
    """By batch, without stops. `first`: number of the first round, which decides the prompts."""
    found: dict[int, Rates] = {}
    for batch in batches:
        rates = found[batch] = {name: [] for name in engines}
        for i in range(first, first + WARM_UPS + rounds):
            chosen = [prompts[(i * batch + j) % len(prompts)] for j in range(batch)]
            for name, engine in turns(engines, i):
                engine.submit(chosen, BATCH_TOKENS)
                rate = run_dry(engine.core, batch)[1]
                if i >= first + WARM_UPS:
                    rates[name].append(rate)
    return found


def beside_none(builds: Sequence[dict[int, Rates]]) -> dict[str, Any]:
    """Tokens/s of each contender and what that is beside none."""
    figures: dict[str, Any] = {}
    for batch in builds[0]:
        for name in builds[0][batch]:
            of_build = [(one[batch][name], one[batch][OFF]) for one in builds]
            ratios = [np.log(np.divide(mine, off)) for mine, off in of_build]
            tok_s = statistics.median(rate for mine, _ in of_build for rate in mine)
            logs = ratios[0] if len(builds) == 1 else np.array([of_one.mean() for of_one in ratios])
            figures.setdefault(name, {})[f"batch_{batch}"] = {"tok_s": tok_s, **interval(logs)}
    return figures


def interval(logs: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the geometric mean of paired ratios, given as logarithms, and its 95 % interval by bootstrap."""
    means = np.random.default_rng(0).choice(logs, (BOOTSTRAPS, len(logs))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return {"speedup": float(np.exp(logs.mean())), "low": float(np.exp(low)), "high": float(np.exp(high))}


def by_kind(engines: dict[str, Engine], kinds: dict[str, list[Sequence[int]]]) -> dict[str, Any]:
    tallies = {kind: {name: Tally() for name in engines} for kind in (*kinds, ALL)}
    for kind, prompts in kinds.items():
        for i, prompt in enumerate(prompts):
            for name, engine in turns(engines, i):
                engine.answer(prompt, tallies[kind][name])
    for name, total in tallies[ALL].items():
        for kind in kinds:
            add(total, tallies[kind][name])
    return {kind: {name: tally.figures(rows[OFF]) for name, tally in rows.items()} for kind, rows in tallies.items()}


def add(total: Tally, part: Tally) -> None:
    for name, value in vars(part).items():
        setattr(total, name, getattr(total, name) + value)


def read_prompts(path: Path, per_kind: int, model: str) -> dict[str, list[Sequence[int]]]:
    text, kinds = load_text_model(model), dict[str, list[Sequence[int]]]()
    for kind, prompt in read_kinds(path):
        kinds.setdefault(kind, []).append(prompt_ids(text, prompt))
    return {kind: prompts[:per_kind] for kind, prompts in kinds.items()}


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--weights", default="auto", choices=("auto", "file", "codes", "int8"), help="as --weight-dtype"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--head", default="auto", help="folder of an EAGLE-3 head")
    parser.add_argument("--width", type=int, default=SpecConfig().spec_width)
    parser.add_argument("--per-kind", type=int, default=12, help="prompts of each kind; 0: batches only")
    parser.add_argument("--rounds", type=int, default=3, help="of each batch; 0: kinds only")
    parser.add_argument("--builds", type=int, default=1, help="how often the engines are built, for the batches")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, choices=BATCHES)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS, help="{kind, prompt} a line")
    parser.add_argument("--only", nargs="*", help="names of contenders, beside off")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kinds = read_prompts(args.prompts, args.per_kind or 12, args.model)
    figures: dict[str, Any] = {"width": args.width}
    mixed = [prompt for together in zip(*kinds.values(), strict=False) for prompt in together]
    builds = []
    for n in range(args.builds):
        engines, figures["left_out"] = build(args)
        builds.append(by_batch(engines, mixed, args.rounds, args.batches if args.rounds else (), n * args.rounds))
        if args.per_kind and n == 0:
            figures["by_kind"] = by_kind(engines, kinds)
        for engine in engines.values():
            engine.core.close()
    figures["by_batch"] = beside_none(builds)
    report(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
