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
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from graft import graft
from run import TIMED_OUT, is_oracle

TEST_TIMEOUT_S = 45
HANG_GUARD_S = 20  # of one wait in a test: a mutant that hangs fails there, by an assertion, before its time is up
MUTANT_TIMEOUT_S = 600
MEMORY_BYTES = 10 << 30  # a loop without an end fills memory first
MAX_CRASHES = 6  # tests that may crash before we give up waiting for an oracle's word
FIRST_CLUSTER_SEED = 500_000
KILLED, ALIVE, TIMEOUT, BROKEN = "killed", "ALIVE", "TIMEOUT", "broken"


@dataclass(frozen=True)
class Verdict:
    """`by`: the test that noticed."""

    outcome: str
    by: str = ""
    why: str = ""


@dataclass(frozen=True)
class Net:
    """Tests that are asked, in this order, and how many seeds of the cluster simulation."""

    files: tuple[str, ...]
    cluster_seeds: int = 0


class Trials:
    """A pytest plugin: instead of running the collected tests, runs `work` with itself as argument."""

    def __init__(self, root: Path, work: Callable[[Trials], None]) -> None:
        self._root = root
        self._work = work
        self._items: dict[str, list[pytest.Item]] = {}
        self._failures: list[Verdict] = []

    def start(self, files: Iterable[str], *options: str) -> None:
        """Returns after `work` has."""
        os.environ["BATON_TEST_HANG_GUARD_S"] = str(HANG_GUARD_S)
        times = (f"--timeout={TEST_TIMEOUT_S}", "--timeout-method=signal")
        quiet = ("-q", "-s", "--no-header", "--no-summary", "-p", "no:cacheprovider")
        status = pytest.main([*quiet, *times, *options, *files], plugins=[self])
        if status:
            raise RuntimeError(f"pytest ended with {status}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            self._items.setdefault(item.path.relative_to(self._root).as_posix(), []).append(item)
        self._work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._failures.append(_verdict(report.nodeid, crash.message if crash else str(report.longrepr)))

    def try_code(self, net: Net, module: str = "", text: str = "") -> Verdict:
        """With the module's source replaced by `text`, here and on disk; without one: the code as it is."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reader)
                os.write(writer, json.dumps(asdict(self._as_child(net, module, text))).encode())
                os._exit(0)
            finally:  # whatever happens: never back into the parent's code
                traceback.print_exc()
                os._exit(3)
        os.close(writer)
        in_time = bool(select.select([reader], [], [], MUTANT_TIMEOUT_S)[0])
        said = os.read(reader, 65536) if in_time else b""
        os.close(reader)
        if not said:
            _kill(child)
        os.waitpid(child, 0)
        return Verdict(**json.loads(said)) if said else Verdict(TIMEOUT if not in_time else BROKEN, why="the process")

    def _as_child(self, net: Net, module: str, text: str) -> Verdict:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        if module:
            try:
                graft(importlib.import_module(module), text)
            except Exception as error:
                return Verdict(BROKEN, why=f"{type(error).__name__}: {error}")
        self._run([item for file in net.files for item in self._items[file]])
        verdict = self._judge()
        return _try_cluster(net.cluster_seeds) if verdict.outcome == ALIVE and net.cluster_seeds else verdict

    def _run(self, items: list[pytest.Item]) -> None:
        """Until an oracle spoke, or so much broke that none will."""
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if len(self._failures) > MAX_CRASHES or any(one.outcome == KILLED for one in self._failures):
                return

    def _judge(self) -> Verdict:
        for outcome in (KILLED, TIMEOUT, BROKEN):
            for one in self._failures:
                if one.outcome == outcome:
                    return one
        return Verdict(ALIVE)


def _verdict(test: str, message: str) -> Verdict:
    late = TIMED_OUT in message[:60]
    outcome = KILLED if is_oracle(message) else TIMEOUT if late else BROKEN
    return Verdict(outcome, test, " ".join(message.split())[:160])


def _try_cluster(num_seeds: int) -> Verdict:
    from tests.support.sim.cluster import run_seed  # loaded by the tests that were collected

    for seed in range(FIRST_CLUSTER_SEED, FIRST_CLUSTER_SEED + num_seeds):
        failure = run_seed(seed).failure
        if failure:
            return _verdict(f"tests.support.sim.run --replay {seed}", failure)
    return Verdict(ALIVE)


def _kill(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)  # it had no time to begin a group of its own
