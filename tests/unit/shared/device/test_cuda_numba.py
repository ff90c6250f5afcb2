"""A node needs no numba: in a process that can't import it, the whole path runs, on the virtual GPU and on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.gpus.cuda_core import KINDS
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.machine.small_site import ROOT
from tests.support.machine.without_numba import run

NAMES = {
    "cuda": ("fp8 KV", "n-gram", "copies", "adapters, tree", "grammars", "grammars, chain"),
    "cpu": ("fp8 KV", "adapters, tree", "grammars"),
}


def told(device: str) -> tuple[list[object], str]:
    """Return the streams of a process without numba, and what it logged."""
    command = [sys.executable, "-m", "tests.support.machine.without_numba", device, *NAMES[device]]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=HANG_GUARD_S * 10, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_kind_of_step_runs_without_numba(device: str) -> None:
    """Each stream equals the one that numba's kernels and sampler made on the CPU."""
    streams, log = told(device)
    assert ("numba was wanted" in log) == (device == "cpu"), "a GPU's node doesn't ask for it"
    assert streams == [run(KINDS[name], on_gpu=False) for name in NAMES[device]]
