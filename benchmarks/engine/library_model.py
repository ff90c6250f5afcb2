"""The shipped model by the library's layers, beside transformers itself in the same process. Prints tokens/s.

    python -m benchmarks.engine.library_model [--dtype bfloat16] [--threads 2] [--parts speed,drafts,kv,start]
                                              [--rounds 3] [--seconds 480]

    speed   ours through scheduler, overlap loop and engine; theirs by `generate` (batch 1) and by `generate_batch`,
            the paged continuous batching (8 and 32); from the moment when all have a token until the first one ends
    drafts  n-gram beside none on a text that repeats itself, and where a drafted step's time goes: the attention asks
            for exact lengths, so the host waits for the step before, then plans while the model rests
    kv      KV in bytes beside KV in the dtype, batch 8
    start   from an empty process to a loaded model, beside our own program, with byte code on disk as users have it

All contenders take turns, so that a busy machine hurts all; figures are medians of the rounds. The first round only
warms up. Each measurement gets its share of --seconds: when that is over, no further round begins. A line for each
round goes to stderr.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from benchmarks.engine_core import PROMPT_TOKENS, run_dry
from benchmarks.report import parser_with_json, report
from shared.config.models.model_path import bundled_gguf
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.device.malloc import keep_freed_memory
from shared.device.streams import make_streams
from shared.model.formats.opened import DTYPES, LoadOptions, open_model
from shared.model.loading.load import load_model
from shared.model.math.interface import Model
from shared.model.math.kernels import Formats
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.records.core import NodeCore
from shared.sched.steps.settings import SchedSettings
from shared.speculation.ngram import NgramWorkerV2
from tests.support.models.transformers_model import reference_network

NUM_OUT = {1: 64, 8: 32, 32: 24}
WIDTH = 4
LOAD = "import sys; from shared.model.formats.opened import LoadOptions; "
LOAD += "from shared.model.loading.load import load_model; "
LOAD += "load_model(sys.argv[1], LoadOptions(sys.argv[2], library=sys.argv[3]))"
Figures = dict[str, Any]


def write_folder(folder: Path, dtype: str) -> None:
    """Write the shipped model as a folder of plain numbers."""
    reference_network(open_model(bundled_gguf()), DTYPES[dtype]).save_pretrained(folder)


def load(folder: Path, dtype: str, kv: str = "auto") -> Model:
    return load_model(str(folder), LoadOptions(dtype, library="transformers", formats=Formats(kv)))


def core_of(model: Model, threads: int, width: int = 1) -> NodeCore:
    settings = SchedSettings(page_size=16, max_context=2048, chunk_size=512, mixed_chunk_size=512, width=width)
    streams = make_streams("cpu", on_thread_start=lambda: torch.set_num_threads(threads))
    sizes = CoreSizes(1200, 40, prefix_cache=False)
    return assemble_core(model, streams, settings, sizes, drafter=NgramWorkerV2() if width > 1 else None)


def prompts_of(batch: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(100, 40_000, PROMPT_TOKENS).tolist() for _ in range(batch)]


def ours(core: NodeCore, prompts: Iterable[list[int]], num_out: int) -> float:
    for number, prompt in enumerate(prompts):
        key = RequestKey("bench", 1, f"r{time.monotonic_ns()}.{number}", 0, 0)
        sampling = SamplingParams(max_tokens=num_out, temperature=0.0)
        core.scheduler.intake.submit(Request(key, NodeAsk(np.asarray(prompt), sampling, 0), number))
    return run_dry(core, number + 1)[1]


class Stamps(BaseStreamer):
    """Notes when tokens come: first the prompt, then one after another."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to note."""


def theirs(network: transformers.PreTrainedModel, prompts: list[list[int]], num_out: int) -> float:
    """Tokens/s of greedy decoding, as `run_dry` counts."""
    settings = transformers.GenerationConfig(
        max_new_tokens=num_out, do_sample=False, eos_token_id=network.config.vocab_size, pad_token_id=0
    )
    if len(prompts) == 1:
        stamps, ids = Stamps(), torch.tensor(prompts)
        network.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=stamps)
        return (num_out - 1) / (stamps.times[-1] - stamps.times[1])
    paged = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512)
    found = network.generate_batch(prompts, settings, paged, record_timestamps=True, warmup=False)
    times = [one.timestamps for one in found.values()]
    assert len(times) == len(prompts) and all(len(one) == num_out for one in times)
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    return sum(begin < stamp <= end for one in times for stamp in one) / (end - begin)


