"""Remember which GPU features passed a check on this machine. `auto` takes such a feature only after its check.

A result counts for the driver, torch and kind of GPU with which it was found. It lies in this user's cache folder.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import torch

from shared.config.cache_folder import baton_folder
from shared.device.gpu import Gpu

DRIVER_FILE = Path("/proc/driver/nvidia/version")


def results_file() -> Path:
    return baton_folder() / "gpu_checks.json"


def has_passed(check: str, gpu: Gpu) -> bool:
    """Return whether the check passed on each kind of GPU that this process sees."""
    known, kinds = read_results(), kinds_of(gpu)
    return bool(kinds) and all(check in known.get(kind, ()) for kind in kinds)


def remember(check: str, gpu: Gpu, passed: bool) -> None:
    """Raise OSError if the file can't be written."""
    known = read_results()
    for kind in kinds_of(gpu):
        others = [name for name in known.get(kind, ()) if name != check]
        known[kind] = sorted([*others, check]) if passed else others
    file = results_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_suffix(f".{os.getpid()}")
    made.write_text(json.dumps(known, indent=2), encoding="utf-8")
    made.replace(file)


def read_results() -> dict[str, list[str]]:
    """Return the names of passed checks by kind of GPU. A file that is absent or not ours has none."""
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(results_file().read_text(encoding="utf-8"))
        if isinstance(known, dict) and all(isinstance(names, list) for names in known.values()):
            return known
    return {}


def kinds_of(gpu: Gpu) -> list[str]:
    """Return what a result depends on, for each kind of GPU here."""
    driver = ""
    with contextlib.suppress(OSError):
        driver = DRIVER_FILE.read_text(encoding="utf-8").partition("\n")[0].strip()
    kind = gpu.current_device().type if gpu.is_available() else ""
    numbers = range(gpu.device_count()) if kind else ()
    names = {gpu.describe(torch.device(kind, number)).name for number in numbers}
    return [f"{name}; torch {torch.__version__}; {driver or 'driver unknown'}" for name in sorted(names)]
