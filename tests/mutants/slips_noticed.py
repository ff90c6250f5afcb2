"""Ask the tests about the slips: which test is the first to notice each of them, and which slips nobody notices.

    python tests/mutants/slips_noticed.py [--only NAME ...]

The slips are those of slips/slips.toml. First the unit tests that know the changed file try; those that they leave go
to the simulations, all nodes and routers together. As with the other mutants, only an assertion's or an oracle's word
counts: a crash or a time-out is printed as what it is.
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

from catalogue import ROOT, Slip, mutated, read_slips
from run import copy_tree, replaced
from sampled import AREAS, NUM_CLUSTER_SEEDS, OPTIONS
from trial import ALIVE, KILLED, Net, Trials, Verdict

TEST_TIMEOUT_S = 240  # a whole cluster on a busy machine
WHOLE_CLUSTER = ("tests/simulation/test_cluster_seeds.py", "tests/simulation/test_cluster_deaths.py")


@dataclass(frozen=True)
class Trial:
    """A slip in a copied tree: the one file that it changes, and who is asked about it."""

    slip: Slip
    path: Path
    file: str
    text: str
    units: Net
    simulations: Net


def trial_of(slip: Slip, root: Path) -> Trial:
    ((path, text),) = mutated(slip, root).items()
    file = path.relative_to(root).as_posix()
    area = next((area for area in AREAS.values() if file in area.files), None)
    if area is not None:
        return Trial(slip, path, file, text, area.quick_net(file), area.rest_net())
    units = sorted((ROOT / "tests" / "unit").glob(f"test_{path.parent.name}_*.py"))
    names = tuple(unit.relative_to(ROOT).as_posix() for unit in units)
    return Trial(slip, path, file, text, Net(names), Net(WHOLE_CLUSTER, NUM_CLUSTER_SEEDS))


def asked_again(net: Net, verdict: Verdict) -> Net:
    """Return the file of the test that noticed, or the seeds when a seed did."""
    file = verdict.by.partition("::")[0]
    return Net((file,)) if file in net.files else Net((), net.cluster_seeds)


class Round:
    """All slips, inside of a pytest session on the copied tree. `found`: what is known of each so far."""

    def __init__(self, trials: list[Trial]) -> None:
        self._trials = trials
        self.found: dict[str, Verdict] = {}

    def work(self, session: Trials) -> None:
        """Units for all first, so that a round cut short has said something about each."""
        for nets in ("units", "simulations"):
            for trial in self._trials:
                known = self.found.get(trial.slip.name)
                if known is None or known.outcome != KILLED:
                    self._ask(session, trial, trial.units if nets == "units" else trial.simulations, nets)

    def _ask(self, session: Trials, trial: Trial, net: Net, nets: str) -> None:
        """What fails without the slip, too, tells nothing."""
        start = time.monotonic()
        with replaced({trial.path: trial.text}):
            verdict = session.try_code(net, trial.file.removesuffix(".py").replace("/", "."), trial.text)
        if verdict.by:
            healthy = session.try_code(asked_again(net, verdict))
            if healthy.outcome != ALIVE:
                verdict = Verdict("unclear", healthy.by, f"without the slip: {healthy.why}")
        self.found[trial.slip.name] = verdict
        seconds = time.monotonic() - start
        by = verdict.by.rpartition("/")[2] or f"nobody of the {nets}"
        mark = "noticed" if verdict.outcome == KILLED else verdict.outcome
        print(f"{mark:<8}{trial.slip.name:<34}{seconds:4.0f} s  {by}: {verdict.why[:100]}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    slips = read_slips(tuple(parser.parse_args(argv).only))
    with tempfile.TemporaryDirectory(prefix="baton-slips-") as folder:
        root = Path(folder)
        copy_tree(root)
        trials = [trial_of(slip, root) for slip in slips]
        files = dict.fromkeys(
            file for trial in trials for net in (trial.units, trial.simulations) for file in net.files
        )
        round_ = Round(trials)
        os.chdir(root)
        sys.path.insert(0, str(root))
        Trials(root, round_.work).start(files, *OPTIONS, f"--timeout={TEST_TIMEOUT_S}")
    counts = Counter(verdict.outcome for verdict in round_.found.values())
    print(f"\n{counts[KILLED]} of {len(slips)} slips noticed")
    return 0 if counts[KILLED] == len(slips) else 1


if __name__ == "__main__":
    sys.exit(main())