class Rounds:
    """Lets contenders take turns, as long as `seconds` last. `num_shares`: measurements that are to come."""

    def __init__(self, most: int, seconds: float, num_shares: int) -> None:
        self._most, self._num_shares = most, num_shares
        self._end = time.monotonic() + seconds

    def medians(self, what: str, contenders: dict[str, Callable[[], float]]) -> dict[str, float]:
        """Return the medians of at least one round, without the first one."""
        begin = time.monotonic()
        over = begin + (self._end - begin) / max(1, self._num_shares)
        self._num_shares -= 1
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(self._most + 1):
            if turn > 1 and time.monotonic() > over:
                break
            for name in list(contenders)[:: -1 if turn % 2 else 1]:
                rates[name].append(contenders[name]())
            told = ", ".join(f"{name} {found[-1]:.4g}" for name, found in rates.items())
            print(f"{what}, round {turn} of {self._most}: {told} ({time.monotonic() - begin:.0f} s)", file=sys.stderr)
        return {name: statistics.median(found[1:]) for name, found in rates.items()}


def bench_speed(folder: Path, args: argparse.Namespace) -> Figures:
    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[args.dtype], attn_implementation="sdpa"
    ).eval()
    core, found = core_of(load(folder, args.dtype), args.threads), {}
    for batch in args.batches:
        prompts, num_out = prompts_of(batch), NUM_OUT[batch]
        rows = args.turns.medians(
            f"batch {batch}",
            {
                "ours": lambda p=prompts, n=num_out: ours(core, p, n),
                "transformers": lambda p=prompts, n=num_out: theirs(network, p, n),
            },
        )
        found[f"batch {batch}"] = rows | {"ours / transformers": rows["ours"] / rows["transformers"]}
    core.close()
    return found


class Waits:
    """Counts the seconds that the host waits for exact lengths. Stands in for the loop's `_resolve`."""

    def __init__(self, core: NodeCore) -> None:
        self._resolve = core.loop._resolve
        core.loop._resolve = self  # type: ignore[method-assign, assignment]
        self.seconds = 0.0

    def __call__(self) -> bool:
        before = time.perf_counter()
        goes_on = self._resolve()
        self.seconds += time.perf_counter() - before
        return goes_on


def bench_drafts(folder: Path, args: argparse.Namespace) -> Figures:
    """A text that repeats itself: prompts of one passage, again and again."""
    passage = prompts_of(1)[0][:24]
    prompts = [(passage * 10)[: PROMPT_TOKENS + number] for number in range(4)]
    cores = {
        name: core_of(load(folder, args.dtype), args.threads, width) for name, width in (("none", 1), ("ngram", WIDTH))
    }
    waits = Waits(cores["ngram"])
    busy = [0.0]

    def drafted() -> float:
        begin = time.perf_counter()
        rate = ours(cores["ngram"], prompts, NUM_OUT[1])
        busy[0] += time.perf_counter() - begin
        return rate

    contenders = {"none": lambda: ours(cores["none"], prompts, NUM_OUT[1]), "ngram": drafted}
    rows: Figures = args.turns.medians("drafts", contenders)
    counters, steps = cores["ngram"].queues.counters.totals(), cores["ngram"].loop.num_steps
    rows["ngram / none"] = rows["ngram"] / rows["none"]
    rows["tokens per verify"] = 1 + counters["spec_accepted_tokens"] / counters["spec_steps"]
    rows["ms per drafted step"] = 1e3 * busy[0] / steps
    rows["share of it that the host waits for lengths"] = waits.seconds / busy[0]
    for core in cores.values():
        core.close()
    return rows


def bench_kv(folder: Path, args: argparse.Namespace) -> Figures:
    cores = {kv: core_of(load(folder, args.dtype, kv), args.threads) for kv in ("auto", "int8", "fp8")}
    prompts = prompts_of(8)
    rows = args.turns.medians("kv", {kv: lambda c=core: ours(c, prompts, NUM_OUT[8]) for kv, core in cores.items()})
    found: Figures = {kv: {"tok/s": rate, "of auto": rate / rows["auto"]} for kv, rate in rows.items()}
    for kv, core in cores.items():
        found[kv]["bytes per token"] = core.pool.page_bytes / core.settings.page_size
        core.close()
    return found


def bench_start(folder: Path, args: argparse.Namespace) -> Figures:
    users = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def seconds(library: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", LOAD, str(folder), args.dtype, library], env=users, check=True)
        return time.perf_counter() - begin

    rows = args.turns.medians("start", {name: lambda n=name: seconds(n) for name in ("baton", "transformers")})
    return {"seconds": rows, "later by": rows["transformers"] - rows["baton"]}


PARTS = {"speed": bench_speed, "drafts": bench_drafts, "kv": bench_kv, "start": bench_start}


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--batches", type=int, nargs="*", default=tuple(NUM_OUT), choices=tuple(NUM_OUT))
    args = parser.parse_args()
    parts = args.parts.split(",")
    args.turns = Rounds(args.rounds, args.seconds, sum(len(args.batches) if part == "speed" else 1 for part in parts))
    keep_freed_memory()  # as nodes do
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write_folder(Path(folder), args.dtype)
        figures = {part: PARTS[part](Path(folder), args) for part in parts}
    report(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
