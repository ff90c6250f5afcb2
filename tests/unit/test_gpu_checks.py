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
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from shared.engine.future_map import FutureMap
from tests.gpu import plan, run, wheels
from tests.gpu.book import CUT_OFF, FAILED, FILE, PASSED, SKIPPED, Book, Outcome
from tests.gpu.checks import kernels, streams, values
from tests.gpu.one import run_check
from tests.gpu.page import PAGE, SUMMARY
from tests.gpu.place import NotHere, Place
from tests.gpu.plan import CHECKS, Check, checks_of
from tests.support.patience import HANG_GUARD_S
from tests.support.virtual_gpu.device import VirtualStream

ONE_PROCESS = ("another process's memory", "two nodes over cuda_ipc, one killed")  # what a virtual GPU can't have
LONG = ("kernels, draws", "two nodes over zmq, one killed")  # half a minute each


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [pytest.param(check, marks=[pytest.mark.long] if check.name in LONG else [], id=check.name) for check in CHECKS],
)
def test_every_check_runs_on_the_virtual_gpu(check: Check) -> None:
    if check.run.startswith("kernels."):
        pytest.importorskip("tests.support.interpreter", exc_type=ImportError)
    if check.name in ONE_PROCESS:
        with pytest.raises(NotHere, match="process's own"):
            run_check(check, "virtual")
        return
    figures = run_check(check, "virtual")
    print(figures)
    assert figures
    assert all(isinstance(value, int | float) and value >= 0 for value in figures.values()), figures


def wrong_streams(patch: pytest.MonkeyPatch) -> None:
    real = streams.outcome

    def outcome(place: Place | None, *args: object) -> Outcome:
        found = real(place, *args)
        if place is not None:
            found.streams["r1"][-1] += 1
        return found

    patch.setattr(streams, "outcome", outcome)


def wrong_logits(patch: pytest.MonkeyPatch) -> None:
    real = values.logits_on
    patch.setattr(values, "logits_on", lambda folder, device: real(folder, device) + (device.type != "cpu") * 1e-2)


def wrong_draws(patch: pytest.MonkeyPatch) -> None:
    real = values.sample_tensors

    def sample(*args: object) -> object:
        found = real(*args)
        return replace(found, logprobs=found.logprobs + 1e-6)

    patch.setattr(values, "sample_tensors", sample)


def wrong_attention(patch: pytest.MonkeyPatch) -> None:
    real = kernels.TorchAttention.attend
    patch.setattr(kernels.TorchAttention, "attend", lambda self, *args: real(self, *args) + 1e-3)


def wrong_ids(patch: pytest.MonkeyPatch) -> None:
    real = kernels.sample_cpu

    def sample(*args: object) -> object:
        found = real(*args)
        return replace(found, ids=found.ids ^ 1)

    patch.setattr(kernels, "sample_cpu", sample)


def a_failed_step(patch: pytest.MonkeyPatch) -> None:
    """Once: the engine recovers, and every stream is right."""
    real, failed = FutureMap.stash, []

    def stash(self: FutureMap, *args: object, **extras: torch.Tensor) -> None:
        if self.output_tokens_buf.device.type != "cpu" and not failed:
            failed.append(True)
            raise RuntimeError("once")
        real(self, *args, **extras)

    patch.setattr(FutureMap, "stash", stash)


