"""Compiled kernels are kept on disk. What they inline from other files may change without their own file: an upgrade
keeps the date of a file that it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_GUARD_S

ROOT = Path(__file__).resolve().parents[2]
CALLER = """
from part import twice
from shared.kernel.jit import kernel

@kernel()
def call(x):
    return twice(x) + 1

print(call(3.0))
"""
CFUNC = """
from part import twice
from shared.kernel.jit import compile_task

def task(words, share, worker):
    words[2] = twice(words[2])

import ctypes
words = (ctypes.c_int64 * 3)(0, 0, 3)
compiled = compile_task(task)
kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 2)
kind(compiled.address)(ctypes.addressof(words), 0, 0)
print(words[2] + 1.0)
"""
PART = """
from shared.kernel.jit import kernel

@kernel()
def twice(x):
    return {factor} * x
"""


def answer_of(folder: Path) -> str:
    run = subprocess.run(
        [sys.executable, "caller.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("caller", [CALLER, CFUNC], ids=["kernel", "task"])
def test_what_a_kernel_inlines_from_another_file_is_never_stale(tmp_path: Path, caller: str) -> None:
    (tmp_path / "caller.py").write_text(caller)
    (tmp_path / "part.py").write_text(PART.format(factor=2))
    assert answer_of(tmp_path) == "7.0"
    assert answer_of(tmp_path) == "7.0", "from the disk"
    (tmp_path / "part.py").write_text(PART.format(factor=5))
    assert answer_of(tmp_path) == "16.0"
