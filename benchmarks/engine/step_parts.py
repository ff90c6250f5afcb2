"""Where a step of a model on a CPU spends its time: Python before the compiled call, and each kind of task.

    python -m benchmarks.engine.step_parts [--model smollm2] [--weights auto,file] [--kv auto,int8] [--threads 1]
                                    [--steps "decode 8,prefill 512"] [--against FOLDER]

Steps: prefill of one prompt of 512 and of 1,500 tokens, decode at batch 1, 8 and 32 behind 128 and behind 1,500 tokens.
A model that is not one program has no kinds of task. Minima of some rounds, ms; of one thread the processor's time,
of several the clock's. With --against, the tree in that folder takes turns with this one, a process each, and its
time over ours is printed too: a busy machine hurts both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = {"prefill 512": (1, 0, 512), "prefill 1500": (1, 0, 1500)} | {f"decode {n}": (n, 128, 1) for n in (1, 8, 32)}
STEPS |= {f"decode {n} behind 1500": (n, 1500, 1) for n in (1, 8, 32)}
PAGE_SIZE = 16
KINDS = ("norm", "qkv", "write", "attend", "out", "mlp_norm", "gate_up", "gate", "down", "head")


class Timed:
    """Stands in for a model's program: runs the same tasks, each kind's time apart."""

    def __init__(self, model: Any, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._program, self._num_tasks = model._program, len(model._words)
        self.kind_of = ["other"] * self._num_tasks
        for kind in KINDS:
            for index in [getattr(model._at, kind)] if kind == "head" else getattr(model._at, kind).tolist():
                self.kind_of[index] = kind
        self.begun, self.seconds = 0.0, dict.fromkeys((*KINDS, "other"), 0.0)

    def run(self, stop: int | None = None, start: int = 0) -> None:
        self.begun = before = self._clock()
        for index in range(start, self._num_tasks if stop is None else stop):
            self._program.run(index + 1, index)
            after = self._clock()
            self.seconds[self.kind_of[index]] += after - before
            before = after


def measure(
    model: Any, num_rows: int, context: int, count: int, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Minima in ms: whole, Python before the call, and each kind of task."""
    import torch

    from shared.kernel.code.step_layout import Layout
    from shared.kv.pool import KVPool
    from shared.model.math.interface import ModelInputs

    length = context + count
    per_row = -(-length // PAGE_SIZE)
    pool = KVPool(model.kv_planes(PAGE_SIZE), 1 + num_rows * per_row, PAGE_SIZE)
    for plane in pool.planes:  # memory that was never written is one page for all
        pool.plane(plane.name).fill_(1)
    table = torch.arange(1, 1 + num_rows * per_row, dtype=torch.int32).view(num_rows, per_row)
    program, found = getattr(model, "_program", None), []
    for turn in range(2 * rounds + 2):
        ids = torch.randint(100, 40_000, (num_rows * count,), generator=torch.Generator().manual_seed(turn))
        inputs = ModelInputs(
            input_ids=ids,
            positions=torch.arange(context, length).repeat(num_rows),
            layout=Layout(
                cu_q_lens=torch.arange(0, num_rows * count + 1, count, dtype=torch.int32),
                page_tables=(table,),
                max_q_len=count,
                max_seq_len=length,
            ),
            logits_idx=torch.arange(1, num_rows + 1) * count - 1,
        )
        timed = Timed(model, clock) if turn % 2 and program is not None else None
        model._program = timed or program
        before = clock()
        model.forward(inputs, pool)
        whole = clock() - before
        model._program = program
        found.append({"whole": whole} if timed is None else {"python": timed.begun - before, **timed.seconds})
    names = ("whole", "python", *KINDS, "other")
    return {name: 1e3 * min(ms) for name in names if (ms := [turn[name] for turn in found[2:] if name in turn])}


def measure_all(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    import torch

    from shared.model.formats.opened import LoadOptions
    from shared.model.loading.load import load_model
    from shared.model.math.kernels import Formats

    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    rows = {}
    with torch.inference_mode():
        for weights, kv in itertools.product(args.weights.split(","), args.kv.split(",")):
            options = LoadOptions(args.dtype, threads=args.threads, formats=Formats(kv, weights))
            model = load_model(args.model, options)
            for name in args.steps.split(","):
                rows[f"{weights}, KV {kv}: {name}"] = measure(model, *STEPS[name], args.rounds, clock)
    return rows


def measured_in(tree: Path, argv: list[str]) -> dict[str, dict[str, float]]:
    code = f"import runpy, sys; sys.argv[1:] = {argv!r}; runpy.run_path({__file__!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=True)
    rows: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def smaller(rows: dict[str, dict[str, float]], others: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {part: min(ms, others.get(name, row)[part]) for part, ms in row.items()} for name, row in rows.items()
    }


def report(rows: dict[str, dict[str, float]], others: dict[str, dict[str, float]]) -> None:
    for name, row in rows.items():
        print(name)
        for part, ms in row.items():
            there = others.get(name, {}).get(part)
            beside = f"{there:10.3f} there   x{there / ms:.2f}" if there and ms else ""
            print(f"    {part:10}{ms:10.3f}{beside}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="auto,file", help="formats, as in --weight-dtype")
    parser.add_argument("--kv", default="auto", help="formats, as in --kv-dtype")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3, help="processes of each tree, with --against")
    parser.add_argument("--against", type=Path, help="root of another tree")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.against is None:
        rows = measure_all(args)
        if args.json:
            print(json.dumps(rows))
        else:
            report(rows, {})
        return
    argv = ["--model", args.model, "--dtype", args.dtype, "--weights", args.weights, "--json"]
    argv += ["--kv", args.kv, "--steps", args.steps]
    argv += ["--threads", str(args.threads), "--rounds", str(args.rounds)]
    ours: dict[str, dict[str, float]] = {}
    theirs: dict[str, dict[str, float]] = {}
    for _ in range(args.turns):
        ours = smaller(measured_in(Path.cwd(), argv), ours)
        theirs = smaller(measured_in(args.against, argv), theirs)
    report(ours, theirs)


if __name__ == "__main__":
    main()
