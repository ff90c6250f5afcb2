"""A run's results and their file format, without texts of prompts or answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from deploy.tools.traffic.figures.check import Check
from deploy.tools.traffic.figures.figures import Estimate
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.figures.summary import Summary
from shared.core.errors import ConfigError

FORMAT = 1
REPORT = "report.json"


@dataclass(frozen=True, slots=True)
class RequestRow:
    """Times are in seconds; `due` and `sent` count from the run's start.

    It has many fields because each is a column of the written table.
    """

    number: int
    session: int
    turn: int
    due: float
    sent: float | None
    ttft: float | None
    tpot: float | None
    e2e: float | None
    longest_gap: float | None
    send_lag: float | None
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    status: int
    finish_reason: str
    error: str
    hung_up: bool
    golden: int | None


@dataclass(frozen=True, slots=True)
class SweepPoint:
    rate: float
    slo_share: Estimate
    goodput: Estimate
    ttft_p99: float
    tpot_p99: float


@dataclass(frozen=True, slots=True)
class Series:
    """By second of the run: tokens, waits per token, and requests open at the second's start."""

    tokens: list[int]
    open_requests: list[int]
    gap_p50: list[float | None]
    gap_p99: list[float | None]


@dataclass(frozen=True, slots=True)
class LoadReport:
    title: str
    begun: str  # in UTC and ISO 8601
    server: str
    model: str
    command: str
    summary: Summary
    checks: list[Check]
    series: Series
    rows: list[RequestRow]
    sweep: list[SweepPoint] = field(default_factory=list)
    best_rate: float | None = None
    format: int = FORMAT


def row_of(record: RequestRecord) -> RequestRow:
    gaps = record.gaps()
    return RequestRow(
        number=record.number,
        session=record.session,
        turn=record.turn,
        due=record.due,
        sent=known(record.sent),
        ttft=known(record.ttft),
        tpot=record.tpot if record.is_whole else None,
        e2e=known(record.e2e) if record.is_whole else None,
        longest_gap=max(gaps) if gaps else None,
        send_lag=known(record.send_lag),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.num_tokens,
        status=record.status,
        finish_reason=record.finish_reason,
        error=record.error,
        hung_up=record.hung_up,
        golden=record.probe,
    )


def known(value: float) -> float | None:
    return None if math.isnan(value) else value


def encode(report: LoadReport) -> bytes:
    """Encode as JSON, with null for NaN."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def read_report(path: Path) -> LoadReport:
    """Read the file `path`, or REPORT in the folder `path`. Raise ConfigError if it is not a report."""
    file = path / REPORT if path.is_dir() else path
    try:
        raw = msgspec.json.decode(file.read_bytes())
        found = msgspec.convert(with_nan(raw, ""), LoadReport)
    except (OSError, msgspec.MsgspecError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a report of baton load: {error}") from None
    if found.format != FORMAT:
        raise ConfigError(f"{file} has format {found.format}; this baton reads format {FORMAT}")
    return found


NULLABLE = {"sent", "ttft", "tpot", "e2e", "longest_gap", "send_lag", "golden", "best_rate", "gap_p50", "gap_p99"}
NULLABLE |= {"cached_tokens"}


def with_nan(tree: Any, name: str) -> Any:
    """Turn null into NaN, except in nullable fields. `name`: the field that holds `tree`."""
    if isinstance(tree, dict):
        return {key: with_nan(value, key) for key, value in tree.items()}
    if isinstance(tree, list):
        return [with_nan(value, name) for value in tree]
    return math.nan if tree is None and name not in NULLABLE else tree


def series_of(records: Sequence[RequestRecord], seconds: float) -> Series:
    num_seconds = max(1, math.ceil(seconds))
    tokens = [0] * num_seconds
    waits: list[list[float]] = [[] for _ in range(num_seconds)]
    for record in records:
        gaps = [math.nan, *record.gaps()]
        for at, count, gap in zip(record.at, record.counts, gaps, strict=False):
            if 0 <= at < num_seconds:
                tokens[int(at)] += count
                waits[int(at)] += [] if math.isnan(gap) else [gap / count]
    return Series(
        tokens,
        [sum(is_open(record, second) for record in records) for second in range(num_seconds)],
        [level(one, 0.5) for one in waits],
        [level(one, 0.99) for one in waits],
    )


def is_open(record: RequestRecord, at: float) -> bool:
    return record.sent <= at and not record.end <= at


def level(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
