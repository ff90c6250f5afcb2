"""Runs lint and the test tiers one after another, each within its time budget, and prints what each took.

    python tests/tiers.py all | fast | lint

A tier that exceeds its budget fails: tests that grow slow are found when it happens. GPU tests run on their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS_COLLECTED = 5
BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class Tier:
    """One command and the seconds it may take on two cores."""

    name: str
    budget_s: float
    command: tuple[str, ...]


def pytest_tier(name: str, budget_s: float, *options: str) -> Tier:
    return Tier(name, budget_s, (sys.executable, "-m", "pytest", "-q", f"tests/{name}", "--durations=5", *options))


LINT = (
    Tier("ruff", 20, (str(BIN / "ruff"), "check", ".")),
    Tier("format", 20, (str(BIN / "ruff"), "format", "--check", ".")),
    Tier("mypy", 100, (str(BIN / "mypy"),)),
    Tier("layers", 30, (str(BIN / "lint-imports"),)),
    Tier("mutants", 10, (sys.executable, "tests/mutants/check.py")),
)
FAST = (pytest_tier("unit", 130, "--fast"), pytest_tier("simulation", 60, "--fast"))
FULL = (
    pytest_tier("unit", 500),
    pytest_tier("simulation", 270),
    pytest_tier("integration", 860),
    pytest_tier("chaos", 290),
)
PLANS = {"lint": LINT, "fast": LINT + FAST, "all": LINT + FULL}


def run(tier: Tier) -> tuple[bool, float]:
    """Whether it passed in time, and the seconds it took. The whole process group goes when time is up."""
    start = time.monotonic()
    process = subprocess.Popen(tier.command, cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(timeout=tier.budget_s)
    except subprocess.TimeoutExpired:
        print(f"tiers: {tier.name} exceeded its {tier.budget_s:.0f} s", flush=True)
        status = -1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status in (0, NO_TESTS_COLLECTED), time.monotonic() - start


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[1] not in PLANS:
        print(f"usage: python tests/tiers.py {' | '.join(PLANS)}", file=sys.stderr)
        return 2
    results = []
    for tier in PLANS[argv[1]]:
        print(f"\n== {tier.name}", flush=True)
        results.append((tier, *run(tier)))
    print()
    for tier, passed, seconds in results:
        print(f"{'passed' if passed else 'FAILED'}  {tier.name:<12} {seconds:6.0f} s of {tier.budget_s:.0f}")
    print(f"{'':8}{'in all':<12} {sum(seconds for _, _, seconds in results):6.0f} s")
    return 0 if all(passed for _, passed, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
