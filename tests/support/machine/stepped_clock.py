"""Steps the wall clock of processes, as a person or NTP does it on a whole machine. Other clocks go on."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "clock_step"


def environment(clock: Path) -> dict[str, str]:
    """Return what processes need whose clock follows the file."""
    step(clock, 0.0)
    return {"PYTHONPATH": str(FOLDER), "BATON_TEST_CLOCK_STEP": str(clock)}


def step(clock: Path, seconds: float) -> None:
    """Set how far the clock is ahead."""
    fresh = clock.with_suffix(".new")
    fresh.write_text(str(seconds))
    fresh.rename(clock)
