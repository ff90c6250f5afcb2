"""`make bench`: the main figures of docs/figures.md, measured in one run on this machine and printed side by side.

    python -m benchmarks.run [--quick]

Each part is a process of its own, with its thread count set before torch loads. Results: bench-out/bench.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.config.core_plan import CorePlan, environment

ROOT = Path(__file__).resolve().parents[1]
OUT = Path("bench-out")


@dataclass(frozen=True, slots=True)
class Part:
    """One measuring process. `threads` also goes into its environment. Two threads spin while they wait (the process
    has the machine to itself, as transformers has beside it); what shares cores sleeps."""

    name: str
    threads: int
    command: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        return environment(CorePlan(threads=self.threads, wait_policy="active" if self.threads > 1 else "passive"))


def parts(quick: bool, cores: int) -> list[Part]:
    pairs = "3" if quick else "11"
    model, engine = ("-m", "benchmarks.engine_model"), ("-m", "benchmarks.engine_core")
    both = str(cores)
    spec = ("-m", "benchmarks.speculation", "--threads", both)
    few = ("--per-kind", "3", "--rounds", "1" if quick else "3")
    return [
        Part("model_bfloat16", cores, (*model, "--dtype", "bfloat16", "--threads", both)),
        Part("model_float32", cores, (*model, "--dtype", "float32", "--threads", both)),
        Part("engine", cores, (*engine, "--threads", both)),
        Part("engine_one_thread", 1, (*engine, "--threads", "1", "--pairs", pairs)),
        Part("spec_bfloat16", cores, (*spec, *(few if quick else ()))),
        Part("spec_float32", cores, (*spec, "--dtype", "float32", *few)),
        Part("http_shm", 1, ("-m", "benchmarks.http_load", "--transport", "shm")),
        Part("http_zmq", 1, ("-m", "benchmarks.http_load", "--transport", "zmq")),
        Part("transfer", 1, ("-m", "benchmarks.transfer")),
        Part("router", 1, ("-m", "benchmarks.router")),
    ]


def measure(part: Part, console: Console) -> Any:
    """Run one part. Return its figures, None when it failed."""
    path = ROOT / OUT / f"{part.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    console.print(f"[bold]{part.name}[/] ...", end=" ")
    start = time.monotonic()
    command = [sys.executable, *part.command, "--json", str(path)]
    done = subprocess.run(command, env={**os.environ, **part.environment}, cwd=ROOT, capture_output=True, text=True)
    console.print(f"{time.monotonic() - start:.0f} s")
    if done.returncode:
        console.print(done.stdout[-2000:] + done.stderr[-2000:], markup=False)
        return None
    return json.loads(path.read_text())


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    return f"{cpu_name()}, {num_cores()} cores, Python {platform.python_version()}"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def show(figures: dict[str, Any], console: Console) -> None:
    for name, part in figures.items():
        if not isinstance(part, dict):
            continue
        table = Table(title=name, title_justify="left")
        table.add_column("figure")
        table.add_column("value", justify="right")
        for row, value in flat(part):
            table.add_row(row, f"{value:,.2f}" if isinstance(value, float) else str(value))
        console.print(table)


def flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [row for key, value in tree.items() for row in flat(value, f"{prefix}{key} ")]
    if isinstance(tree, list):
        return [row for i, value in enumerate(tree) for row in flat(value, f"{prefix}{i} ")]
    return [(prefix.strip(), tree)]


@dataclass(frozen=True, slots=True)
class Need:
    """A figure that must reach `bound` (or stay under it)."""

    what: str
    got: float
    bound: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.got >= self.bound if self.at_least else self.got <= self.bound


def needs(f: dict[str, Any]) -> list[Need]:
    """What this project asks of itself on a 2-core machine; only parts that were measured."""
    rows = []
    if engine := f.get("engine"):
        rows += [Need(f"decode tok/s, batch {b}, 2 cores", engine[f"decode_{b}"], n) for b, n in FLOORS.items()]
    if one := f.get("engine_one_thread"):
        rows.append(Need("overlap / plain, alone", one["overlap_alone"], 0.97))
        rows.append(Need("overlap / plain, beside a busy process", one["overlap_busy"], 0.90))
    if spec := f.get("spec_bfloat16"):
        rows += speculation_needs(spec["by_kind"]["all"])
    for name in ("http_shm", "http_zmq"):
        if http := f.get(name):
            if one:
                share = http["streams_8"]["steady_tok_s"] / one["decode_8"]
                rows.append(Need(f"{name}: 8 streams / engine on the decode node's one core", share, 0.80))
            rows.append(Need(f"{name}: last chunk to installed, median ms", http["handoff_p50_ms"], 15, at_least=False))
            worst = http["interference"]["during_itl_p99_ms"]
            rows.append(Need(f"{name}: ITL p99 ms while 1,500-token prompts arrive", worst, 100, at_least=False))
    if router := f.get("router"):
        rows += router_needs(router)
    return rows


def router_needs(router: dict[str, Any]) -> list[Need]:
    token, place, hellos = router["token"], router["request"]["nodes_100"], router["hellos"]
    return [
        Need("router: CPU per token without sockets, us", token["whole_us"], 12, at_least=False),
        Need("router: CPU of a placement at 100 nodes, us", place["place_us"], 50, at_least=False),
        Need("router: CPU of 400 nodes' Hellos, ms", hellos["nodes_400_ms"], 100, at_least=False),
    ]


def speculation_needs(over_all_kinds: dict[str, Any]) -> list[Need]:
    """Of the best head-based contender; none when all were left out."""
    found = [row for name, row in over_all_kinds.items() if name.startswith("eagle")]
    best = max(found, key=lambda row: row["speedup"], default=None)
    if best is None:
        return []
    verify = Need("speculation: tokens per verify, all kinds, batch 1", best["tokens_per_verify"], 2.0)
    return [verify, Need("speculation: speed beside none, all kinds, batch 1", best["speedup"], 1.25)]


FLOORS = {1: 65.0, 8: 370.0, 32: 690.0}


def show_needs(rows: list[Need], console: Console) -> None:
    table = Table("figure", "measured", "needed", "", title="what is asked of these figures", title_justify="left")
    for row in rows:
        sign = ">=" if row.at_least else "<="
        table.add_row(row.what, f"{row.got:,.2f}", f"{sign} {row.bound:g}", "met" if row.met else "NOT MET")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: to see that it runs")
    parser.add_argument("--only", nargs="*", help="names of parts")
    args = parser.parse_args()
    console = Console(width=110)
    console.print(machine())
    figures: dict[str, Any] = {"machine": machine()}
    for part in parts(args.quick, num_cores()):
        if not args.only or part.name in args.only:
            figures[part.name] = measure(part, console)
    show(figures, console)
    show_needs(needs(figures), console)
    (ROOT / OUT / "bench.json").write_text(json.dumps(figures, indent=1))
    return 1 if None in figures.values() else 0


if __name__ == "__main__":
    sys.exit(main())
