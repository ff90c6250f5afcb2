"""The runner of the test tiers: seconds beside a quiet machine's, a tier that fails, one that hangs, with its child."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import tiers
from tests.drill import needs
from tests.support.machine.patience import HANG_GUARD_S
from tests.tiers import Tier


def python(code, quiet_s=60.0):
    return Tier("t", quiet_s, (sys.executable, "-I", "-S", "-c", code))


HOOKS = ("pytest_runtest_logstart", "pytest_runtest_logfinish", "pytest_terminal_summary")
# Only the process that is interrupted writes the file. xdist's workers know earlier than it that the test runs.
TELLS = """
class Told:
    def pytest_runtest_logreport(self, report):
        open({!r}, "w").write("x")

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Told())
"""


class Hanging(Tier):
    """Counts as hanging as soon as it has written a file named like itself."""

    @property
    def guard_s(self):
        while not (path := Path(self.name)).exists() or not path.read_text():
            time.sleep(0.02)  # the suite's hang guard is the bound
        return 0.0


def test_quiet_seconds_stay_under_what_is_promised():
    first, deep, turn = (tiers.quiet_s(tiers.PLANS[plan]) for plan in ("test", "deep", "turn"))
    assert first <= 10 * 60 and first + deep + turn <= 35 * 60


def test_a_guard_is_several_times_what_a_quiet_machine_needs():
    every = [tier for plan in tiers.PLANS.values() for tier in plan]
    assert all(tier.guard_s >= max(4 * tier.quiet_s, 60) for tier in every)


@pytest.mark.parametrize(("status", "passed"), [(0, True), (tiers.NO_TESTS_COLLECTED, True), (1, False), (2, False)])
def test_status_of_a_tier(status, passed):
    assert tiers.run(python(f"raise SystemExit({status})"))[0] is passed


def test_seconds_beyond_a_quiet_machine_s_fail_nothing():
    passed, seconds = tiers.run(python("import time; time.sleep(0.2)", quiet_s=0.01))
    assert passed and seconds > 0.01


@pytest.mark.parametrize("ignored", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN); "])
def test_a_tier_that_hangs_fails_and_takes_its_children_along(tmp_path, monkeypatch, capsys, ignored):
    monkeypatch.setattr(tiers, "LAST_WORDS", ((signal.SIGINT, 0.5), (signal.SIGABRT, 0.5)))
    file = tmp_path / "pid"
    code = (
        f"import signal, subprocess, sys, time; {ignored}\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )
    assert tiers.run(Hanging(str(file), 60.0, python(code).command))[0] is False
    assert f"{file} is ended: no end after 0 s" in capsys.readouterr().out
    pid = int(file.read_text())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_whole_run_and_its_tier(tmp_path, number):
    runs = (
        f"import os, time; open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w'); print('up', flush=True); time.sleep(600)"
    )
    code = (
        f"import signal, sys; signal.signal({number}, signal.SIG_DFL)  # nohup ignores SIGHUP\n"
        f"from tests import tiers; tier = tiers.Tier('t', 60, (sys.executable, '-c', {runs!r}))\n"
        "tiers.PLANS['lint'] = (tier, tier); tiers.end_at_signals(); sys.exit(tiers.main(['', 'lint']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tiers.ROOT, stdout=subprocess.PIPE, text=True) as process:
        while "up" not in process.stdout.readline():
            pass
        process.send_signal(number)
        process.wait(HANG_GUARD_S)
    (tier,) = (int(path.name) for path in tmp_path.iterdir())
    try:
        assert process.returncode == 128 + number and not psutil.pid_exists(tier)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(tier, signal.SIGKILL)


@pytest.fixture(params=["a terminal", "a script's background"])
def started_from(request):
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler if request.param == "a terminal" else signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("started_from")
@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_tier_that_hangs_says_which_test_was_running(tmp_path, monkeypatch, capfd, processes):
    monkeypatch.setattr(tiers, "LAST_WORDS", ((signal.SIGINT, HANG_GUARD_S),))
    file, begun = tmp_path / "test_it.py", tmp_path / "begun"
    file.write_text("import time\ndef test_hangs():\n  time.sleep(600)\n")
    (tmp_path / "conftest.py").write_text(f"from tests.conftest import {', '.join(HOOKS)}\n{TELLS.format(str(begun))}")
    command = (sys.executable, "-m", "pytest", f"--rootdir={tmp_path}", "-n", processes, str(file))
    assert tiers.run(Hanging(str(begun), 60.0, command))[0] is False
    assert re.search(r"ended in \S*test_it.py::test_hangs", capfd.readouterr().out)


def test_one_failed_tier_fails_the_whole_but_the_others_run(monkeypatch, capsys):
    monkeypatch.setitem(tiers.PLANS, "lint", (python("raise SystemExit(1)"), python("")))
    assert tiers.main(["tiers.py", "lint"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if " t " in line]
    assert [line.split()[0] for line in lines] == ["FAILED", "passed"]
    assert all(line.endswith(" s (quiet machine: 60)") for line in lines)


def test_lint_runs_at_once_and_each_says_its_own(tmp_path, monkeypatch, capsys):
    """Each waits for the other's file. What the second says comes behind what the first does."""
    meet = "import pathlib, time\npathlib.Path({!r}).touch()\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.01)\n"
    paths = [str(tmp_path / name) for name in "ab"]
    first = python(meet.format(*paths) + "time.sleep(0.2); print('one')")
    second = python(meet.format(*paths[::-1]) + "print('two'); raise SystemExit(1)")
    monkeypatch.setattr(tiers, "LINT", (first, second))
    monkeypatch.setitem(tiers.PLANS, "lint", (first, second))
    assert tiers.main(["tiers.py", "lint"]) == 1
    said = capsys.readouterr().out
    assert said.index("one") < said.index("two") < said.index("passed") < said.index("FAILED")


