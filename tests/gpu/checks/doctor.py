"""What `baton doctor --gpu` finds."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.gpu.place import Place
from tests.support.cluster import ROOT
from tests.support.patience import HANG_GUARD_S


def doctor(place: Place) -> dict[str, object]:
    """Nothing broken; on a GPU machine, one GPU at least that computes the CPU's logits."""
    command = [sys.executable, "-m", "deploy.cli", "doctor", "--gpu", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_GUARD_S)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    findings = json.loads(done.stdout)["findings"]
    well = [finding for finding in findings if finding["check"] == "gpu" and finding["level"] == "ok"]
    assert place.tiny or well, done.stdout
    return {"findings": len(findings), "GPUs that compute well": len(well)}
