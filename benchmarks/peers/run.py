"""`make bench PEERS=1`: Baton beside llama.cpp and vLLM on this machine, in one run, and what is asked of it.

    python -m benchmarks.peers.run [--rows decode,server] [--repetitions 3] [--tiny]

The systems take turns, in each repetition beginning with another one; medians count. What is measured is kept in
bench-out/peers at once: a run that was cut off goes on where it was, unless the sources have changed. --fresh begins
anew. A peer that can't be had is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.kept import PACKAGES, code_digest, formats_near_enough
from benchmarks.peers.needed import BATON, MACHINE, QUIET_MACHINE, ROWS, UNITS, VLLM, Beside, Verdict, judge, units_of
from benchmarks.peers.plan import TINY, Job, Sizes, find_peers, jobs
from benchmarks.run import OUT, ROOT, machine, num_cores
from tests.gpu.book import FAILED, PASSED, Book, Outcome

Measured = dict[str, dict[str, dict[str, list[float]]]]  # unit -> system -> figure -> one value per repetition


def job_name(repetition: int, job: Job) -> str:
    return f"{repetition} {job.unit}: {job.system}"


def turns(made: Sequence[Job], repetition: int) -> list[Job]:
    """Unit by unit; in each its systems begin with another one every time."""
    ordered: list[Job] = []
    for unit in UNITS:
        of_unit = [job for job in made if job.unit == unit]
        first = repetition % len(of_unit) if of_unit else 0
        ordered += of_unit[first:] + of_unit[:first]
    return ordered


def run_job(name: str, job: Job, book: Book, console: Console) -> None:
    """Nothing is measured twice: what failed, too, stays in the book."""
    if not book.is_left(name):
        return
    book.begin(name)
    console.print(f"[bold]{name}[/] ...", end=" ")
    start = time.monotonic()
    try:
        figures, state, told = job.measure(), PASSED, ""
    except Exception as error:  # of any peer: the others are measured all the same
        figures, state, told = {}, FAILED, f"{type(error).__name__}: {error}"
    took = time.monotonic() - start
    book.end(Outcome(name, state, took, figures, told))
    console.print(f"{took:.0f} s" if state == PASSED else told, markup=False)


def gather(book: Book, made: Sequence[Job], repetitions: int) -> Measured:
    """vLLM has no program that prefills alone: its figure is what comes through HTTP, where it was measured."""
    found: Measured = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for repetition in range(repetitions):
        for job in made:
            outcome = book.outcome(job_name(repetition, job))
            for key, value in (outcome.figures if outcome else {}).items():
                found[job.unit][job.system][key].append(value)
    through_http = found["server"][VLLM]["prefill_http"] if VLLM in found["server"] else []
    if through_http and found["engine"]:
        found["engine"][VLLM]["prefill"] = through_http
    return found


def verdicts(found: Measured, allowed: frozenset[str] | None) -> list[Verdict]:
    """Of the rows that were measured. `allowed`: Baton's formats that may stand for it; None: all."""
    rates = {name: statistics.median(values) for name, values in found[MACHINE][MACHINE].items()}
    judged = []
    for row in ROWS:
        values = {name: figures[row.key] for name, figures in found[row.unit].items() if row.key in figures}
        if row.unit == "engine" and allowed is not None:
            values = {name: v for name, v in values.items() if is_allowed(name, allowed)}
        if values and rates:
            judged.append(judge(row, values, rates))
    return judged


def is_allowed(system: str, formats: frozenset[str]) -> bool:
    return not system.startswith(BATON) or system.removeprefix(BATON).strip() in formats


