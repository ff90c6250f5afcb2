"""Ask the tests about the slips: which test is the first to notice each of them, and which slips nobody notices.

    python tests/mutants/slips_noticed.py [--only NAME ...] [--ask units | --ask simulations]

The slips are those of slips/slips.toml. The unit tests that know the changed file try first. The simulations, all
nodes and routers together, try the slips that no unit test notices. As with the other mutants, only an assertion's or
an oracle's word counts: a crash or a time-out is printed as what it is.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from areas import AREAS, NUM_CLUSTER_SEEDS, WHOLE_CLUSTER, tests_of
from catalogue import ROOT, Slip, module_of, mutated, read_slips
from run import copy_tree, replaced
from sampled import OPTIONS
from trial import ALIVE, KILLED, Net, Trials, Verdict

TEST_TIMEOUT_S = 240  # a whole cluster on a busy machine
UNITS, SIMULATIONS = "units", "simulations"  # nets


@dataclass(frozen=True)
class Trial:
    """A slip in a copied tree: the one file that it changes, and who is asked about it."""

    slip: Slip
    path: Path
    file: str
    text: str
    nets: dict[str, Net]


def trial_of(slip: Slip, root: Path) -> Trial:
    ((path, text),) = mutated(slip, root).items()
    file = path.relative_to(root).as_posix()
    area = next((area for area in AREAS.values() if file in area.files), None)
    if area is not None:
        return Trial(slip, path, file, text, {UNITS: area.quick_net(file), SIMULATIONS: area.rest_net()})
    nets = {
        UNITS: Net(units_that_know(file)),
        SIMULATIONS: Net(tests_of(WHOLE_CLUSTER, "simulation"), NUM_CLUSTER_SEEDS),
    }
    return Trial(slip, path, file, text, nets)


def units_that_know(file: str) -> tuple[str, ...]:
    """Return the unit tests that are named like the file's room, then others that import the file."""
    room = f"test_{Path(file).parent.name}_"
    paths = sorted((ROOT / "tests" / "unit").glob("test_*.py"), key=lambda path: (not path.name.startswith(room), path))
    knowing = (path for path in paths if path.name.startswith(room) or f"from {module_of(file)} " in path.read_text())
    return tuple(path.relative_to(ROOT).as_posix() for path in knowing)


def asked_again(net: Net, verdict: Verdict) -> Net:
    """Return the file of the test that noticed, or the seeds when a seed did."""
    file = verdict.by.partition("::")[0]
    return Net((file,)) if file in net.files else Net((), net.cluster_seeds)


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
        """What fails without the slip, too, tells nothing."""
        start, net = time.monotonic(), trial.nets[name]
        with replaced({trial.path: trial.text}):
            verdict = session.try_code(net, module_of(trial.file), trial.text)
        if verdict.by:
            healthy = session.try_code(asked_again(net, verdict))
            if healthy.outcome != ALIVE:
                verdict = Verdict("unclear", healthy.by, f"without the slip: {healthy.why}")
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
    with tempfile.TemporaryDirectory(prefix="baton-slips-") as folder:
        root = Path(folder)
        copy_tree(root)
        trials = [trial_of(slip, root) for slip in slips]
        files = dict.fromkeys(file for trial in trials for name in asked for file in trial.nets[name].files)
        round_ = Round(trials, asked)
        os.chdir(root)
        sys.path.insert(0, str(root))
        Trials(root, round_.work).start(files, *OPTIONS, f"--timeout={TEST_TIMEOUT_S}")
    counts = Counter(verdict.outcome for verdict in round_.found.values())
    print(f"\n{counts[KILLED]} of {len(slips)} slips noticed")
    return 0 if counts[KILLED] == len(slips) else 1


if __name__ == "__main__":
    sys.exit(main())
