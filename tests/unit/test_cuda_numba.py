"""A GPU's node needs no numba: in a process that can't import it, the whole path runs on the virtual GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.cuda_core import KINDS
from tests.support.patience import HANG_GUARD_S
from tests.support.small_site import ROOT
from tests.support.without_numba import run

NAMES = ("fp8 KV", "n-gram", "copies", "adapters, tree", "grammars", "grammars, chain")


@pytest.mark.slow
def test_every_kind_of_step_runs_without_numba() -> None:
    """Prints nothing but streams: the CPU's, which numba's sampler drew."""
    command = [sys.executable, "-m", "tests.support.without_numba", *NAMES]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=HANG_GUARD_S * 10, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "on the path of a GPU" not in done.stderr, "somebody went on without it"
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert told == [run(KINDS[name], on_gpu=False) for name in NAMES]