def show(found: Measured, judged: Sequence[Verdict], allowed: frozenset[str] | None, console: Console) -> None:
    for unit, systems in found.items():
        if not systems:
            continue
        table = Table(title=unit, title_justify="left")
        keys = list(dict.fromkeys(key for figures in systems.values() for key in figures))
        for column in ("figure, median", *systems):
            table.add_column(column, justify="left" if column.startswith("figure") else "right")
        for key in keys:
            cells = [middle(figures.get(key, [])) for figures in systems.values()]
            table.add_row(key, *cells)
        console.print(table)
    show_rates(found[MACHINE][MACHINE], console)
    if allowed is None:
        console.print(
            "python -m benchmarks.engine.perplexity was not run on these sources: every format of Baton counts"
        )
    else:
        console.print(f"Formats of Baton near enough to the peer's perplexity: {', '.join(sorted(allowed)) or 'none'}")
    console.print(needed_table(judged))


def middle(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.5g}" if values else ""


def show_rates(rates: Mapping[str, Sequence[float]], console: Console) -> None:
    for name, values in rates.items():
        here, there = statistics.median(values), QUIET_MACHINE[name]
        console.print(f"this machine's {name}: {here:,.0f}, {here / there:.2f} of the peers' machine ({there:,.0f})")


def needed_table(judged: Sequence[Verdict]) -> Table:
    table = Table(title="what is asked beside the best peer", title_justify="left")
    for column in ("row", "Baton", "best peer", "result", "needed", "", "peer's bound", "counts"):
        table.add_column(column)
    for one in judged:
        row, sign = one.row, "<=" if one.row.is_cost else ">="
        unit = {Beside.PEER: "times", Beside.NOTHING: "", Beside.MORE: "more"}[row.beside]
        result = "" if one.score is None else f"{one.score:,.3g} {unit}"
        bound = "" if one.peer_bound is None else f"{sign} {one.peer_bound:,.4g}"
        met = "not measured" if one.score is None else ("met" if one.is_met else "NOT MET")
        counts = "yes" if one.counts else "NO: the peer was slow"
        table.add_row(row.what, named(one.baton), named(one.peer), result, f"{sign} {row.wanted:g}", met, bound, counts)
    return table


def named(one: tuple[str, float] | None) -> str:
    return "" if one is None else f"{one[1]:,.4g} ({one[0]})"


def as_json(found: Measured, judged: Sequence[Verdict], missing: Mapping[str, str]) -> dict[str, Any]:
    rows = {
        one.row.key: {
            "baton": one.baton,
            "peer": one.peer,
            "result": one.score,
            "needed": one.row.wanted,
            "beside": one.row.beside.value,
            "met": one.is_met,
            "peer_bound": one.peer_bound,
            "counts": one.counts,
        }
        for one in judged
    }
    return {"machine": machine(), "missing": dict(missing), "rows": rows, "figures": found}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="what their names begin with, or units: decode,server; empty: all")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=num_cores(), help="of the peers, and of Baton's engine")
    parser.add_argument("--tiny", action="store_true", help="one repetition of little: only to see that it runs")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    args = parser.parse_args(argv)
    try:
        args.units = units_of([name for name in args.rows.split(",") if name])
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console = arguments(argv), Console(width=150)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whoever ends this ends the server that is running, too
    folder = ROOT / OUT / ("peers-tiny" if args.tiny else "peers")
    if args.fresh:
        (folder / "results.jsonl").unlink(missing_ok=True)
    console.print(machine())
    peers = find_peers(args.units)
    for name, reason in peers.missing.items():
        console.print(f"{name} is not to be had: {reason}", markup=False)
    book = Book(folder)
    book.begin_run({"machine": machine()}, code_digest((*PACKAGES, "benchmarks/peers")))
    repetitions = 1 if args.tiny else args.repetitions
    made = jobs(peers, args.units, TINY if args.tiny else Sizes(), args.threads, console)
    for repetition in range(repetitions):
        for job in turns(made, repetition):
            run_job(job_name(repetition, job), job, book, console)
    found, allowed = gather(book, made, repetitions), formats_near_enough()
    judged = verdicts(found, allowed)
    show(found, judged, allowed, console)
    (folder / "peers.json").write_text(json.dumps(as_json(found, judged, peers.missing), indent=1))
    outcomes = [book.outcome(job_name(n, job)) for n in range(repetitions) for job in made]
    return 1 if any(one is None or one.state != PASSED for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
