"""What `baton doctor --gpu` finds."""

from __future__ import annotations

import json
import subprocess

from shared.core import launcher
from shared.device.passed_checks import has_passed
from shared.transfer.transports import CHECKED
from tests.gpu.place import Place
from tests.support.machine.patience import HANG_GUARD_S


def doctor(place: Place) -> dict[str, object]:
    """Nothing broken; on a GPU machine, one GPU at least that computes the CPU's logits, and `auto` takes cuda_ipc."""
    command = launcher.command("deploy.cli", "doctor", "--gpu", "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_GUARD_S)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    findings = json.loads(done.stdout)["findings"]
    well = [finding for finding in findings if finding["check"] == "gpu" and finding["level"] == "ok"]
    figures: dict[str, object] = {"findings": len(findings), "GPUs that compute well": len(well)}
    if not place.tiny:
        assert well, done.stdout
        figures["auto takes cuda_ipc"] = int(has_passed(CHECKED, place.gpu))
    return figures
