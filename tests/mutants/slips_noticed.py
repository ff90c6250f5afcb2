"""Ask the tests about the slips: which test is the first to notice each of them, and which slips nobody notices.

    python tests/mutants/slips_noticed.py [--only NAME ...] [--ask units | --ask simulations]

The slips are those of slips/slips.toml. The unit tests that run the changed statements try first (see traced.py). The
simulations try the slips that no unit test notices. As with the other mutants, only an assertion's or an oracle's word
counts: a crash or a time-out is printed as what it is.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from catalogue import ROOT, Slip, mutated, read_slips
from run import copy_tree
from traced import OPTIONS, PARTS, Trace, ensure, tests_that_know
from trial import KILLED, Trials, Verdict

TEST_TIMEOUT_S = 240  # a whole cluster on a busy machine
UNITS, SIMULATIONS = "units", "simulations"  # nets


@dataclass(frozen=True)
class Trial:
    """A slip: the one file that it changes, and the cases that are asked about it."""

    slip: Slip
    file: str
    text: str
    nets: dict[str, list[str]]


def trial_of(slip: Slip, trace: Trace) -> Trial:
    ((path, text),) = mutated(slip).items()
    file = path.relative_to(ROOT).as_posix()
    cases = trace.cases_that_run(file, path.read_text(), text)
    units = [case.name for case in cases if case.file.startswith("tests/unit/")]
    return Trial(slip, file, text, {UNITS: units, SIMULATIONS: [case.name for case in cases if case.name not in units]})


def files_of(slips: Iterable[Slip]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for slip in slips for path in mutated(slip)]


class Round:
    """All slips, inside of a pytest session on the copied tree. `found`: what is known of each so far."""

    def __init__(self, trials: list[Trial], asked: tuple[str, ...]) -> None:
        self._trials = trials
        self._asked = asked
        self.found: dict[str, Verdict] = {}

    def work(self, session: Trials) -> None:
        """Units for all first, so that a round cut short has said something about each."""
        for net in self._asked:
            for trial in self._trials:
                known = self.found.get(trial.slip.name)
                if known is None or known.outcome != KILLED:
                    self._ask(session, trial, net)

    def _ask(self, session: Trials, trial: Trial, name: str) -> None:
        start = time.monotonic()
        verdict = session.try_file(trial.nets[name], trial.file, trial.text)
        self.found[trial.slip.name] = verdict
        seconds = time.monotonic() - start
        by = verdict.by.rpartition("/")[2] or f"nobody of the {name}"
        mark = "noticed" if verdict.outcome == KILLED else verdict.outcome
        print(f"{mark:<8}{trial.slip.name:<34}{seconds:4.0f} s  {by}: {verdict.why[:100]}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--ask", choices=(UNITS, SIMULATIONS), help="only these")
    options = parser.parse_args(argv)
    slips = read_slips(tuple(options.only))
    asked = (options.ask,) if options.ask else (UNITS, SIMULATIONS)
    tests = tests_that_know(files_of(slips))
    ensure(tests, PARTS)
    trace = Trace(tests, PARTS)
    with tempfile.TemporaryDirectory(prefix="baton-slips-") as folder:
        root = Path(folder)
        copy_tree(root)
        round_ = Round([trial_of(slip, trace) for slip in slips], asked)
        os.chdir(root)
        sys.path.insert(0, str(root))
        Trials(root, round_.work).start(trace.files(), *OPTIONS, f"--timeout={TEST_TIMEOUT_S}")
    counts = Counter(verdict.outcome for verdict in round_.found.values())
    print(f"\n{counts[KILLED]} of {len(slips)} slips noticed")
    return 0 if counts[KILLED] == len(slips) else 1


if __name__ == "__main__":
    sys.exit(main())
