"""Remember which GPU features passed a check on this machine. `auto` takes such a feature only after its check.

A result counts for the driver, torch and GPUs with which it was found. It lies in this user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch

from shared.config.machine.cache_folder import baton_folder
from shared.device.gpu import Gpu, devices

DRIVER_FILE = Path("/proc/driver/nvidia/version")


class Passed(msgspec.Struct, frozen=True):
    """`gpus`: uuids of all GPUs that were tried together."""

    check: str
    torch: str
    driver: str
    gpus: frozenset[str]


def results_file() -> Path:
    return baton_folder() / "gpu_checks.json"


def has_passed(check: str, gpu: Gpu) -> bool:
    """Return whether the check passed for all GPUs that this process sees, tried together."""
    seen, now = visible_uuids(gpu), versions()
    known = (one for one in read_results() if (one.check, one.torch, one.driver) == (check, *now))
    return bool(seen) and any(seen <= one.gpus for one in known)


def remember(check: str, gpu: Gpu, passed: bool) -> None:
    """Without GPUs, nothing is written. Raise OSError if the file can't be written."""
    seen = visible_uuids(gpu)
    if not seen:
        return
    kept = [one for one in read_results() if one.check != check or not seen & one.gpus]
    write_results([*kept, Passed(check, *versions(), seen)] if passed else kept)


def read_results() -> list[Passed]:
    """A file that is absent or not ours has none."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(results_file().read_bytes(), type=list[Passed])
    return []


def write_results(results: Iterable[Passed]) -> None:
    file = results_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_suffix(f".{os.getpid()}")
    made.write_bytes(msgspec.json.encode(list(results)))
    made.replace(file)


def versions() -> tuple[str, str]:
    """Return torch's version and the driver's."""
    driver = ""
    with contextlib.suppress(OSError):
        driver = DRIVER_FILE.read_text(encoding="utf-8").partition("\n")[0].strip()
    return str(torch.__version__), driver


def visible_uuids(gpu: Gpu) -> frozenset[str]:
    if not gpu.is_available():
        return frozenset()
    return frozenset(map(gpu.uuid, devices(gpu)))


def name_of_visible(gpu: Gpu) -> str:
    """Return a short name that processes share if they see the same GPUs."""
    return hashlib.sha256(",".join(sorted(visible_uuids(gpu))).encode()).hexdigest()[:8]
