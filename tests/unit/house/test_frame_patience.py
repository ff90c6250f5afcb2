"""No test has a bound of its own for what must happen: a slow machine would fail it. HANG_GUARD_S is everybody's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
FOLDERS = ("unit", "integration", "chaos", "simulation", "support", "drill")
CALLS = r"\btimeout=|\.(?:wait|join|result|communicate)\(|monotonic\(\) \+ |wait_for\(.*, "
BOUND = re.compile(rf"(?:{CALLS})(\d+(?:\.\d+)?)\b")
LONGEST_S = 5.0  # a shorter one is no bound of a wait: nothing is to happen by then, or a loop goes on


def bounds(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if any(float(found) > LONGEST_S for found in BOUND.findall(line)):
            yield f"{number}: {line.strip()}"


def test_waits_end_by_the_hang_guard_alone() -> None:
    files = [path for folder in FOLDERS for path in (TESTS / folder).rglob("*.py") if path != Path(__file__)]
    found = {str(path): own for path in files if (own := list(bounds(path.read_text())))}
    assert len(files) > 100 and not found


@pytest.mark.parametrize(
    "line",
    [
        "done = subprocess.run(command, timeout=60)",
        "assert process.wait(10) == 0",
        "end = time.monotonic() + 20",
        "await asyncio.wait_for(link.receive(), 20.0)",
    ],
)
def test_the_check_finds_what_it_is_for(line: str) -> None:
    assert list(bounds(line)) and not list(bounds(re.sub(r"\d[\d.]*(?=\)|$)", "HANG_GUARD_S", line)))
