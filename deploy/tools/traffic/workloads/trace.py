"""Replay a recorded load: a trace in Mooncake's format, one JSON object per line.

  {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

`timestamp` is in milliseconds. Each hash id is one block of 512 prompt tokens, and equal ids are equal blocks
(github.com/kvcache-ai/Mooncake, FAST25-release; arXiv:2407.00079, section 4). The texts were never published, so each
id gets made-up words.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from deploy.tools.traffic.workloads.workload import Session, Turn, text_of
from shared.core.errors import ConfigError

BLOCK_TOKENS = 512
CACHED_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class TraceRow:
    at_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """`speed`: a divisor of all times. `longest`: the most tokens of a prompt; 0 for no limit."""

    rows: tuple[TraceRow, ...]  # in order of time; the first time is 0
    speed: float = 1.0
    longest: int = 0

    def offsets(self) -> Iterator[float]:
        return (row.at_s / self.speed for row in self.rows)

    def sessions(self, seed: int) -> Iterator[Session]:
        for number, row in enumerate(self.rows):
            text = prompt_of(row, f"{seed} row {number}", self.longest)
            yield Session((Turn(text, row.output_length),))


def read_trace(path: Path, speed: float, longest: int) -> Trace:
    if not (math.isfinite(speed) and speed > 0):
        raise ConfigError(f"--trace-speed is {speed:g}; it must be above 0")
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--trace {path}: {error}") from None
    rows = sorted((row_of(path, number, line) for number, line in enumerate(lines, 1)), key=lambda row: row.at_s)
    if not rows:
        raise ConfigError(f"--trace {path}: it is empty")
    first = rows[0].at_s
    return Trace(
        tuple(TraceRow(r.at_s - first, r.input_length, r.output_length, r.hash_ids) for r in rows), speed, longest
    )


def row_of(path: Path, number: int, line: str) -> TraceRow:
    try:
        fields: dict[str, Any] = json.loads(line)
        row = TraceRow(
            float(fields["timestamp"]) / 1e3,
            int(fields["input_length"]),
            max(1, int(fields["output_length"])),
            tuple(int(one) for one in fields.get("hash_ids") or ()),
        )
        if row.input_length < 1 or not math.isfinite(row.at_s):
            raise ValueError(line)
        return row
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--trace {path}, line {number}: it must be an object with timestamp (ms), input_length, output_length and "
            "perhaps hash_ids"
        ) from None


def prompt_of(row: TraceRow, own: str, longest: int) -> str:
    """Return the blocks of the row's ids. Further words of a longer prompt are drawn for this row alone."""
    length = min(row.input_length, longest) if longest else row.input_length
    words: list[str] = []
    for hash_id in row.hash_ids:
        words += block_of(hash_id)[: length - len(words)]
    if len(words) < length:
        words += text_of(random.Random(own), length - len(words)).split(" ")
    return " ".join(words)


@lru_cache(CACHED_BLOCKS)
def block_of(hash_id: int) -> list[str]:
    return text_of(random.Random(f"block {hash_id}"), BLOCK_TOKENS).split(" ")
