"""The runner of the test tiers: budgets in all, a tier that fails, one that hangs with a child of its own."""

from __future__ import annotations

import sys
import time

import psutil
import pytest

from tests import tiers
from tests.tiers import Tier


def python(code, budget_s=60.0):
    return Tier("t", budget_s, (sys.executable, "-I", "-S", "-c", code))


def test_budgets_stay_under_what_is_promised():
    assert sum(tier.budget_s for tier in tiers.PLANS["all"]) <= 35 * 60
    assert sum(tier.budget_s for tier in tiers.PLANS["fast"]) <= 6 * 60


@pytest.mark.parametrize(("status", "passed"), [(0, True), (tiers.NO_TESTS_COLLECTED, True), (1, False), (2, False)])
def test_status_of_a_tier(status, passed):
    assert tiers.run(python(f"raise SystemExit({status})"))[0] is passed


def test_a_tier_that_hangs_fails_and_takes_its_children_along(tmp_path):
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )
    assert tiers.run(python(code, budget_s=1.0))[0] is False
    pid = int(file.read_text())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)  # the suite's hang guard is the bound


def test_one_failed_tier_fails_the_whole_but_the_others_run(monkeypatch, capsys):
    monkeypatch.setitem(tiers.PLANS, "lint", (python("raise SystemExit(1)"), python("")))
    assert tiers.main(["tiers.py", "lint"]) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " s of " in line] == [
        "FAILED",
        "passed",
    ]


def test_an_unknown_plan_is_refused(capsys):
    assert tiers.main(["tiers.py", "some"]) == 2
    assert "usage" in capsys.readouterr().err
