"""Trace once which test cases run which statements, so that a mutant is tried only against cases that run it.

    python tests/mutants/traced.py [--part first | --part deep] [FILE ...]      all unit tests and simulations

build/trace.jsonl keeps what was traced, a line a test file. A test file is traced again when it, or a product file that
it ran, has changed. Changes of tests/support alone are not seen: remove the file after large ones. What processes run
that a test starts anew, is not seen either.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import hashlib
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from catalogue import ROOT
from instrument import Instrument, numbers_of
from trial import Trials, apart

TRACE = ROOT / "build" / "trace.jsonl"
PARTS = ("first", "deep")  # those of `make test`, and the others
OPTIONS = ("--seeds=20",)  # of pytest; seeds of the equivalence test
FILE_TIMEOUT_S = 1800
IMPORT = re.compile(r"^\s*(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", re.MULTILINE)
Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`order`: who is asked first, namely unit tests of `make test`, simulations, the others."""

    name: str
    seconds: float
    order: tuple[bool, bool]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


class Trace:
    """What is known of some test files."""

    def __init__(self, tests: Collection[str], parts: Collection[str], path: Path = TRACE) -> None:
        self._records = [one for key, one in read(path).items() if key[0] in tests and key[1] in parts]

    def files(self) -> list[str]:
        return sorted({record["file"] for record in self._records if record["cases"]})

    def cases_that_run(self, file: str, old: str, new: str) -> list[Case]:
        """Cases that run what differs between two texts of a file. What runs at import counts for all cases that run
        the file, or else the folder. Short test files first, and in a file the shortest cases."""
        mask = sum(1 << number for number in numbers_of(old, changed_lines(old, new)))
        found = self._running((file,), mask) or self._running((file,), -1) or self._running(self._folder(file), -1)
        total: dict[str, float] = defaultdict(float)
        for case in found:
            total[case.file] += case.seconds
        return sorted(found, key=lambda case: (case.order, total[case.file], case.file, case.seconds))

    def _folder(self, file: str) -> tuple[str, ...]:
        folder = str(Path(file).parent)
        every = {one for record in self._records for one in record["digests"] if str(Path(one).parent) == folder}
        return tuple(every)

    def _running(self, files: Sequence[str], mask: int) -> list[Case]:
        return [
            Case(name, case["seconds"], (record["part"] == "deep", "tests/unit/" not in name))
            for record in self._records
            for name, case in record["cases"].items()
            if any(int(case["ran"].get(file, "0"), 16) & mask for file in files)
        ]


def changed_lines(old: str, new: str) -> list[int]:
    """Lines of the old text, from 1."""
    differences = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False).get_opcodes()
    parts = [(first, max(end, first + 1)) for tag, first, end, _, _ in differences if tag != "equal"]
    return [line + 1 for first, end in parts for line in range(first, end)]


def read(path: Path) -> dict[tuple[str, str], Record]:
    """(test file, part) -> the last record that still holds."""
    records = (json.loads(line) for line in (path.read_text().splitlines() if path.exists() else ()))
    return {(one["file"], one["part"]): one for one in records if is_fresh(one)}


def is_fresh(record: Record) -> bool:
    return all(digest(file) == known for file, known in record["digests"].items())


@functools.cache
def digest(file: str) -> str:
    path = ROOT / file
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else ""


def tests_that_know(files: Iterable[str]) -> list[str]:
    """Unit tests and simulations that import, or whose helpers import, a module of the folders of these files."""
    rooms = tuple({Path(file).parent.as_posix().replace("/", ".") for file in files})
    return [
        test
        for test in every_test()
        if any(name == room or name.startswith(f"{room}.") for name in names_known_to(test) for room in rooms)
    ]


def every_test() -> list[str]:
    paths = (path for tier in ("unit", "simulation") for path in sorted((ROOT / "tests" / tier).rglob("test_*.py")))
    return [path.relative_to(ROOT).as_posix() for path in paths]