def a_hidden_wait(patch: pytest.MonkeyPatch) -> None:
    real = FutureMap.write_history

    def write(self: FutureMap, rows: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> None:
        assert int(positions.sum().item()) >= 0
        real(self, rows, positions, ids)

    patch.setattr(FutureMap, "write_history", write)


def no_order(patch: pytest.MonkeyPatch) -> None:
    """The copy to the host does not wait for the step."""
    patch.setattr(VirtualStream, "wait_event", lambda self, event: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spoil", "told"),
    [
        ("streams, plain", wrong_streams, "plain: AssertionError: r1: "),
        ("streams, plain", a_failed_step, "RuntimeError: once"),
        ("logits of prompts, steps, windows", wrong_logits, "not close"),
        ("draws of the sampler", wrong_draws, "logprobs of case"),
        ("kernels, attention", wrong_attention, "from the reference"),
        ("kernels, draws", wrong_ids, "ids of case"),
        ("streams, graphs", wrong_streams, "plain: AssertionError: r1: "),
        ("host waits in the steady state", a_hidden_wait, "syncs tests/unit/test_gpu_checks.py"),
        ("races", no_order, "is not ordered behind"),
    ],
)
def test_a_check_fails_where_what_it_looks_for_is_wrong(
    name: str, spoil: Callable[[pytest.MonkeyPatch], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("kernels, "):
        pytest.importorskip("tests.support.interpreter", exc_type=ImportError)
    spoil(monkeypatch)
    with pytest.raises(AssertionError) as failed:
        run_check(plan.check_named(name), "virtual")
    assert told in str(failed.value)


def test_a_command_s_run_says_what_was_found_and_on_what(tmp_path: Path, capsys, monkeypatch) -> None:
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


def test_processes_find_the_checkout_wherever_they_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Baton is not installed: the supervisor's children do not run in the checkout."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    code = "import importlib.util as u; print(u.find_spec('deploy'))"
    command = [sys.executable, "-S", "-c", code]  # without what is installed
    done = subprocess.run(command, cwd=tmp_path, env=run.environment(None), capture_output=True, text=True, check=True)
    assert str(run.ROOT / "deploy") in done.stdout


def test_without_a_gpu_nothing_is_run_and_nothing_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="nothing was run: torch .* sees no GPU here"):
        run.main(["test", "--out", str(tmp_path), "--wheels", str(tmp_path)])
    assert not (tmp_path / FILE).exists()


def some(*names: str, seconds: float = 60.0) -> list[Check]:
    return [Check(name, "none.none", seconds) for name in names]


def passing(check: Check) -> Outcome:
    return Outcome(check.name, PASSED, 1.0, {"it": 1})


class CutOff(BaseException):
    """As a machine that is taken away: nothing is written any more."""


def test_a_cut_run_goes_on_and_retries_its_running_check_once(tmp_path: Path) -> None:
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
    again = Book(tmp_path)
    assert again.outcome("b") == passing(some("b")[0]) and again.tries["b"] == 2


def test_results_of_other_sources_say_nothing_of_these(tmp_path: Path) -> None:
    book, checks = Book(tmp_path), some("a")
    for code, is_left in ("first", True), ("first", False), ("second", True), ("second", False):
        book.begin_run({}, code)
        assert book.is_left("a") == Book(tmp_path).is_left("a") == is_left
        run.run(book, checks, passing, 1e9, lambda: None)


def test_a_run_ends_before_a_too_long_check_and_resumes_there(tmp_path: Path, capsys) -> None:
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


def test_a_check_that_hangs_or_dies_costs_only_its_process_tree(tmp_path: Path) -> None:
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


def test_packed_packages_are_those_a_node_needs_beside_torch() -> None:
    wanted = {line.split("==")[0] for line in wheels.wanted()}
    assert {"pyzmq", "msgspec", "starlette", "uvicorn", "httptools", "gguf", "llguidance"} <= wanted
    assert not wanted & {"torch", "numpy", "numba", "llvmlite"}


def test_packages_that_are_there_are_not_installed_again(tmp_path: Path) -> None:
    for name in ("msgspec-0.22.0-py3-none-any.whl", "no_such_package_at_all-1.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    there, missing = sorted(tmp_path.glob("*.whl"))
    assert wheels.is_installed(there) and not wheels.is_installed(missing)
    missing.unlink()
    assert wheels.install_missing(tmp_path) is None


def test_missing_packages_are_installed_once_beside_the_others(tmp_path: Path) -> None:
    """Without network, from the folder alone; an installation that was cut off is begun again."""
    with zipfile.ZipFile(tmp_path / "a_baton_test_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_baton_test_package.py", "ANSWER = 42\n")
        info = "a_baton_test_package-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: a-baton-test-package\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (tmp_path / "site.half").mkdir()
    (tmp_path / "site.half" / "torn.py").touch()
    site = wheels.install_missing(tmp_path)
    assert site is not None and not (site / "torn.py").exists()
    command = [sys.executable, "-c", "import a_baton_test_package as it; print(it.ANSWER)"]
    done = subprocess.run(command, env=run.environment(site), capture_output=True, text=True, check=True)
    assert done.stdout == "42\n"
    written = (site / "a_baton_test_package.py").stat().st_mtime_ns
    assert wheels.install_missing(tmp_path) == site
    assert (site / "a_baton_test_package.py").stat().st_mtime_ns == written
