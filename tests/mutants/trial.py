"""Tries mutants: in a fork of a pytest session that has collected everything, so that only the tests themselves cost
time, and says who noticed, by an assertion or only by breaking. Knows nothing of how mutants are made.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from catalogue import module_of
from graft import graft
from run import TIMED_OUT, is_oracle, replaced

TEST_TIMEOUT_S = 45
HANG_GUARD_S = 20  # of one wait in a test: a mutant that hangs fails there, by an assertion, before its time is up
MUTANT_TIMEOUT_S = 600
MEMORY_BYTES = 10 << 30  # a loop without an end fills memory first
MAX_CRASHES = 6  # tests that may crash before we give up waiting for an oracle's word
KILLED, ALIVE, TIMEOUT, BROKEN = "killed", "ALIVE", "TIMEOUT", "broken"


@dataclass(frozen=True)
class Verdict:
    """`by`: the test that noticed."""

    outcome: str
    by: str = ""
    why: str = ""


class Trials:
    """A pytest plugin: instead of running the collected tests, runs `work` with itself as argument."""

    def __init__(self, root: Path, work: Callable[[Trials], None]) -> None:
        self._root = root
        self._work = work
        self._items: dict[str, pytest.Item] = {}
        self._failures: list[Verdict] = []
        self._passing: dict[str, bool] = {}  # cases that were tried on the code as it is

    def start(self, files: Iterable[str], *options: str, plugins: Sequence[object] = ()) -> None:
        """Returns after `work` has."""
        os.environ["BATON_TEST_HANG_GUARD_S"] = str(HANG_GUARD_S)
        times = (f"--timeout={TEST_TIMEOUT_S}", "--timeout-method=signal")
        quiet = ("-q", "-s", "--no-header", "--no-summary", "-p", "no:cacheprovider")
        status = pytest.main([*quiet, *times, *options, *files], plugins=[self, *plugins])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(f"pytest ended with {status}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        self._work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._failures.append(_verdict(report.nodeid, crash.message if crash else str(report.longrepr)))

    def items_of(self, file: str) -> list[pytest.Item]:
        return [item for name, item in self._items.items() if name.partition("::")[0] == file]

    def try_file(self, cases: Sequence[str], file: str, text: str) -> Verdict:
        """With a file's text replaced, in the loaded module and on disk, which tests that start processes read. A case
        that fails without the change, too, tells nothing, and is not asked again."""
        while True:
            asked = [case for case in cases if self._passing.get(case, True)]
            with replaced({self._root / file: text}):
                verdict = self._try(asked, module_of(file), text)
            if not verdict.by or self._passes(verdict.by):
                return verdict

    def _passes(self, case: str) -> bool:
        if case not in self._passing:
            self._passing[case] = self._try([case]).outcome == ALIVE
        return self._passing[case]

    def _try(self, cases: Sequence[str], module: str = "", text: str = "") -> Verdict:
        try:
            said = apart(lambda: asdict(self._as_child(cases, module, text)), MUTANT_TIMEOUT_S)
        except TimeoutError:
            return Verdict(TIMEOUT, why="the process")
        return Verdict(**said) if said else Verdict(BROKEN, why="the process")

    def _as_child(self, cases: Sequence[str], module: str, text: str) -> Verdict:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        if module:
            try:
                graft(importlib.import_module(module), text)
            except Exception as error:
                return Verdict(BROKEN, why=f"{type(error).__name__}: {error}")
        self._run([self._items[case] for case in cases if case in self._items])
        return self._judge()

    def _run(self, items: list[pytest.Item]) -> None:
        """Until an oracle spoke, or so much broke that none will."""
        for item, following in zip(items, [*items[1:], None], strict=False):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if len(self._failures) > MAX_CRASHES or any(one.outcome == KILLED for one in self._failures):
                return

    def _judge(self) -> Verdict:
        for outcome in (KILLED, TIMEOUT, BROKEN):
            for one in self._failures:
                if one.outcome == outcome:
                    return one
        return Verdict(ALIVE)


def apart(work: Callable[[], Any], timeout_s: float) -> Any:
    """Return what `work` returns in a fork, None if the fork ends without a word. Raises TimeoutError."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.close(reader)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            with open(writer, "w") as pipe:
                pipe.write(json.dumps(work()) + "\n")
            os._exit(0)
        finally:  # whatever happens: never back into the parent's code
            traceback.print_exc()
            os._exit(3)
    os.close(writer)
    try:
        said = _read_line(reader, time.monotonic() + timeout_s)
    finally:
        os.close(reader)
        _kill(child)
        os.waitpid(child, 0)
    return json.loads(said) if said else None


def _read_line(reader: int, until: float) -> bytes:
    """Not to the end: what a test has left behind may hold the pipe open."""
    said = b""
    while not said.endswith(b"\n"):
        if not select.select([reader], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(reader, 1 << 20)
        if not part:
            return b""
        said += part
    return said


def _verdict(test: str, message: str) -> Verdict:
    late = TIMED_OUT in message[:60]
    outcome = KILLED if is_oracle(message) else TIMEOUT if late else BROKEN
    return Verdict(outcome, test, " ".join(message.split())[:160])


def _kill(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)  # it had no time to begin a group of its own
