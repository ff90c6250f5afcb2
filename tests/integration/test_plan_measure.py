"""`baton plan measure` with real processes on the integer model, and an answer out of the profile that it makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.plan import profile as profiles
from deploy.plan.profile import StepShape

HANG_S = 240


@pytest.mark.timeout(HANG_S + 60)
def test_a_machine_is_measured_and_planned_with(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    baton = [sys.executable, "-P", "-m", "deploy.cli", "plan"]
    node = ["--model", "hashlm", "--dtype", "float32", "--max-context", "600", "--max-running", "8"]
    measure = [*baton, "measure", "--cores-per-node", "1", "--out", str(out), *node]
    ran = subprocess.run(measure, capture_output=True, text=True, timeout=HANG_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = profiles.read(out)
    assert found.max_running == 8 and found.num_pages > 8
    costs = found.node(1).alone
    assert 0 < costs.seconds(StepShape(1, 1)) < costs.seconds(StepShape(300, 1, pairs=45_000))
    assert found.paths[1].to_node > 0
    find = [*baton, "find", "--profile", str(out), "--rate", "2", "--requests", "20", "--prompt-tokens", "20"]
    planned = subprocess.run([*find, "--output-tokens", "8"], capture_output=True, text=True, timeout=HANG_S)
    assert planned.returncode == 0, planned.stderr
    assert "baton up --prefill" in planned.stdout
