"""Runs Python as on an older processor: our kernels are compiled for it, and torch uses its vectors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite.binding import get_host_cpu_features

from tests.support.machine.patience import HANG_GUARD_S

ROOT = Path(__file__).resolve().parents[3]
AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+sse4.2"
PROCESSORS = {
    "haswell": {"NUMBA_CPU_FEATURES": AVX2, "ATEN_CPU_CAPABILITY": "avx2"},  # of 2013
    "skylake-avx512": {"NUMBA_CPU_FEATURES": AVX2 + ",+avx512f,+avx512bw,+avx512vl,+avx512dq"},  # of 2017: no bfloat16
    "znver3": {"NUMBA_CPU_FEATURES": AVX2, "ATEN_CPU_CAPABILITY": "avx2"},  # of 2020
}


def missing_here(processor: str) -> list[str]:
    here = get_host_cpu_features()
    asked = PROCESSORS[processor]["NUMBA_CPU_FEATURES"].split(",")
    return [name for name in (feature.removeprefix("+") for feature in asked) if not here.get(name)]


def run_python(processor: str, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` from the repository's root. Compiled code is kept in `cache`.

    Skip the test if this machine lacks some of the processor's instructions."""
    if missing := missing_here(processor):
        pytest.skip(f"this machine lacks {', '.join(missing)}")
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    here = {"NUMBA_CPU_NAME": processor, "NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**outer, **PROCESSORS[processor], **here},
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S * 20,
        check=False,
    )
