"""Mutants drawn by seed from the code that must not break silently: relay, pools, prefix cache, admission, hand-off,
routing, wire.

    python tests/mutants/sampled.py                       150 of them, about an hour; goes on where it was stopped
    python tests/mutants/sampled.py --only 2 --seed 7     two of each area, other ones
    python tests/mutants/sampled.py --again               once more those that were alive: after new tests

Cosmic Ray's operators make them (see draw.py). First the area's quick tests try, then, on those left, slower ones and
all simulations. Killed is what an assertion or an oracle noticed. What breaks in another way (it can't be imported, or
no test got further than a TypeError) tells nothing of the tests: another one is drawn. A time-out counts as alive.
SURVIVORS.md argues those that stay alive.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from catalogue import ROOT, find_scope, module_of
from run import copy_tree, replaced
from trial import ALIVE, BROKEN, KILLED, TIMEOUT, Net, Trials, Verdict

COSMIC_RAY = "cosmic-ray==8.7.0"
SEED = 20260
RATE = 0.85
MAX_DRAWN = 150  # of an area: more than are wanted, for some will be broken
NUM_CLUSTER_SEEDS = 20
OPTIONS = ("--seeds=20",)  # of pytest; seeds of the equivalence test
UNIT, ALL = "unit tests", "all"  # nets
SIMULATIONS = (
    *("scripts_rows", "scripts_inputs", "scripts_lengths", "scripts_handoff", "scripts_liveness"),
    *("nodes_random", "equivalence", "explorer", "cluster_seeds"),
)
WHOLE_CLUSTER = ("cluster_seeds", "cluster_deaths")


@dataclass(frozen=True)
class Area:
    """Some files, and who knows them: unit tests of a few seconds, slower ones, and simulations."""

    wanted: int
    files: tuple[str, ...]
    quick: tuple[str, ...]
    slow: tuple[str, ...]
    simulations: tuple[str, ...] = SIMULATIONS

    def quick_net(self, file: str) -> Net:
        """Tests that are named like the file go first."""
        return Net(tuple(sorted(tests_of(self.quick), key=lambda path: Path(file).stem not in path)))

    def rest_net(self) -> Net:
        return Net((*tests_of(self.slow), *tests_of(self.simulations, "simulation")), NUM_CLUSTER_SEEDS)


def tests_of(names: tuple[str, ...], tier: str = "unit") -> tuple[str, ...]:
    return tuple(f"tests/{tier}/test_{name}.py" for name in names)


def _files(room: str, *names: str) -> tuple[str, ...]:
    """Return the files of some modules of a room, from the root."""
    paths = (find_scope(f"{room}.{name}", ROOT).path for name in names)
    return tuple(path.relative_to(ROOT).as_posix() for path in paths)


AREAS = {
    "relay": Area(
        wanted=20,
        files=_files("shared.engine", "future_map", "worker", "forward_batch", "lease", "engine"),
        quick=(
            *("engine_plan", "engine_future_map", "engine_armed", "engine_leaks", "engine_recover", "engine_times"),
            *("engine_masks", "sched_prebuilt"),
        ),
        slow=("hashlm_draft", "hazards", "spec_metrics", "sample_stream"),
    ),
    "pools": Area(
        wanted=20,
        files=_files("shared.kv", "pages", "rows", "manager", "pool"),
        quick=("kv_pages", "kv_rows", "kv_manager", "kv_pool"),
        slow=("kv_stateful", "transfer_conformance"),
    ),
    "prefix cache": Area(
        wanted=15,
        files=_files("shared.kv", "prefix_cache"),
        quick=("kv_prefix_cache", "kv_manager"),
        slow=("kv_stateful", "sched_prebuilt"),
    ),
    "admission": Area(
        wanted=25,
        files=_files(
            "shared.sched",
            *("scheduler", "queues", "capacity", "results", "ungranted", "page_budget", "chunking"),
            *("lengths", "batch", "freeze", "output", "prebuilt", "suspects"),
        ),
        quick=(
            "sched_scheduler",
            "sched_chunking",
            "sched_batch",
            "sched_prebuilt",
            "sched_failed_step",
            "sched_history",
            "sched_books",
            "sched_suspects",
            "sched_long_queue",
            "sched_page_budget",
            "sched_scores",
            "node_times",
            "engine_masks",
        ),
        slow=("engine_recover", "sched_stateful"),
    ),
    "hand-off": Area(
        wanted=25,
        files=(
            *_files("shared.node", "node", "convert", "routers", "tombstones"),
            *_files("shared.engine", "transfer_jobs"),
            *_files("prefill_node", "bootstrap", "inflight", "reach", "side"),
            *_files("decode_node", "prealloc", "transfer", "prebuilt", "page_ranges", "side"),
            *_files("shared.transfer", "interface", "frames", "shm"),
        ),
        quick=(
            *("node_books", "node_queues", "node_returns", "node_faults", "node_deaths", "node_transfer_order"),
            *(
                "node_times",
                "node_drain",
                "node_waits",
                "node_reach",
                "node_siblings",
                "node_unpinned",
                "node_begun",
                "node_rounds",
                "node_strangers",
                "node_layers",
            ),
            "transfer_conformance",
        ),
        slow=("node_pair",),
    ),
    "routing": Area(
        wanted=25,
        files=_files(
            "router",
            *("dispatch", "attempts", "progress", "registry", "placement", "journal"),
            *("pairs", "moves", "suspects", "kinds", "breaker", "abort_log"),
        ),
        quick=(
            *("router_dispatch", "router_resume", "router_registry", "router_journal", "router_pairs", "router_moves"),
            *("router_suspects", "router_kinds", "router_absence", "router_scores", "two_routers"),
        ),
        slow=(),
        simulations=WHOLE_CLUSTER,
    ),
    "wire": Area(
        wanted=20,
        files=_files(
            "shared.wire",
            *("codec", "messages", "errors", "fitting", "peers", "peer_gate"),
            *("connections", "dialling", "link", "link_options", "sockets", "wakeup"),
        ),
        quick=(
            "wire_codec",
            "wire_connections",
            "wire_dialling",
            "wire_errors",
            "wire_fitting",
            "wire_gate",
            "wire_limits",
            "wire_link_ends",
            "wire_link",
            "wire_messages",
            "wire_silence",
            "wire_sockets",
        ),
        slow=("wire_keys",),
        simulations=WHOLE_CLUSTER,
    ),
}


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

    def __init__(self, root: Path, drawn: dict[Place, str], results: Results) -> None:
        self._root = root
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
        waiting = {area: [p for p in self._drawn if p.area == area and p not in results.of] for area in AREAS}
        while any(len(results.counted(area)) < wanted[area] and waiting[area] for area in AREAS):
            for name in AREAS:
                if len(results.counted(name)) < wanted[name] and waiting[name]:
                    self.try_units(trials, waiting[name].pop(0), UNIT)

    def try_units(self, trials: Trials, place: Place, net: str) -> None:
        self._results.add(self._try(trials, place, net, AREAS[place.area].quick_net(place.file)))

    def simulation_round(self, trials: Trials) -> None:
        """Those that the quick unit tests left. A time-out stays one unless somebody says more."""
        self.check(trials, Net(all_tests()[1], cluster_seeds=1))
        for one in [one for one in self._results.of.values() if one.is_open and one.net == UNIT]:
            result = self._try(trials, one.place, ALL, AREAS[one.place.area].rest_net())
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


def summarize(results: Results) -> float:
    print(f"\n{'area':<14}{'mutants':>8}{'killed':>8}{'alive':>8}{'timeout':>8}{'rate':>8}{'broken, redrawn':>18}")
    for area in (*AREAS, ""):
        count = Counter(one.verdict.outcome for one in results.of.values() if area in ("", one.place.area))
        num = len(results.counted(area))
        rate = count[KILLED] / num if num else 1.0
        row = f"{area or 'all':<14}{num:>8}{count[KILLED]:>8}{count[ALIVE]:>8}{count[TIMEOUT]:>8}{rate:>8.1%}"
        print(f"{row}{count[BROKEN]:>18}")
    return rate


def all_tests() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(quick, the rest)"""
    quick = {test for area in AREAS.values() for test in tests_of(area.quick)}
    slow = {test for area in AREAS.values() for test in tests_of(area.slow)} - quick
    simulations = {test for area in AREAS.values() for test in tests_of(area.simulations, "simulation")}
    return tuple(sorted(quick)), (*sorted(slow), *sorted(simulations))


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", type=int, help="so many of each area")
    parser.add_argument("--again", action="store_true", help="only those that were alive, with the quick tests")
    parser.add_argument("--results", type=Path, help="JSON lines; a run goes on with what is there")
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "cosmic-ray", help="of Cosmic Ray")
    return parser.parse_args(argv)


def main() -> int:
    options = options_of()
    path = options.results or ROOT / "build" / f"mutants-{options.seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = Results(path)
    with tempfile.TemporaryDirectory(prefix="baton-sampled-") as folder:
        root = Path(folder)
        copy_tree(root)
        drawn = draw(mutation_python(options.environment), root, options.seed)
        results.keep(drawn)
        print(f"{len(drawn)} places, {len(results.of)} tried before; first the code as it is", flush=True)
        sampling = Sampling(root, drawn, results)

        def work(trials: Trials) -> None:
            sampling.check(trials, Net(all_tests()[0]))
            if options.again:
                sampling.again(trials)
            else:
                sampling.unit_round(trials, {name: options.only or area.wanted for name, area in AREAS.items()})
                summarize(results)
                sampling.simulation_round(trials)

        os.chdir(root)
        sys.path.insert(0, str(root))
        Trials(root, work).start([*all_tests()[0], *all_tests()[1]], *OPTIONS)
    return 0 if summarize(results) >= RATE else 1


if __name__ == "__main__":
    sys.exit(main())
