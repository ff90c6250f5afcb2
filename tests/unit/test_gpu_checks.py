"""The checks for a GPU and their runner, on the virtual GPU: every check with tiny shapes, a run that is cut off, a
check that fails, one that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.gpu import plan, run, wheels
from tests.gpu.book import CUT_OFF, FAILED, FILE, PASSED, SKIPPED, Book, Outcome
from tests.gpu.one import run_check
from tests.gpu.page import PAGE, SUMMARY
from tests.gpu.place import NotHere
from tests.gpu.plan import CHECKS, Check, checks_of
from tests.support.patience import HANG_GUARD_S

ONE_PROCESS = ("another process's memory", "two nodes over cuda_ipc, one killed")  # what a virtual GPU can't have


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_check_runs_on_the_virtual_gpu(check: Check) -> None:
    if check.name in ONE_PROCESS:
        with pytest.raises(NotHere, match="process's own"):
            run_check(check, "virtual")
        return
    figures = run_check(check, "virtual")
    print(figures)
    assert figures
    assert all(isinstance(value, int | float) and value >= 0 for value in figures.values()), figures


def test_a_run_through_the_command_says_what_was_found_and_on_what(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(run, "checks_of", lambda name: [plan.check_named(n) for n in (CHECKS[0].name, ONE_PROCESS[0])])
    assert run.main(["test", "--device", "virtual", "--out", str(tmp_path), "--wheels", str(tmp_path)]) == 0
    told = json.loads((tmp_path / SUMMARY).read_text())
    assert [(row["name"], row["state"]) for row in told["checks"]][0] == (CHECKS[0].name, PASSED)
    assert told["counts"] == {"not run yet": len(CHECKS) - 2, PASSED: 1, SKIPPED: 1}
    (this_run,) = told["runs"]
    assert this_run["machine"]["GPU"] == "virtual" and this_run["machine"]["torch"] and this_run["code"]
    page = (tmp_path / PAGE).read_text()
    assert this_run["machine"]["CPU"] in page and "| copies, products, reads | passed |" in page
    assert "host to device, pinned, GB/s" in page and "process's own" in page
    assert "2 of 2 checks done" in capsys.readouterr().out


def some(*names: str, seconds: float = 60.0) -> list[Check]:
    return [Check(name, "none.none", seconds) for name in names]


def passing(check: Check) -> Outcome:
    return Outcome(check.name, PASSED, 1.0, {"it": 1})


class CutOff(BaseException):
    """As a machine that is taken away: nothing is written any more."""


def test_a_run_that_is_cut_off_goes_on_and_tries_the_check_that_was_running_once_more(tmp_path: Path) -> None:
    started: list[str] = []

    def cut_in_b(check: Check) -> Outcome:
        started.append(check.name)
        if check.name == "b":
            raise CutOff
        return passing(check)

    checks = some("a", "b", "c")
    for expected in (["a", "b"], ["b"], ["c"], []):
        book, started[:] = Book(tmp_path), []
        with contextlib.suppress(CutOff):
            run.run(book, checks, cut_in_b, 1e9, lambda: None)
        assert started == expected
    assert [book.outcome(check.name).state for check in checks] == [PASSED, CUT_OFF, PASSED]
    assert run.conclude(book, checks, tmp_path) == run.EXIT_FAILED


def test_a_line_that_was_cut_off_is_no_result(tmp_path: Path) -> None:
    book = Book(tmp_path)
    run.run(book, some("a", "b"), passing, 1e9, lambda: None)
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(whole[:-9])
    book = Book(tmp_path)
    assert book.outcome("a").state == PASSED and book.is_left("b")
    run.run(book, some("a", "b"), passing, 1e9, lambda: None)
    assert Book(tmp_path).outcome("b") == passing(some("b")[0])


def test_a_run_stops_before_what_does_not_fit_and_the_next_begins_there(tmp_path: Path, capsys) -> None:
    book, checks = Book(tmp_path), some("a", "b", "c", seconds=1e6)
    for done in ("a", "b", "c"):
        run.run(book, checks, passing, 5e5, lambda: None)
        assert done in book.ended and len(book.ended) == ord(done) - ord("a") + 1
        assert run.conclude(book, checks, tmp_path) == (0 if done == "c" else run.EXIT_LEFT)
        assert ("go on with the same command" in capsys.readouterr().out) == (done != "c")


def test_a_failed_check_is_told_and_run_again_only_when_asked(tmp_path: Path, monkeypatch) -> None:
    wrong = Check("wrong", "rates.no_such_check", 1.0)
    monkeypatch.setattr(plan, "CHECKS", (wrong,))
    monkeypatch.setattr(run, "CHECKS", (wrong,))
    monkeypatch.setattr(run, "checks_of", lambda name: (wrong,))
    words = ["test", "--device", "virtual", "--out", str(tmp_path), "--wheels", str(tmp_path)]
    for again, tries in ((), 1), ((), 1), (("--again",), 1):
        assert run.main([*words, *again]) == run.EXIT_FAILED
        book = Book(tmp_path)
        assert book.tries == {"wrong": tries} and book.outcome("wrong").state == FAILED
        assert "KeyError: 'wrong'" in (tmp_path / PAGE).read_text()  # the process knows the real list
    assert (tmp_path / FILE).read_text().count('"begin"') == 2


def test_a_check_that_hangs_or_dies_costs_its_process_and_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    hanging = [sys.executable, "-c", f"{child}; open({str(pid)!r}, 'w').write(str(p.pid)); time.sleep(600)"]
    assert run.guarded(hanging, tmp_path / "said", dict(os.environ), guard_s=3.0) is None
    if pid.exists() and pid.read_text():
        wait_gone(int(pid.read_text()))
    dying = [sys.executable, "-c", "import os; print('last', flush=True); os.abort()"]
    status = run.guarded(dying, tmp_path / "said", dict(os.environ), guard_s=HANG_GUARD_S)
    assert status == -signal.SIGABRT and run.reason(status) == "signal SIGABRT" and "no end" in run.reason(None)


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it was left running"
        time.sleep(0.02)


def test_the_whole_command_killed_in_the_middle_goes_on(tmp_path: Path) -> None:
    """Really killed, with a real check under way."""
    command = [sys.executable, "-m", "tests.gpu.run", "bench", "--device", "virtual", "--out", str(tmp_path)]
    command += ["--wheels", str(tmp_path)]
    first = subprocess.Popen(command, cwd=run.ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + HANG_GUARD_S
    while not (tmp_path / FILE).exists() or '"begin"' not in (tmp_path / FILE).read_text():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.02)
    children = psutil.Process(first.pid).children(recursive=True)
    first.terminate()
    assert first.wait(HANG_GUARD_S) == 128 + signal.SIGTERM
    for child in children:
        wait_gone(child.pid)
    book = Book(tmp_path)
    name = checks_of("bench")[0].name
    assert book.tries == {name: 1} and book.is_left(name)
    run.run(book, checks_of("bench")[:1], run.Process("virtual", tmp_path / "log.txt", None), 0.0, lambda: None)
    assert book.outcome(name).state == PASSED and book.tries == {name: 2}


def test_three_runs_of_nine_minutes_are_thought_to_be_enough() -> None:
    assert sum(check.seconds for check in CHECKS) <= 28 * 60
    assert all(check.seconds < plan.HANG_GUARD_S < 9 * 60 for check in CHECKS)
    assert len({check.name for check in CHECKS}) == len(CHECKS) and all(check.plans for check in CHECKS)


def test_what_is_packed_are_the_packages_that_a_node_needs_beside_torch() -> None:
    wanted = {line.split("==")[0] for line in wheels.wanted()}
    assert {"pyzmq", "msgspec", "starlette", "uvicorn", "httptools", "gguf", "llguidance"} <= wanted
    assert not wanted & {"torch", "numpy", "numba", "llvmlite"}


def test_packages_that_are_there_are_not_installed_again(tmp_path: Path) -> None:
    for name in ("msgspec-0.22.0-py3-none-any.whl", "no_such_package_at_all-1.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    there, missing = sorted(tmp_path.glob("*.whl"))
    assert wheels.is_installed(there) and not wheels.is_installed(missing)
    missing.unlink()
    assert wheels.install_missing(tmp_path, tmp_path / "site") is None