def needing(status, said="", code=""):
    """A tier that asks first."""
    needs = python(f"print({said!r}); raise SystemExit({status})").command
    return dataclasses.replace(python(code), needs=needs)


def test_a_tier_that_can_t_run_here_is_skipped_with_its_reason(monkeypatch, capsys):
    tier = needing(tiers.CANT_RUN_HERE, "only root can", "raise SystemExit(1)")
    monkeypatch.setitem(tiers.PLANS, "lint", (tier,))
    assert tiers.main(["tiers.py", "lint"]) == 0
    (said,) = [line for line in capsys.readouterr().out.splitlines() if " t " in line]
    assert said.startswith("skipped t ") and said.endswith(": only root can")


@pytest.mark.parametrize("status", [0, 1])
def test_a_tier_that_could_run_must(monkeypatch, status):
    """A tool that is missing, or no tests: what was not run has not passed."""
    tier = needing(status, "a tool is missing", f"raise SystemExit({tiers.NO_TESTS_COLLECTED})")
    monkeypatch.setitem(tiers.PLANS, "lint", (tier,))
    assert tiers.main(["tiers.py", "lint"]) == 1


def test_the_drill_and_runner_have_the_same_word_for_can_t_run():
    assert needs.CANT_RUN_HERE == tiers.CANT_RUN_HERE
    turns = map(tiers.in_turn, range(tiers.TURNS))
    drills = [tier for plan in (*tiers.PLANS.values(), *turns) for tier in plan if tier.name == "drill"]
    assert len(drills) == 5 and all(tier.needs[-1] == needs.__name__ for tier in drills)


def test_an_unknown_plan_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        tiers.main(["tiers.py", "some"])
    assert "usage" in capsys.readouterr().err


LINES = """
# a word
there>=1; python_version >= "3"
absent==2.5; python_version >= "3"
elsewhere==1; python_version < "3"
"""


def test_requirements_that_are_missing_here(monkeypatch):
    monkeypatch.setattr(tiers.importlib.util, "find_spec", lambda name: name if name == "there" else None)
    assert tiers.missing_requirements(LINES) == ["absent==2.5"]


@pytest.mark.parametrize("plan", ["lint", "deep"])
@pytest.mark.parametrize("status", [0, 1])
def test_requirements_of_tests_are_asked_for_once(monkeypatch, capsys, tmp_path, plan, status):
    """And never stop a run: what can't be had is skipped by its tests."""
    asked = tmp_path / "asked"
    code = f"import sys; open({str(asked)!r}, 'w').write(' '.join(sys.argv[1:])); raise SystemExit({status})"
    monkeypatch.setattr(tiers, "PIP_INSTALL", python(code).command)
    monkeypatch.setattr(tiers, "REQUIREMENTS", tmp_path / "requirements.txt")
    tiers.REQUIREMENTS.write_text("baton-has-no-such-module==1")
    monkeypatch.setitem(tiers.PLANS, plan, (python(""),))
    assert tiers.main(["tiers.py", plan]) == 0
    assert asked.exists() == (plan == "deep")
    assert ("can't be had" in capsys.readouterr().out) == (plan == "deep" and status == 1)


def test_requirements_that_are_there_cost_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(tiers, "PIP_INSTALL", ("no-such-program",))
    monkeypatch.setattr(tiers, "REQUIREMENTS", tmp_path / "requirements.txt")
    tiers.REQUIREMENTS.write_text("pytest>=1")
    tiers.install_requirements()


def test_requirements_file_is_understood():
    tiers.missing_requirements(tiers.REQUIREMENTS.read_text())
