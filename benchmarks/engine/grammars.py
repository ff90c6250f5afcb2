"""What grammars cost: 32 rows with 32 JSON schemas beside the same rows without, in turns, on the default model.

    python -m benchmarks.engine.grammars [--threads 2] [--rounds 5] [--json F]

Both kinds step with overlap. Reports the ratio of their tokens/s, the time of one mask, the masks' share of a step, and
what rows without a grammar lose when half of their neighbours have one.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from llguidance import LLMatcher

from benchmarks.report import parser_with_json, report
from shared.config.models.vocabulary import read_vocabulary
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.device.cpu import do_nothing
from shared.device.streams import make_streams
from shared.grammar.compiler import GrammarCompiler
from shared.grammar.constraint import GrammarConstraint
from shared.grammar.grammars import Grammars
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.interface import Model
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.records.core import NodeCore
from shared.sched.steps.events import Emitted
from shared.sched.steps.settings import SchedSettings

ROWS, PROMPT_TOKENS, NUM_OUT = 32, 64, 64
MODEL, EOS = "smollm2", 2


def grammar(index: int) -> str:
    """A schema of its own for each row, whose answers are longer than what is measured."""
    item = {
        "type": "object",
        "properties": {f"name_{index}": {"type": "string", "minLength": 8}, "count": {"type": "integer"}},
        "required": [f"name_{index}", "count"],
        "additionalProperties": False,
    }
    return LLMatcher.grammar_from_json_schema(json.dumps({"type": "array", "minItems": 100, "items": item}))


def build(model: Model, threads: int) -> NodeCore:
    settings = SchedSettings(page_size=16, max_context=1024, chunk_size=512, mixed_chunk_size=512)
    streams = make_streams("cpu", on_thread_start=lambda: torch.set_num_threads(threads))
    vocabulary = read_vocabulary(MODEL)
    grammars = Grammars(GrammarCompiler(vocabulary), vocabulary.eos_ids, do_nothing)
    return assemble_core(model, streams, settings, CoreSizes(600, 40, prefix_cache=False), grammars=grammars)


def run(core: NodeCore, num_constrained: int) -> tuple[float, list[float]]:
    """(tokens/s once all rows decode, seconds between two tokens of the rows without a grammar)."""
    rng = np.random.default_rng(7)
    plain: dict[str, float] = {}
    for i in range(ROWS):
        text = grammar(i) if i < num_constrained else ""
        sampling = SamplingParams(
            max_tokens=NUM_OUT, temperature=0.8, grammar=text, stop_token_ids=(2,) if text else ()
        )
        key = RequestKey("bench", 1, f"r{time.monotonic_ns()}", 0, 0)
        core.submit(Request(key, NodeAsk(rng.integers(100, 40_000, PROMPT_TOKENS).astype(np.int64), sampling, i), i))
        if not text:
            plain[key.rid] = 0.0
    started: set[str] = set()
    begin, counted, gaps, end = 0.0, 0, [], 0.0
    while core.requests or not core.loop.idle:
        core.step(block=True)
        now = time.perf_counter()
        for event in core.take_events():
            if not isinstance(event, Emitted):
                end = end or now
                continue
            started.add(event.key.rid)
            if begin and not end:
                counted += len(event.ids)
                if plain.get(event.key.rid):
                    gaps.append(now - plain[event.key.rid])
            if event.key.rid in plain:
                plain[event.key.rid] = now
        if len(started) == ROWS and not begin:
            begin = now
    return counted / (end - begin), gaps


@contextmanager
def timed_masks() -> Iterator[list[float]]:
    """The seconds of every mask that is made inside."""
    seconds: list[float] = []
    fill = GrammarConstraint.fill

    def timed(self: GrammarConstraint, *args: object) -> None:
        start = time.perf_counter()
        fill(self, *args)  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - start)

    GrammarConstraint.fill = timed  # type: ignore[assignment, method-assign]
    try:
        yield seconds
    finally:
        GrammarConstraint.fill = fill  # type: ignore[method-assign]


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    core = build(load_model(MODEL, LoadOptions(args.dtype, threads=args.threads)), args.threads)
    for num in (0, ROWS):
        run(core, num)
    rates: dict[int, list[float]] = {0: [], ROWS // 2: [], ROWS: []}
    gaps: dict[int, list[float]] = {0: [], ROWS // 2: [], ROWS: []}
    with timed_masks() as seconds:
        for _ in range(args.rounds):
            for num in rates:
                rate, own = run(core, num)
                rates[num].append(rate)
                gaps[num] += own
    core.close()
    ratios = [with_ / without for with_, without in zip(rates[ROWS], rates[0], strict=True)]
    per_step = ROWS * statistics.fmean(seconds)
    report(
        {
            "plain_tok_s": statistics.median(rates[0]),
            "grammar_tok_s": statistics.median(rates[ROWS]),
            "grammar_over_plain": statistics.median(ratios),
            "mask_p50_us": 1e6 * statistics.median(seconds),
            "mask_p99_us": 1e6 * float(np.quantile(seconds, 0.99)),
            "masks_share_of_a_step": per_step * statistics.median(rates[ROWS]) / ROWS,
            "gap_p50_ms": 1e3 * statistics.median(gaps[0]),
            "gap_beside_grammars_p50_ms": 1e3 * statistics.median(gaps[ROWS // 2]),
        },
        args.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
