"""Compiled kernels are kept on disk. What they inline from other files may change without their own file: an upgrade
keeps the date of a file that it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.core import sampling_params
from shared.kernel.code.jit import stamp_name
from tests.support.machine.patience import HANG_GUARD_S

ROOT = Path(__file__).resolve().parents[4]
CALLER = """
from part import twice
from shared.kernel.code.jit import kernel

@kernel()
def call(x):
    return twice(x) + 1

print(call(3.0))
"""
CFUNC = """
from part import twice
from shared.kernel.code.jit import compile_task

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
from shared.kernel.code.jit import kernel

@kernel()
def twice(x):
    return {factor} * x
"""

VARIANTS = """
import ctypes
import sys
from shared.kernel.code.jit import compile_task, kernel

def make(size):
    def task(words, share, worker):
        words[0] = size
    return compile_task(task)

@kernel()
def twice(x):
    return 2 * x

number = float(sys.argv[1]) if "." in sys.argv[1] else int(sys.argv[1])
words, compiled = (ctypes.c_int64 * 1)(), make(int(number))
kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 2)
kind(compiled.address)(ctypes.addressof(words), 0, 0)
print(words[0], twice(number))
"""

FAULTY = """
import logging
import resource
import shutil
from pathlib import Path
from shared.kernel.code.jit import kernel

logging.basicConfig(format="%(message)s")

@kernel()
def twice(x):
    return 2 * x

cache = Path(__file__).with_name("cache")

def say(number):
    print(twice(number), len([*cache.rglob("*.nbc")]), len([*cache.rglob("*.tmp.*")]))

say(3)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, -1))  # like a full disk, an OSError
say(3.5)
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
shutil.rmtree(cache)
say(3j)
shutil.rmtree(cache)
cache.touch()
say(True)
"""


INSTALLED = """
from pathlib import Path
from shared.core import launcher

launcher.CODE = Path("/nowhere")
"""


def answer_of(folder: Path, *arguments: str, variable: str = "NUMBA_CACHE_DIR") -> str:
    return run_caller(folder, *arguments, variable=variable).stdout.strip()


def run_caller(folder: Path, *arguments: str, variable: str = "NUMBA_CACHE_DIR") -> subprocess.CompletedProcess[str]:
    run = subprocess.run(
        [sys.executable, "caller.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), variable: str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
    )
    assert run.returncode == 0, run.stderr
    return run


@pytest.mark.parametrize("caller", [CALLER, CFUNC], ids=["kernel", "task"])
def test_what_a_kernel_inlines_from_another_file_is_never_stale(tmp_path: Path, caller: str) -> None:
    (tmp_path / "caller.py").write_text(caller)
    (tmp_path / "part.py").write_text(PART.format(factor=2))
    assert answer_of(tmp_path) == "7.0"
    assert answer_of(tmp_path) == "7.0", "from the disk"
    (tmp_path / "part.py").write_text(PART.format(factor=5))
    assert answer_of(tmp_path) == "16.0"


def test_code_for_another_table_of_parameters_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns that the sampler's kernels read are constants in their code."""

    def name() -> str:
        def kernel() -> None: ...

        stamp_name(kernel)
        return kernel.__qualname__

    before = name()
    table = tmp_path / "sampling_params.py"
    table.write_bytes(Path(sampling_params.__file__).read_bytes())
    monkeypatch.setattr(sampling_params, "__file__", str(table))
    assert name() == before
    table.write_text("top_k = 1")
    assert name() != before


def kept_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (folder / "cache").rglob("*.nb[ci]")}


def test_a_variant_s_code_has_files_of_its_own(tmp_path: Path) -> None:
    """If two processes wrote one index at the same time, a variant could get another one's code."""
    (tmp_path / "caller.py").write_text(VARIANTS)
    assert answer_of(tmp_path, "3") == "3 6"
    first = kept_in(tmp_path)
    assert answer_of(tmp_path, "4.5") == "4 9.0"
    both = kept_in(tmp_path)
    assert len(both) == 2 * len(first) and first.items() <= both.items()
    assert answer_of(tmp_path, "3") == "3 6" and kept_in(tmp_path) == both, "from the disk"


@pytest.mark.parametrize("ending", [".nbi", ".nbc"], ids=["index", "code"])
def test_a_file_that_was_cut_off_is_written_anew(tmp_path: Path, ending: str) -> None:
    (tmp_path / "caller.py").write_text(VARIANTS)
    assert answer_of(tmp_path, "3") == "3 6"
    whole = kept_in(tmp_path)
    for path, code in whole.items():
        if path.suffix == ending:
            path.write_bytes(code[: len(code) // 2])
    assert answer_of(tmp_path, "3") == "3 6"
    kept = kept_in(tmp_path)
    assert kept.keys() == whole.keys() and all(len(kept[path]) > len(code) // 2 for path, code in whole.items())


def test_an_installation_keeps_no_code_among_its_files(tmp_path: Path) -> None:
    """pip would not uninstall it. A checkout keeps it beside the source, where `make clean` finds it."""
    (tmp_path / "caller.py").write_text(INSTALLED + VARIANTS)
    assert answer_of(tmp_path, "3", variable="XDG_CACHE_HOME") == "3 6"
    kept = kept_in(tmp_path)
    assert kept and all(tmp_path / "cache/baton/kernels" in path.parents for path in kept)
    assert {*tmp_path.rglob("*.nb[ci]")} == set(kept)
    (tmp_path / "caller.py").write_text(VARIANTS)
    assert answer_of(tmp_path, "3", variable="XDG_CACHE_HOME") == "3 6"
    assert {path.parent for path in {*tmp_path.rglob("*.nb[ci]")} - set(kept)} == {tmp_path / "__pycache__"}


def test_a_disk_that_keeps_no_code_costs_only_time(tmp_path: Path) -> None:
    """It is full, then its folder is removed, then it can't be written. Each line: the answer, codes, drafts."""
    (tmp_path / "caller.py").write_text(FAULTY)
    run = run_caller(tmp_path)
    assert run.stdout.splitlines() == ["6 1 0", "7.0 1 0", "6j 1 0", "2 0 0"]
    told = run.stderr.splitlines()
    assert len(told) == 2 and all("compiled kernels can't be kept on disk" in line for line in told), told
    assert "File too large" in told[0] and "Not a directory" in told[1]
