"""A GPU's node needs no numba: in a process that can't import it, the whole path runs, on the virtual GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.gpus.cuda_core import KINDS
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.machine.small_site import ROOT
from tests.support.machine.without_numba import run

NAMES = ("fp8 KV", "n-gram", "copies", "adapters, tree", "grammars", "grammars, chain")


def test_every_kind_of_step_runs_without_numba() -> None:
    """Each stream equals the one that numba's kernels and sampler made on the CPU."""
    command = [sys.executable, "-m", "tests.support.machine.without_numba", *NAMES]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=HANG_GUARD_S * 10, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "numba was wanted" not in done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [run(KINDS[name], on_gpu=False) for name in NAMES]
