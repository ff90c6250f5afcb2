"""Mutants drawn by seed from the code that must not break silently: relay, pools, prefix cache, admission, hand-off,
routing, wire.

    python tests/mutants/sampled.py                       150 of them, about an hour; goes on where it was stopped
    python tests/mutants/sampled.py --only 2 --seed 7     two of each area, other ones
    python tests/mutants/sampled.py --again               once more those that were alive: after new tests
    python tests/mutants/sampled.py --arguments           300 wrong arguments instead (see arguments.py), 90 % needed

Cosmic Ray's operators make them (see draw.py). First the area's quick tests try, then, on those left, slower ones and
all simulations. Killed is what an assertion or an oracle noticed. What breaks in another way (it can't be imported, or
no test got further than a TypeError) tells nothing of the tests: another one is drawn. A time-out counts as alive.
SURVIVORS.md argues those that stay alive.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import arguments
from areas import AREAS, ARGUMENT_AREAS, Area, all_tests
from catalogue import ROOT, module_of
from run import copy_tree, replaced
from trial import ALIVE, BROKEN, KILLED, TIMEOUT, Net, Trials, Verdict

COSMIC_RAY = "cosmic-ray==8.7.0"
SEED = 20260
MAX_DRAWN = 150  # of an area: more than are wanted, for some will be broken
OPTIONS = ("--seeds=20",)  # of pytest; seeds of the equivalence test
UNIT, ALL = "unit tests", "all"  # nets


@dataclass(frozen=True)
class Place:
    """What was changed where. See draw.py."""

    area: str
    file: str
    operator: str
    line: int
    column: int
    before: str
    after: str


@dataclass(frozen=True)
class Result:
    """One line of the results; of two for one place the later counts. `net`: who has tried. `by`: who noticed."""

    place: Place
    net: str
    verdict: Verdict
    seconds: float

    @property
    def is_open(self) -> bool:
        return self.verdict.outcome in (ALIVE, TIMEOUT)


class Results:
    """The file of results: what is there stays, what is new is appended at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.of: dict[Place, Result] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            fields = json.loads(line)
            place, verdict = Place(**fields.pop("place")), Verdict(**fields.pop("verdict"))
            self.of[place] = Result(place, verdict=verdict, **fields)

    def add(self, result: Result) -> None:
        self.of[result.place] = result
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        tell(result)

    def keep(self, places: Collection[Place]) -> None:
        """Forget what was found in code that has changed since."""
        self.of = {place: result for place, result in self.of.items() if place in places}

    def counted(self, area: str = "") -> list[Result]:
        ones = [one for one in self.of.values() if area in ("", one.place.area)]
        return [one for one in ones if one.verdict.outcome != BROKEN]


def tell(result: Result) -> None:
    place, verdict = result.place, result.verdict
    old, new = (text.strip().partition("\n")[0] for text in (place.before, place.after))
    print(f"{verdict.outcome:<8}{result.seconds:4.0f} s  {place.file}:{place.line}  {old}  ->  {new}", flush=True)
    if verdict.why:
        print(f"{'':8}{verdict.by.rpartition('/')[2]}: {verdict.why[:110]}", flush=True)


