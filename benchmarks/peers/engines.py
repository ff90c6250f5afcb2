"""The engines without any server: prefill of 512 tokens, and decode at batch 1, 8 and 32 behind 128 tokens of context.

Baton's by benchmarks.engine_core, llama.cpp's by its own programs. Of two measurements in a process the better counts,
on both sides.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.run import Part, measure

PREFILL, CONTEXT, DECODED = 512, 128, 32  # tokens
BATCHES = (1, 8, 32)
TIMES = 2


@dataclass(frozen=True, slots=True)
class BatonFormat:
    """What Baton computes with: --dtype, --weight-dtype and --kv-dtype."""

    dtype: str
    weights: str = "auto"
    kv: str = "auto"


BATON_FORMATS = {
    "bfloat16": BatonFormat("bfloat16"),
    "float32": BatonFormat("float32"),
    "int8": BatonFormat("bfloat16", "int8", "int8"),
    "file": BatonFormat("bfloat16", "file", "int8"),  # as --dtype auto
    "codes": BatonFormat("bfloat16", "codes", "int8"),  # as --dtype auto with AMX
}
SERVED_FORMATS = ("bfloat16", "int8", "file", "codes")  # float32 is exact, and never the fastest


def baton_engine(name: str, threads: int, console: Console) -> dict[str, float]:
    chosen = BATON_FORMATS[name]
    flags = ("--threads", str(threads), "--dtype", chosen.dtype, "--weights", chosen.weights, "--kv", chosen.kv)
    part = Part(f"engine_{name}", threads, ("-m", "benchmarks.engine_core", *flags))
    found = measure(part, console)
    if found is None:
        raise RuntimeError("benchmarks.engine_core failed; what it said stands above")
    return {"prefill": found["prefill_512"]} | {f"decode_{b}": found[f"decode_{b}"] for b in BATCHES}


def llama_engine(programs: Path, file: Path, threads: int, batches: tuple[int, ...] = BATCHES) -> dict[str, float]:
    common = ["--model", str(file), "--threads", str(threads)]
    bench = [str(programs / "llama-bench"), *common, "--n-prompt", str(PREFILL), "--n-gen", "0"]
    said = run([*bench, "--repetitions", str(TIMES), "--output", "json"])
    batched = [str(programs / "llama-batched-bench"), *common, "--threads-batch", str(threads)]
    batched += ["-c", str(max(batches) * (CONTEXT + DECODED)), "-b", "2048", "-ub", "512", "--output-format", "jsonl"]
    batched += ["-npp", str(CONTEXT), "-ntg", str(DECODED), "-npl", ",".join(map(str, batches * TIMES))]
    return {"prefill": prefill_rate(said.stdout)} | decode_rates(run(batched).stdout.splitlines())


def prefill_rate(said: str) -> float:
    """Tokens/s out of llama-bench's JSON."""
    (row,) = json.loads(said)
    return float(max(row["samples_ts"]))


def decode_rates(lines: Iterable[str]) -> dict[str, float]:
    """Tokens/s of all rows together, by batch, out of llama-batched-bench's lines; others of its lines are no JSON."""
    best: dict[str, float] = {}
    for row in (json.loads(line) for line in lines if line.startswith("{")):
        name = f"decode_{row['pl']}"
        best[name] = max(best.get(name, 0.0), float(row["speed_tg"]))
    return best


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """What it printed and what it logged. RuntimeError with its last words when it failed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}: {done.stderr[-1500:]}")
    return done
