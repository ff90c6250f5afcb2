"""What has been found so far: one file to which every beginning and every end of a check is appended at once.

    {"event": "run", "machine": {...}, "code": "..."}
    {"event": "begin", "name": "races"}
    {"event": "end", "name": "races", "state": "passed", "seconds": 41.2, "figures": {...}, "told": ""}

A run that is cut off leaves a beginning without an end: the check is tried once more, then it counts as cut off. A line
that was cut off itself is skipped. A run of other sources begins anew: the file alone keeps what older ones did.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED, CUT_OFF = "passed", "failed", "skipped", "cut off"
BAD = (FAILED, CUT_OFF)
MOST_TRIES = 2
FILE = "results.jsonl"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`told`: why a check was skipped, or the last words of one that failed."""

    name: str
    state: str
    seconds: float
    figures: Mapping[str, Any]
    told: str = ""


@dataclass(frozen=True, slots=True)
class Recorded:
    """`run`: the number of the run that it is of, from 0."""

    outcome: Outcome
    run: int


@dataclass(frozen=True, slots=True)
class Run:
    """`code`: what the sources were, as a digest."""

    machine: Mapping[str, Any]
    code: str


class Book:
    """Owner of the file. What is in it stands at the same time in `runs`, `ended` and `tries`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.runs: list[Run] = []
        self.ended: dict[str, Recorded] = {}
        self.tries: dict[str, int] = {}
        self._path = folder / FILE
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        for entry in entries(text.splitlines()):
            self._take(entry)
        if text and not text.endswith("\n"):
            self._append("\n")

    def begin_run(self, machine: Mapping[str, Any], code: str) -> None:
        self._write({"event": "run", "machine": dict(machine), "code": code})

    def begin(self, name: str) -> None:
        self._write({"event": "begin", "name": name})

    def end(self, outcome: Outcome) -> None:
        self._write({"event": "end", **asdict(outcome)})

    def forget(self, name: str) -> None:
        """It is run again as if it never had been."""
        self._write({"event": "forget", "name": name})

    def is_left(self, name: str) -> bool:
        return name not in self.ended and self.tries.get(name, 0) < MOST_TRIES

    def outcome(self, name: str) -> Outcome | None:
        """None: it was never ended, and is still to be tried."""
        if name in self.ended:
            return self.ended[name].outcome
        if self.tries.get(name, 0) < MOST_TRIES:
            return None
        return Outcome(name, CUT_OFF, 0.0, {}, f"the whole run ended in the middle of it, {MOST_TRIES} times")

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._append(json.dumps(entry) + "\n")
        self._take(entry)

    def _append(self, text: str) -> None:
        """It is on the disk when this returns: the machine may be taken away at any moment."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _take(self, entry: Mapping[str, Any]) -> None:
        fields = dict(entry)
        event = fields.pop("event")
        if event == "run":
            run = Run(fields["machine"], fields["code"])
            if self.runs and run.code != self.runs[-1].code:
                self.ended.clear()
                self.tries.clear()
            self.runs.append(run)
        elif event == "begin":
            self.tries[fields["name"]] = self.tries.get(fields["name"], 0) + 1
        elif event == "end":
            self.ended[fields["name"]] = Recorded(Outcome(**fields), len(self.runs) - 1)
        elif event == "forget":
            self.ended.pop(fields["name"], None)
            self.tries.pop(fields["name"], None)


def entries(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "event" in found:
            yield found
