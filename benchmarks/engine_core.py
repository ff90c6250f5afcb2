"""Engine level: tokens/s through scheduler, overlap loop and engine, without any network; and overlap beside plain.

python -m benchmarks.engine_core --threads 2 --dtype bfloat16 [--pairs 11]
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from multiprocessing.synchronize import Event

import numpy as np
import torch

from benchmarks.report import parser_with_json, report
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.device.malloc import keep_freed_memory
from shared.device.streams import make_streams
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.interface import Model
from shared.model.math.kernels import Formats
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.records.core import NodeCore
from shared.sched.steps.events import Emitted, Ended
from shared.sched.steps.settings import SchedSettings

PROMPT_TOKENS = 128


def build(model: Model, threads: int, overlap: bool) -> NodeCore:
    settings = SchedSettings(page_size=16, max_context=2048, chunk_size=512, mixed_chunk_size=512)
    streams = make_streams("cpu", on_thread_start=lambda: torch.set_num_threads(threads))
    return assemble_core(model, streams, settings, CoreSizes(1200, 40, prefix_cache=False), overlap=overlap)


def submit(core: NodeCore, batch: int, num_out: int, prompt_tokens: int) -> None:
    rng = np.random.default_rng(7)
    for i in range(batch):
        key = RequestKey("bench", 1, f"r{time.monotonic_ns()}", 0, i)
        prompt = rng.integers(100, 40_000, prompt_tokens).astype(np.int64)
        ask = NodeAsk(prompt, SamplingParams(max_tokens=num_out, temperature=0.0), 0)
        core.submit(Request(key._replace(seq_index=0, rid=f"{key.rid}.{i}"), ask, i))


def run_dry(core: NodeCore, batch: int) -> tuple[float, float]:
    """(seconds until every request has its first token, tokens/s from then until the first one ends)."""
    start, first_done, end = time.perf_counter(), 0.0, 0.0
    started: set[str] = set()
    counted = 0
    while core.queues.requests or not core.loop.idle:
        core.loop.step(block=True)
        events = core.queues.take_events()
        tokens = sum(len(event.ids) for event in events if isinstance(event, Emitted))
        started.update(event.key.rid for event in events if isinstance(event, Emitted))
        if not first_done and len(started) == batch:
            first_done = time.perf_counter()
        elif first_done and not end:
            counted += tokens
            end = time.perf_counter() if any(isinstance(event, Ended) for event in events) else 0.0
    return first_done - start, counted / max(end - first_done, 1e-9)


def decode_rate(core: NodeCore, batch: int, num_out: int) -> float:
    submit(core, batch, num_out, PROMPT_TOKENS)
    return run_dry(core, batch)[1]


def spin(stop: Event) -> None:
    while not stop.is_set():
        sum(range(1000))


def compare_overlap(model: Model, threads: int, pairs: int, busy: bool) -> float:
    """Median over interleaved pairs of (overlap rate / plain rate) at batch 8."""
    cores = {overlap: build(model, threads, overlap) for overlap in (True, False)}
    stop = multiprocessing.Event()
    neighbour = multiprocessing.Process(target=spin, args=(stop,), daemon=True)
    if busy:
        neighbour.start()
    try:
        for core in cores.values():
            decode_rate(core, 8, 16)
        ratios = []
        for i in range(pairs):
            order = (True, False) if i % 2 else (False, True)
            rates = {overlap: decode_rate(cores[overlap], 8, 48) for overlap in order}
            ratios.append(rates[True] / rates[False])
        return statistics.median(ratios)
    finally:
        stop.set()
        if busy:
            neighbour.join()
        for core in cores.values():
            core.close()


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    weights = ("auto", "file", "codes", "int8", "fp8")
    parser.add_argument("--weights", default="auto", choices=weights, help="as --weight-dtype")
    parser.add_argument("--kv", default="auto", choices=("auto", "int8", "fp8"), help="as --kv-dtype")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pairs", type=int, default=0, help="overlap against plain: number of interleaved pairs")
    args = parser.parse_args()
    keep_freed_memory()  # as nodes do
    torch.set_num_threads(args.threads)
    options = LoadOptions(args.dtype, threads=args.threads, formats=Formats(args.kv, args.weights))
    model = load_model(args.model, options)
    core = build(model, args.threads, overlap=True)
    figures: dict[str, float] = {}
    decode_rate(core, 4, 8)
    for _ in range(2):
        submit(core, 1, 2, 512)
        figures["prefill_512"] = 512 / run_dry(core, 1)[0]
    for batch, num_out in ((1, 96), (8, 64), (32, 96)):
        figures[f"decode_{batch}"] = max(decode_rate(core, batch, num_out) for _ in range(2))
    core.close()
    if args.pairs:
        figures["overlap_alone"] = compare_overlap(model, args.threads, args.pairs, busy=False)
        figures["overlap_busy"] = compare_overlap(model, args.threads, args.pairs, busy=True)
    report(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
