"""The checks for a GPU and their runner, on the virtual GPU: every check with tiny shapes, a run that is cut off, a
check that fails, one that hangs; and whether they launch what real models do."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from shared.engine.future_map import FutureMap
from tests.conftest import LISTS, entries, part_of
from tests.gpu import plan, run
from tests.gpu.book import CUT_OFF, FAILED, FILE, PASSED, SKIPPED, Book, Outcome
from tests.gpu.checks import kernels, real, streams, values
from tests.gpu.one import run_check
from tests.gpu.page import PAGE, SUMMARY, measured_by, write_results
from tests.gpu.place import MetaPlace, Place
from tests.gpu.plan import CHECKS, MODELS, SCRIPTS, Check, NotHere
from tests.support.gpus import fake_flashinfer
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.virtual_gpu.device import VirtualStream

ONE_PROCESS = ("another process's memory", "two nodes over cuda_ipc, one killed")  # what a virtual GPU can't have
# half a minute each on a quiet machine
LONG = (
    "kernels, draws", "sampling of real vocabularies", "two nodes over zmq, one killed",
    "cost of --deterministic, 0.6B",
    *(check.name for check in (*SCRIPTS["served"].checks, *SCRIPTS["pair"].checks)),
    *(f"attention of {name}" for name in MODELS[2:]),  # the virtual GPU's is one tiny model's
)  # fmt: skip
WITH_KERNELS = ("kernels.", "kernel_speed.", "real.")
# Beside kernels: what a GPU's node does, and no GPU has done, is in a check. Other processes' work is not seen here.
REACHED = {
    "streams, graphs": ("shared.engine.graphs:GraphRunner._capture_one", "shared.engine.graphs:divide"),  # of prompts
    "streams, library": ("shared.model.library.on_device:keep_frequencies", "shared.engine.graphs:Captured.fits"),
    "kernels, products": (
        "shared.kernel.product.scaled_product:ScaledLinear.__call__",
        "shared.kernel.product.experts:GroupedLinear.__call__",
    ),
    "attention of FlashInfer": (
        "shared.kernel.attention.flash_infer:PlannedRows.run_rows",
        "shared.kernel.attention.flash_infer:FlashInferAttention.plan_graph",
    ),
}


@contextlib.contextmanager
def reaching(names: tuple[str, ...]) -> Iterator[None]:
    """Each of these functions is called."""
    reached: set[str] = set()

    def noted(name: str, real: Callable[..., object]) -> Callable[..., object]:
        return lambda *given, **named: (reached.add(name), real(*given, **named))[1]

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            module, _, path = name.partition(":")
            *owners, function = path.split(".")
            holder = reduce(getattr, owners, importlib.import_module(module))
            patch.setattr(holder, function, noted(name, getattr(holder, function)))
        yield
    assert reached == set(names)


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, marks=[pytest.mark.long] if check.name in LONG else [], id=check.name) for check in CHECKS],
)
def test_every_check_runs_on_the_virtual_gpu(check: Check) -> None:
    if check.run.startswith(WITH_KERNELS):
        pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
    if check.name in ONE_PROCESS:
        with pytest.raises(NotHere, match="process's own"):
            run_check(check, "virtual")
        return
    with reaching(REACHED.get(check.name, ())):
        figures = run_check(check, "virtual")
    print(figures)
    assert figures
    assert all(isinstance(value, int | float) and value >= 0 for value in figures.values()), figures


# Half a minute of CPU each, and more; or CI runs most of them in another test.
IN_LONG_ONLY = {
    "doctor.doctor",  # tests/unit/deploy/tools/doctor/test_doctor_gpu.py
    "kernels.draws", "order.silent_steps",  # test_a_check_fails_where_what_it_looks_for_is_wrong
    "pair.across", "pair.divided", "real.sampling", "served.everything", "served.latency", "served.same_tokens",
    "speed.deterministic", "speed.transformers",
}  # fmt: skip


def test_ci_runs_a_check_of_each_kind() -> None:
    """Between two GPUs nothing else runs them, and what they call changes."""
    lists = {part: frozenset(entries(part)) for part in LISTS}
    case = f"{Path(__file__).relative_to(run.ROOT).as_posix()}::{test_every_check_runs_on_the_virtual_gpu.__name__}"
    in_ci = {
        check.run for check in CHECKS if check.name not in LONG and part_of(f"{case}[{check.name}]", lists) != "long"
    }
    assert {check.run for check in CHECKS} - in_ci == IN_LONG_ONLY


@pytest.mark.timeout(3600)  # 38 checks one after the other
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_whole_script_runs_as_on_a_gpu(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Each check in a process of its own, and none ended by the clock, which is a GPU's."""
    monkeypatch.setitem(SCRIPTS, script, replace(SCRIPTS[script], most_s=1e6))
    monkeypatch.setattr(run, "HANG_GUARD_S", 2 * HANG_GUARD_S)
    assert run.main([script, "--device", "virtual", "--jobs", "2", "--out", str(tmp_path)]) == 0
    skipped = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped, ")]
    if importlib.util.find_spec("triton") is not None:
        assert all("process's own" in line for line in skipped), skipped


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