def names_known_to(file: str) -> set[str]:
    """Names that a file imports, with those that its helpers in `tests` import."""
    found, waiting = set(), [file]
    seen = {file}
    while waiting:
        names = names_imported_by(waiting.pop())
        found |= names
        helpers = {f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")} - seen
        seen |= helpers
        waiting += [helper for helper in helpers if (ROOT / helper).exists()]
    return found


@functools.cache
def names_imported_by(file: str) -> frozenset[str]:
    """`a.b` and `a.b.c` of `from a.b import c`: either may be the module."""
    found = set()
    for module, names, plain in IMPORT.findall((ROOT / file).read_text()):
        found |= {module or plain, *(f"{module}.{name}" for name in re.findall(r"\w+", names))}
    return frozenset(found)


def ensure(tests: Collection[str], parts: Collection[str]) -> None:
    """Trace what is missing or stale, in a process of its own: its code has marks in it."""
    known = read(TRACE)
    for part in parts:
        missing = [test for test in tests if (test, part) not in known]
        if missing:
            subprocess.run([sys.executable, __file__, "--part", part, *missing], check=True)


class Recorder:
    """A pytest plugin that notes what each case runs, and the seconds that it takes."""

    def __init__(self, instrument: Instrument) -> None:
        self._instrument = instrument
        self._shared: dict[str, int] = defaultdict(int)  # fixture -> what its set-up ran
        self._seconds: dict[str, float] = defaultdict(float)
        self._passed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """A wider fixture is set up for the first case, and counts for all that ask for it."""
        if fixturedef.scope == "function":
            return (yield)
        before = self._instrument.take()
        try:
            return (yield)
        finally:
            during = self._instrument.take()
            self._shared[fixturedef.argname] |= during
            self._instrument.put_back(before | during)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        elif report.failed:
            self._passed.discard(report.nodeid)

    def run(self, file: str, part: str, items: Sequence[pytest.Item]) -> Record:
        cases = {}
        for item, following in zip(items, [*items[1:], None], strict=False):
            self._instrument.take()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            ran = self._instrument.take()
            for name in getattr(item, "fixturenames", ()):
                ran |= self._shared[name]
            if item.nodeid in self._passed:
                seconds = round(self._seconds[item.nodeid], 3)
                cases[item.nodeid] = {"seconds": seconds, "ran": self._instrument.by_file(ran)}
        ran_files = {name for case in cases.values() for name in case["ran"]}
        digests = {name: digest(name) for name in sorted({file, *ran_files})}
        return {"file": file, "part": part, "digests": digests, "cases": cases}


def trace(trials: Trials, recorder: Recorder, part: str, tests: Sequence[str]) -> Iterator[Record]:
    """A process for each file: what one leaves behind no other sees."""
    for test in tests:
        start, items = time.monotonic(), trials.items_of(test)
        work = functools.partial(recorder.run, test, part, items)
        record = apart(work, FILE_TIMEOUT_S) if items else recorder.run(test, part, ())
        num_passed = len(record["cases"]) if record else 0
        print(f"{time.monotonic() - start:5.1f} s  {num_passed:>4} of {len(items):>4} cases  {test}", flush=True)
        if record is not None:
            yield record


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=every_test(), metavar="FILE")
    parser.add_argument("--part", choices=PARTS, help="only these (default: both)")
    options = parser.parse_args(argv)
    if options.part is None:
        ensure(options.tests, PARTS)
        return
    instrument = Instrument(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.meta_path.insert(0, instrument)
    recorder = Recorder(instrument)

    def work(trials: Trials) -> None:
        TRACE.parent.mkdir(exist_ok=True)
        with TRACE.open("a") as file:
            for record in trace(trials, recorder, options.part, options.tests):
                file.write(json.dumps(record) + "\n")
                file.flush()

    Trials(ROOT, work).start(options.tests, *OPTIONS, f"--part={options.part}", plugins=[recorder])


if __name__ == "__main__":
    main()
