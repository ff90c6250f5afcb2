"""Runs the cluster simulation over many seeds, on all cores, and replays one.

python -m tests.support.sim.run --seeds 1000            # until 1,000 seeds have counted
python -m tests.support.sim.run --replay 4711           # one seed, with its timeline
python -m tests.support.sim.run --page-groups all        # models whose upper layer has a window, and pages of its own
python -m tests.support.sim.run --replay 4711 --record-dir /tmp/steps && baton trace 4711.json /tmp/steps/*.steps.json
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from shared.config import core_plan
from shared.config.core_plan import CorePlan
from tests.support.sim.report import SeedReport
from tests.support.sim.summary import Summary
from tests.support.sim.waiting import mended

PROGRESS_S = 5.0
TIMELINE_LINES = 400
AHEAD = 4  # seeds under way for each process, so that a long one keeps nobody waiting


def prepare(mends: Sequence[str] = ()) -> None:
    """In each process, before torch is loaded. `mends`: see `mended`."""
    mended(mends)
    core_plan.apply(CorePlan(threads=1))
    logging.disable(logging.CRITICAL)  # failed steps and the like are on purpose here
    import tests.support.sim.cluster  # noqa: F401

    gc.freeze()  # what is loaded by now stays: collections need not look at it again


def run_one(seed: int, groups: str = "", **more: Any) -> SeedReport:
    from shared.model.hashlm.layer import STATE
    from tests.support.sim.cluster import run_seed
    from tests.support.sim.moods import in_page_groups

    if groups:
        more["change"] = partial(in_page_groups, lower_window=0 if groups == "all" else STATE)
    return run_seed(seed, **more)


def run_many(
    first: int,
    wanted: int,
    jobs: int,
    budget_s: float = float("inf"),
    mends: Sequence[str] = (),
    groups: str = "",
) -> Summary:
    """Seeds from `first` on, until `wanted` have counted, or the time is over."""
    summary, started, shown = Summary(), time.monotonic(), time.monotonic()

    def enough() -> bool:
        return summary.counted >= wanted or time.monotonic() - started > budget_s

    for report in results(first, jobs, enough, mends, groups):
        summary.add(report)
        if summary.failures and summary.failures[-1] is report:
            tell(report.seed, report.failure, groups)
        if time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            print(
                f"{shown - started:6.0f} s  {summary.counted} of {wanted} seeds, {summary.requests} requests, "
                f"{summary.tokens} tokens, {sum(summary.hits.values())} faults, {len(summary.failures)} failures",
                flush=True,
            )
    return summary


def results(
    first: int, jobs: int, enough: Callable[[], bool], mends: Sequence[str] = (), groups: str = ""
) -> Iterator[SeedReport]:
    """Yields reports in the order of their seeds, so that the same seeds count on every machine. Seeds behind the one
    that is waited for run already; what they report after `enough` is dropped.
    """
    seeds = itertools.count(first)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare, initargs=(mends,)) as pool:
        try:
            under_way = deque(pool.submit(run_one, next(seeds), groups) for _ in range(AHEAD * jobs))
            while not enough():
                yield under_way.popleft().result()
                under_way.append(pool.submit(run_one, next(seeds), groups))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after a signal: what runs ends, nothing new begins


def tell(seed: int, failure: str, groups: str) -> None:
    own = f" --page-groups {groups}" if groups else ""
    print(
        f"FAILED seed {seed}: {failure}\n  replay: {sys.executable} -m tests.support.sim.run --replay {seed}{own}",
        flush=True,
    )


def replay(seed: int, word: str, mends: Sequence[str], record_dir: Path | None, groups: str) -> int:
    prepare(mends)
    report = run_one(seed, groups, keeps_timeline=True, word=word, record_dir=record_dir)
    print("\n".join(report.timeline[-TIMELINE_LINES:]))
    print(f"\nseed {seed}, {report.mood}: {report.num_nodes} nodes, {report.num_requests} requests", report.digest)
    print(f"faults that hit an open request: {dict(report.hits)}\nends: {dict(report.outcomes)}")
    print(report.failure or "passed")
    return 1 if report.failure else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="seeds that must count")
    parser.add_argument("--first", type=int, default=0, help="where to begin")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print what happened")
    parser.add_argument("--mended", nargs="+", default=[], metavar="DEFECT", help="of waiting.py: hold the code to it")
    parser.add_argument(
        "--page-groups", choices=("all", "state"), default="", help="two of them: what the lower layer reads"
    )
    parser.add_argument("--word", default="", help="with --replay: only lines with it, as r0/1f# for one request")
    parser.add_argument("--record-dir", type=Path, metavar="DIR", help="with --replay: files of steps, for baton trace")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # or the processes would stay
    if options.replay is not None:
        return replay(options.replay, options.word, options.mended, options.record_dir, options.page_groups)
    started = time.monotonic()
    groups = options.page_groups
    summary = run_many(options.first, options.seeds, options.jobs, 60 * options.minutes, options.mended, groups)
    print("\n".join(summary.lines()))
    print(f"took         {time.monotonic() - started:.0f} s with {options.jobs} processes")
    for report in summary.failures:
        tell(report.seed, report.failure, groups)
    for name in summary.unseen:
        print(f"SELDOM {name}: {summary.rare[name]} times in a long run")
    return 1 if summary.failures or summary.unseen else 0


if __name__ == "__main__":
    sys.exit(main())