def wrong_split(patch: pytest.MonkeyPatch) -> None:
    attend = real.Exact.attend

    def further(self: real.Exact, *args: object) -> torch.Tensor:
        rounded = attend(self, *args)
        self.exact += 1e-2
        return rounded

    patch.setattr(real.Exact, "attend", further)


def wrong_merge(patch: pytest.MonkeyPatch) -> None:
    from tests.support.kernels import interpreter

    nowhere = lambda sums, parts, out, rows: out.fill_(float("nan"))  # noqa: E731
    patch.setattr(interpreter.kernels("paged_attention"), "merge_splits", nowhere)


def wrong_attention(patch: pytest.MonkeyPatch) -> None:
    real = kernels.TorchAttention.attend
    patch.setattr(kernels.TorchAttention, "attend", lambda self, *args: real(self, *args) + 1e-3)


def wrong_library(patch: pytest.MonkeyPatch) -> None:
    real = fake_flashinfer.causal
    patch.setattr(fake_flashinfer, "causal", lambda *given: real(*given) + 0.1)


def wrong_ids(patch: pytest.MonkeyPatch) -> None:
    real = kernels.sample_cpu

    def sample(*args: object, **more: object) -> object:
        found = real(*args, **more)
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


@pytest.mark.parametrize(
    ("name", "spoil", "told"),
    [
        ("streams, plain", wrong_streams, "plain: AssertionError: r1: "),
        ("streams, plain", a_failed_step, "RuntimeError: once"),
        ("logits of prompts, steps, windows", wrong_logits, "not close"),
        ("draws of the sampler", wrong_draws, "logprobs of case"),
        ("kernels, attention", wrong_attention, "from the reference"),
        ("kernels, draws", wrong_ids, "ids of case"),
        ("attention of FlashInfer", wrong_library, "from the reference"),
        ("attention of Llama-3.1-8B", wrong_split, "from float64"),
        ("merge of splits", wrong_merge, "nan of its size from float64"),
        ("streams, graphs", wrong_streams, "plain: AssertionError: r1: "),
        ("host waits in the steady state", a_hidden_wait, "syncs tests/unit/support/test_gpu_checks.py"),
        ("races", no_order, "is not ordered behind"),
    ],
)
def test_a_check_fails_where_what_it_looks_for_is_wrong(
    name: str, spoil: Callable[[pytest.MonkeyPatch], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plan.check_named(name).run.startswith(WITH_KERNELS):
        pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
    spoil(monkeypatch)
    with pytest.raises(AssertionError) as failed:
        run_check(plan.check_named(name), "virtual")
    assert told in str(failed.value)


def combinations(signatures: Any) -> set[tuple[object, ...]]:
    """Of a kernel's name and all that is compiled into it."""
    return {(one.kernel, one.constants, one.num_warps, one.num_stages) for one in signatures}


def launches_of(*checks: Callable[[], object]) -> set[tuple[object, ...]]:
    launcher = importlib.import_module("shared.gpu_kernel.launch.launcher")
    with torch.inference_mode(), launcher.recorded() as seen:
        for check in checks:
            check()
    return combinations(seen)


def test_the_checks_launch_all_that_real_models_steps_launch() -> None:
    """On the meta device. What steps launch is in `real_signatures`: see test_triton_signatures.py."""
    pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
    from tests.support.kernels import ahead

    real_ones = combinations(
        one for module in ahead.kernel_modules() for one in importlib.import_module(module).real_signatures()
    )
    place: Any = MetaPlace()
    attention = [lambda name=name: real.attention(place, name) for name in MODELS]
    others = [real.merge, real.blocks, real.products, real.sampling, real.pages, real.preparing, kernels.draws]
    checks = [*attention, *(lambda check=check: check(place) for check in others)]
    assert len(real_ones) > 100
    assert not real_ones - launches_of(*checks)
    without_the_first_model = launches_of(*checks[1:])
    lacking = {
        (str(name), dict(constants).get("IS_SPLIT")) for name, constants, *_ in real_ones - without_the_first_model
    }
    assert ("shared.gpu_kernel.paged_attention:attend_split_kernel", True) in lacking, "a missing case is noticed"


def test_checks_of_kernels_are_in_the_script_for_mistakes() -> None:
    names = {f"real.{name}" for name, value in vars(real).items() if is_check(value)}
    assert names == {check.run for check in SCRIPTS["right"].checks if check.run.startswith("real.")}
    assert set(MODELS) == {check.arguments[0] for check in SCRIPTS["right"].checks if check.run == "real.attention"}


def is_check(value: object) -> bool:
    return (
        callable(value)
        and getattr(value, "__module__", "") == real.__name__
        and (getattr(value, "__annotations__", {}).get("return") == "dict[str, object]")
    )


def test_a_command_s_run_says_what_was_found_and_on_what(tmp_path: Path, capsys) -> None:
    names = ("doctor", ONE_PROCESS[0])
    words = ["right", "--device", "virtual", "--out", str(tmp_path / "out"), "--keep", str(tmp_path / "kept")]
    assert run.main([*words, *(word for name in names for word in ("--only", name))]) == 0
    told = json.loads((tmp_path / "kept" / SUMMARY).read_text())
    states = {row["name"]: row["state"] for row in told["checks"]}
    assert states["doctor"] == PASSED and states[ONE_PROCESS[0]] == SKIPPED
    assert told["counts"] == {"not run yet": len(CHECKS) - 2, PASSED: 1, SKIPPED: 1}
    (this_run,) = told["runs"]
    assert this_run["machine"]["GPU"] == "virtual" and this_run["machine"]["torch"] and this_run["code"]
    page = (tmp_path / "kept" / PAGE).read_text()
    assert this_run["machine"]["CPU"] in page and "| doctor | passed |" in page and "process's own" in page
    assert "2 of 2 checks done" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "kept").iterdir()} == {
        file.name for file in (tmp_path / "out" / "virtual").iterdir()
    }
    with pytest.raises(SystemExit, match="there is no check 'nothing'. There are: attention of"):
        run.main([*words, "--only", "nothing"])


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
        run.main(["right", "--out", str(tmp_path)])
    assert not list(tmp_path.rglob(FILE))


