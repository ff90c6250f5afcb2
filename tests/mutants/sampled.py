"""Mutants drawn by seed from the code that must not break silently: relay, pools, prefix cache, admission, hand-off,
routing, wire.

    python tests/mutants/sampled.py                       150 of them; goes on where it was stopped
    python tests/mutants/sampled.py --only 2 --seed 7     two of each area, other ones
    python tests/mutants/sampled.py --again               once more those that were alive: after new tests
    python tests/mutants/sampled.py --arguments           300 wrong arguments instead (see arguments.py), 90 % needed

Cosmic Ray's operators make them (see draw.py). Only cases that run a changed statement are asked (see traced.py): those
of the first half minute, then, on what is left, those of two minutes in all. Killed is what an assertion or an oracle
noticed. What breaks in another way (it can't be imported, or no test got further than a TypeError) tells nothing of the
tests: another one is drawn. A time-out counts as alive. SURVIVORS.md argues those that stay alive.
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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import arguments
from areas import AREAS, ARGUMENT_AREAS, Area
from catalogue import ROOT
from run import copy_tree
from traced import OPTIONS, PARTS, Case, Trace, ensure, tests_that_know
from trial import ALIVE, BROKEN, KILLED, TIMEOUT, Trials, Verdict

COSMIC_RAY = "cosmic-ray==8.7.0"
SEED = 20260
MAX_DRAWN = 150  # of an area: more than are wanted, for some will be broken
QUICK_S, ALL_S = 30.0, 120.0  # seconds of cases, as they were traced
QUICK, ALL = "quick", "all"  # nets


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

    def __init__(self, trace: Trace, areas: Mapping[str, Area], drawn: dict[Place, str], results: Results) -> None:
        self._trace = trace
        self._areas = areas
        self._drawn = drawn
        self._results = results

    def quick_round(self, trials: Trials, wanted: dict[str, int]) -> None:
        """Round robin over the areas, so that a run cut short has some of each."""
        results = self._results
        waiting = {area: [p for p in self._drawn if p.area == area and p not in results.of] for area in self._areas}
        while any(len(results.counted(area)) < wanted[area] and waiting[area] for area in self._areas):
            for name in self._areas:
                if len(results.counted(name)) < wanted[name] and waiting[name]:
                    place = waiting[name].pop(0)
                    results.add(self._try(trials, place, QUICK, 0.0, QUICK_S))

    def slow_round(self, trials: Trials) -> None:
        """The other cases of those that the quick ones left. A time-out stays one unless somebody says more."""
        for one in [one for one in self._results.of.values() if one.is_open and one.net == QUICK]:
            result = self._try(trials, one.place, ALL, QUICK_S, ALL_S)
            late = result.verdict.outcome == ALIVE and one.verdict.outcome == TIMEOUT
            self._results.add(replace(result, verdict=one.verdict) if late else result)

    def again(self, trials: Trials) -> None:
        """New tests on old survivors."""
        for one in [one for one in self._results.of.values() if one.is_open]:
            self._results.add(self._try(trials, one.place, one.net, 0.0, QUICK_S if one.net == QUICK else ALL_S))

    def _try(self, trials: Trials, place: Place, net: str, first_s: float, end_s: float) -> Result:
        start, text = time.monotonic(), self._drawn[place]
        cases = self._trace.cases_that_run(place.file, (ROOT / place.file).read_text(), text)
        chosen = [case.name for case, spent_s in with_sums(cases) if first_s <= spent_s < end_s]
        verdict = trials.try_file(chosen, place.file, text)
        return Result(place, net, verdict, round(time.monotonic() - start, 1))


def with_sums(cases: Sequence[Case]) -> list[tuple[Case, float]]:
    """Each case with the seconds of those before it."""
    sums = itertools.accumulate((case.seconds for case in cases), initial=0.0)
    return list(zip(cases, sums, strict=False))


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
    parser.add_argument("--again", action="store_true", help="only those that were alive")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="first: the tests of `make test`")
    parser.add_argument("--results", type=Path, help="JSON lines; a run goes on with what is there")
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "cosmic-ray", help="of Cosmic Ray")
    return parser.parse_args(argv)


def main() -> int:
    options = options_of()
    kind, areas, rate = ("arguments", ARGUMENT_AREAS, 0.9) if options.arguments else ("mutants", AREAS, 0.85)
    path = options.results or ROOT / "build" / f"{kind}-{options.seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = Results(path)
    tests, parts = tests_that_know(file for area in areas.values() for file in area.files), options.parts
    ensure(tests, parts)
    trace = Trace(tests, parts)
    with tempfile.TemporaryDirectory(prefix="baton-sampled-") as folder:
        root = Path(folder)
        copy_tree(root)
        if options.arguments:
            drawn = draw_arguments(root, options.seed)
        else:
            drawn = draw(mutation_python(options.environment), root, options.seed)
        results.keep(drawn)
        print(f"{len(drawn)} places, {len(results.of)} tried before", flush=True)
        sampling = Sampling(trace, areas, drawn, results)

        def work(trials: Trials) -> None:
            if options.again:
                sampling.again(trials)
            else:
                sampling.quick_round(trials, {name: options.only or area.wanted for name, area in areas.items()})
                summarize(results, areas)
                sampling.slow_round(trials)

        os.chdir(root)
        sys.path.insert(0, str(root))
        Trials(root, work).start(trace.files(), *OPTIONS)
    return 0 if summarize(results, areas) >= rate else 1


if __name__ == "__main__":
    sys.exit(main())