def mutation_python(folder: Path) -> Path:
    """An environment of its own: Cosmic Ray brings two dozen packages that nothing else here needs."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder} with {COSMIC_RAY}", flush=True)
        venv.EnvBuilder(with_pip=True).create(folder)
    if subprocess.run([python, "-c", "import cosmic_ray"], capture_output=True).returncode:
        subprocess.run([python, "-m", "pip", "install", "-q", COSMIC_RAY], check=True)
    return python


def draw_arguments(root: Path, seed: int) -> dict[Place, str]:
    """As `draw`, of wrong arguments."""
    folders = ("router", "shared", "prefill_node", "decode_node")
    everywhere = [path.read_text() for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    signatures, drawn = arguments.read_signatures(everywhere), {}
    for area, known in ARGUMENT_AREAS.items():
        sources = {file: (root / file).read_text() for file in known.files}
        changes = arguments.draw(sources, signatures, random.Random(f"{seed} {area}"))
        for file, change in itertools.islice(changes, MAX_DRAWN):
            (node, after), *_ = change.edits
            place = Place(area, file, change.kind, node.lineno, node.col_offset, ast.unparse(node), after)
            drawn[place] = arguments.applied(sources[file], change)
    return drawn


def draw(python: Path, root: Path, seed: int) -> dict[Place, str]:
    """The whole text of the mutated file for each place, in the order in which they are tried."""
    wanted = json.dumps({name: area.files for name, area in AREAS.items()})
    command = [str(python), str(Path(__file__).with_name("draw.py")), str(root), str(seed), str(MAX_DRAWN)]
    done = subprocess.run(command, input=wanted, stdout=subprocess.PIPE, text=True, check=True)
    drawn = {}
    for line in done.stdout.splitlines():
        fields = json.loads(line)
        text = fields.pop("text")
        drawn[Place(**fields)] = text
    return drawn


class Sampling:
    """The rounds over the mutants, inside of a pytest session on the copied tree."""

    def __init__(self, root: Path, areas: Mapping[str, Area], drawn: dict[Place, str], results: Results) -> None:
        self._root = root
        self._areas = areas
        self._drawn = drawn
        self._results = results

    def check(self, trials: Trials, net: Net) -> None:
        """The code as it is passes: else everything would be killed."""
        verdict = trials.try_code(net)
        if verdict.outcome != ALIVE:
            raise RuntimeError(f"this fails without any mutation: {verdict}")

    def unit_round(self, trials: Trials, wanted: dict[str, int]) -> None:
        """Round robin over the areas, so that a run cut short has some of each."""
        results = self._results
        waiting = {area: [p for p in self._drawn if p.area == area and p not in results.of] for area in self._areas}
        while any(len(results.counted(area)) < wanted[area] and waiting[area] for area in self._areas):
            for name in self._areas:
                if len(results.counted(name)) < wanted[name] and waiting[name]:
                    self.try_units(trials, waiting[name].pop(0), UNIT)

    def try_units(self, trials: Trials, place: Place, net: str) -> None:
        self._results.add(self._try(trials, place, net, self._areas[place.area].quick_net(place.file)))

    def simulation_round(self, trials: Trials) -> None:
        """Those that the quick unit tests left. A time-out stays one unless somebody says more."""
        self.check(trials, Net(all_tests(self._areas)[1], cluster_seeds=1))
        for one in [one for one in self._results.of.values() if one.is_open and one.net == UNIT]:
            result = self._try(trials, one.place, ALL, self._areas[one.place.area].rest_net())
            late = result.verdict.outcome == ALIVE and one.verdict.outcome == TIMEOUT
            self._results.add(replace(result, verdict=one.verdict) if late else result)

    def again(self, trials: Trials) -> None:
        """New unit tests on old survivors; who has passed the simulations need not do so again."""
        for one in [one for one in self._results.of.values() if one.is_open]:
            self.try_units(trials, one.place, one.net)

    def _try(self, trials: Trials, place: Place, name: str, net: Net) -> Result:
        """The change is in the loaded module and in the file, which tests that start processes read."""
        start, text = time.monotonic(), self._drawn[place]
        with replaced({self._root / place.file: text}):
            verdict = trials.try_code(net, module_of(place.file), text)
        return Result(place, name, verdict, round(time.monotonic() - start, 1))


def summarize(results: Results, areas: Mapping[str, Area]) -> float:
    print(f"\n{'area':<14}{'mutants':>8}{'killed':>8}{'alive':>8}{'timeout':>8}{'rate':>8}{'broken, redrawn':>18}")
    for area in (*areas, ""):
        count = Counter(one.verdict.outcome for one in results.of.values() if area in ("", one.place.area))
        num = len(results.counted(area))
        rate = count[KILLED] / num if num else 1.0
        row = f"{area or 'all':<14}{num:>8}{count[KILLED]:>8}{count[ALIVE]:>8}{count[TIMEOUT]:>8}{rate:>8.1%}"
        print(f"{row}{count[BROKEN]:>18}")
    return rate


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", type=int, help="so many of each area")
    parser.add_argument("--arguments", action="store_true", help="wrong arguments, over more files")
    parser.add_argument("--again", action="store_true", help="only those that were alive, with the quick tests")
    parser.add_argument("--results", type=Path, help="JSON lines; a run goes on with what is there")
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "cosmic-ray", help="of Cosmic Ray")
    return parser.parse_args(argv)


def main() -> int:
    options = options_of()
    kind, areas, rate = ("arguments", ARGUMENT_AREAS, 0.9) if options.arguments else ("mutants", AREAS, 0.85)
    path = options.results or ROOT / "build" / f"{kind}-{options.seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = Results(path)
    with tempfile.TemporaryDirectory(prefix="baton-sampled-") as folder:
        root = Path(folder)
        copy_tree(root)
        if options.arguments:
            drawn = draw_arguments(root, options.seed)
        else:
            drawn = draw(mutation_python(options.environment), root, options.seed)
        results.keep(drawn)
        print(f"{len(drawn)} places, {len(results.of)} tried before; first the code as it is", flush=True)
        sampling = Sampling(root, areas, drawn, results)

        def work(trials: Trials) -> None:
            sampling.check(trials, Net(all_tests(areas)[0]))
            if options.again:
                sampling.again(trials)
            else:
                sampling.unit_round(trials, {name: options.only or area.wanted for name, area in areas.items()})
                summarize(results, areas)
                sampling.simulation_round(trials)

        os.chdir(root)
        sys.path.insert(0, str(root))
        Trials(root, work).start([*all_tests(areas)[0], *all_tests(areas)[1]], *OPTIONS)
    return 0 if summarize(results, areas) >= rate else 1


if __name__ == "__main__":
    sys.exit(main())