def some(*names: str) -> list[Check]:
    return [Check(name, "none.none", 60.0) for name in names]


class Done:
    """A check that ends at the first look."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def poll(self) -> Outcome | None:
        return self.outcome

    def kill(self) -> None:
        raise AssertionError("it has ended")


def passing(check: Check, ends_at: float) -> Done:
    return Done(Outcome(check.name, PASSED, 1.0, {"it": 1}))


class CutOff(BaseException):
    """As a machine that is taken away: nothing is written any more."""


FAR = time.monotonic() + 1e6


def test_a_cut_run_goes_on_and_retries_its_running_check_once(tmp_path: Path) -> None:
    started: list[str] = []

    def cut_in_b(check: Check, ends_at: float) -> Done:
        started.append(check.name)
        if check.name == "b":
            raise CutOff
        return passing(check, ends_at)

    checks = some("a", "b", "c")
    for expected in (["a", "b"], ["b"], ["c"], []):
        book, started[:] = Book(tmp_path), []
        with contextlib.suppress(CutOff):
            run.run(book, checks, cut_in_b, FAR, 1, lambda: None)
        assert started == expected
    assert [book.outcome(check.name).state for check in checks] == [PASSED, CUT_OFF, PASSED]
    assert run.conclude(book, checks, tmp_path) == run.EXIT_FAILED


def test_a_line_that_was_cut_off_is_no_result(tmp_path: Path) -> None:
    book = Book(tmp_path)
    run.run(book, some("a", "b"), passing, FAR, 1, lambda: None)
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(whole[:-9])
    book = Book(tmp_path)
    assert book.outcome("a").state == PASSED and book.is_left("b")
    run.run(book, some("a", "b"), passing, FAR, 1, lambda: None)
    again = Book(tmp_path)
    assert again.outcome("b") == passing(some("b")[0], FAR).outcome and again.tries["b"] == 2


def test_results_of_other_sources_say_nothing_of_these(tmp_path: Path) -> None:
    book, checks = Book(tmp_path), some("a")
    for code, is_left in ("first", True), ("first", False), ("second", True), ("second", False):
        book.begin_run({}, code)
        assert book.is_left("a") == Book(tmp_path).is_left("a") == is_left
        run.run(book, checks, passing, FAR, 1, lambda: None)


def test_several_run_at_a_time_and_one_that_ends_makes_room(tmp_path: Path) -> None:
    under_way: list[str] = []
    most: list[int] = []

    class Slow(Done):
        looks = 0

        def poll(self) -> Outcome | None:
            self.looks += 1
            if self.looks < 3:
                return None
            under_way.remove(self.outcome.name)
            return self.outcome

    def start(check: Check, ends_at: float) -> Slow:
        under_way.append(check.name)
        most.append(len(under_way))
        return Slow(Outcome(check.name, PASSED, 1.0, {}))

    book, checks = Book(tmp_path), some(*"abcdefg")
    run.run(book, checks, start, FAR, 3, lambda: None)
    assert max(most) == 3 and len(book.ended) == 7 and not under_way


def test_at_its_end_a_script_ends_what_runs_and_starts_nothing(tmp_path: Path, capsys) -> None:
    """A process that hangs tells where its threads are; its children go with it."""
    pid = tmp_path / "pid"
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"{child}; open({str(pid)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    started: list[float] = []

    def start(check: Check, ends_at: float) -> run.Process:
        started.append(ends_at)
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        command = [sys.executable, "-c", code]
        process = run.Process(check.name, command, environment, FAR, tmp_path / "log.txt")
        deadline = time.monotonic() + HANG_GUARD_S
        while not (pid.exists() and pid.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process._ends_at = time.monotonic()  # now it is over
        return process

    book, checks = Book(tmp_path), some("a", "b")
    began = time.monotonic()
    run.run(book, checks, start, began + 0.01, 1, lambda: None)
    assert started and started[0] <= began + 0.01
    outcome = book.ended["a"].outcome
    assert (
        outcome.state == FAILED and "ended: no end after" in outcome.told and "most recent call first" in outcome.told
    )
    wait_gone(int(pid.read_text()))
    assert book.is_left("b") and run.conclude(book, checks, tmp_path) == run.EXIT_FAILED
    assert "left: b\ngo on with the same command" in capsys.readouterr().out


def test_a_check_that_dies_says_by_what(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; print('last', flush=True); os.abort()"]
    process = run.Process("dying", command, dict(os.environ), FAR, tmp_path / "log.txt")
    outcome = ended(process)
    assert outcome.state == FAILED and outcome.told == "last\n\nsignal SIGABRT"


def ended(process: run.Process) -> Outcome:
    deadline = time.monotonic() + HANG_GUARD_S
    while (outcome := process.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return outcome


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it was left running"
        time.sleep(0.02)


def test_a_failed_check_is_told_and_run_again_only_when_named(tmp_path: Path, monkeypatch) -> None:
    wrong = Check("wrong", "rates.no_such_check", 1.0)
    monkeypatch.setattr(run, "CHECKS", (wrong,))
    monkeypatch.setitem(SCRIPTS, "fast", replace(SCRIPTS["fast"], checks=(wrong,)))
    words, found = ["fast", "--device", "virtual", "--out", str(tmp_path)], tmp_path / "virtual"
    for again, begun in ((), 1), ((), 1), (("--only", "wrong"), 2):
        assert run.main([*words, *again]) == run.EXIT_FAILED
        book = Book(found)
        assert book.outcome("wrong").state == FAILED and book.tries == {"wrong": 1}
        assert "KeyError: 'wrong'" in (found / PAGE).read_text()  # the process knows the real list
        assert (found / FILE).read_text().count('"begin"') == begun


def test_the_whole_command_killed_in_the_middle_goes_on(tmp_path: Path) -> None:
    """Really killed, with a real check under way."""
    command = [sys.executable, "-m", "tests.gpu.run", "fast", "--device", "virtual", "--out", str(tmp_path)]
    first = subprocess.Popen(command, cwd=run.ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline, found = time.monotonic() + HANG_GUARD_S, tmp_path / "virtual"
    while not (found / FILE).exists() or '"begin"' not in (found / FILE).read_text():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.02)
    children = psutil.Process(first.pid).children(recursive=True)
    first.terminate()
    assert first.wait(HANG_GUARD_S) == 128 + signal.SIGTERM
    for child in children:
        wait_gone(child.pid)
    book, check = Book(found), SCRIPTS["fast"].checks[0]
    assert book.tries == {check.name: 1} and book.is_left(check.name)
    start = run.Processes("virtual", tmp_path / "log.txt", None)
    run.run(book, [check], start, time.monotonic() + HANG_GUARD_S, 1, lambda: None)
    assert book.outcome(check.name).state == PASSED and book.tries == {check.name: 2}


def test_each_script_is_thought_to_fit_into_its_time() -> None:
    """Checks are taken in order, each by the first that is free."""
    for name, script in SCRIPTS.items():
        free = [0.0] * script.jobs
        for check in script.checks:
            assert check.seconds < plan.HANG_GUARD_S
            free[free.index(min(free))] += check.seconds
        assert max(free) < 0.8 * script.most_s, name
    assert sum(script.most_s for name, script in SCRIPTS.items() if name != "pair") <= 15 * 60
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_what_a_run_measured_is_what_later_ones_expect(tmp_path: Path, monkeypatch) -> None:
    """A check that failed, or was not run, keeps what was known of it."""
    known = {
        "machine": {},
        "date": "",
        "seconds": {"a": 1.0, "c": 3.0},
        "figures": {"a": {"rate": 1}, "c": {"rate": 3}},
    }
    monkeypatch.setattr("tests.gpu.page.measured", lambda: known)
    book = Book(tmp_path)
    book.begin_run({"GPU": "new"}, "code")
    book.end(Outcome("a", PASSED, 2.26, {"rate": 20.5}))
    book.end(Outcome("c", FAILED, 9.0, {}))
    told = measured_by(book, some("a", "b", "c"))
    assert told["machine"] == {"GPU": "new"} and told["seconds"] == {"a": 2.3, "c": 3.0}
    assert told["figures"] == {"a": {"rate": 20.5}, "c": {"rate": 3}}
    monkeypatch.setattr("tests.gpu.page.measured", lambda: told)
    write_results(book, some("a"), tmp_path)
    assert (
        "| rate | 20.5 | 20.5 |" in (tmp_path / PAGE).read_text() and "before: new, 20" in (tmp_path / PAGE).read_text()
    )


def test_checks_that_could_not_be_run_are_told_and_count_as_none(tmp_path: Path, capsys) -> None:
    book = Book(tmp_path)
    book.end(Outcome("a", SKIPPED, 1.0, {}, "one GPU"))
    assert run.conclude(book, some("a"), tmp_path) == run.EXIT_NOT_HERE
    assert "skipped, one GPU: a" in capsys.readouterr().out
    book.end(Outcome("b", PASSED, 1.0, {}))
    assert run.conclude(book, some("a", "b"), tmp_path) == 0


def test_results_of_another_machine_say_nothing_of_this_one() -> None:
    assert run.code_digest({"GPU": "H100"}) == run.code_digest({"GPU": "H100"}) != run.code_digest({"GPU": "H200"})


def test_what_a_check_leaves_goes_and_its_logs_are_kept(tmp_path: Path) -> None:
    code = "import tempfile, os; f = tempfile.mkdtemp(); open(f + '/up.log', 'w').write('why'); print(f); os.abort()"
    outcome = ended(run.Process("leaving", [sys.executable, "-c", code], dict(os.environ), FAR, tmp_path / "log.txt"))
    assert not Path(outcome.told.split()[0]).exists() and "-- up.log\nwhy" in (tmp_path / "log.txt").read_text()
