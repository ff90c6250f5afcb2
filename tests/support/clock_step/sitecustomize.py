"""Adds the number in a file to the wall clock of a Python process that has this folder on its path."""

from __future__ import annotations

import os
import time
from pathlib import Path

STEP = Path(os.environ["BATON_TEST_CLOCK_STEP"])
_time, _time_ns = time.time, time.time_ns


def step_s() -> float:
    return float(STEP.read_text())


time.time = lambda: _time() + step_s()
time.time_ns = lambda: _time_ns() + int(step_s() * 1e9)
