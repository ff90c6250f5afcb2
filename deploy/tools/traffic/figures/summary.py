"""Summarize a run's records as figures. Pure.

README.md defines smooth goodput: the requests' value in tokens, per second (arXiv:2410.14257).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deploy.tools.traffic.figures.figures import NOTHING, Estimate, Floats, Pooled, Resampling, one_each, quantile
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.figures.slo import Slo
from deploy.tools.traffic.figures.talk_figures import NO_TALKS, TalkFigures, talk_figures

LEAST_SLICES = 20
LEVELS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Reader:
    """An assumed reader of the answers, for smooth goodput. Without a bound on TTFT, the first token is never late."""

    reading_tps: float = 10.0
    idle_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Window:
    begin: float
    end: float

    def has(self, record: RequestRecord) -> bool:
        return self.begin <= record.due < self.end

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def per_slice(self, times: Sequence[float], amounts: Sequence[float]) -> Floats:
        """Return the sum of the amounts in each second, or in shorter slices of a short window.

        Amounts outside the window are left out. An amount exactly at the window's end counts, because a closed
        loop's last answer ends then.
        """
        num_slices = max(LEAST_SLICES, round(self.seconds))
        return np.histogram(times, num_slices, (self.begin, max(self.begin, self.end)), weights=amounts)[0]


@dataclass(frozen=True, slots=True)
class Lag:
    """How late the client sent requests and handled arrivals, in seconds.

    `handle_*`: the lateness of chunks or of loop beats, whichever is larger. Without the kernel's arrival times,
    token times include this lateness.
    """

    send_p50: float = math.nan
    send_p99: float = math.nan
    send_max: float = math.nan
    handle_p50: float = math.nan
    handle_p99: float = math.nan
    handle_max: float = math.nan


@dataclass(frozen=True, slots=True)
class Summary:
    """Latencies are in seconds, e.g. latencies["ttft"]["p99"]. Rates are per second.

    It has many fields because each is a line of the report.
    """

    seconds: float
    num_requests: int
    num_ok: int
    num_failed: int
    num_hung_up: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    latencies: dict[str, dict[str, Estimate]]
    requests_per_s: Estimate
    output_tokens_per_s: Estimate
    slo: str
    slo_share: Estimate
    goodput: Estimate
    smooth_goodput: Estimate  # the requests' value in tokens, per second
    lag: Lag
    errors: dict[str, int] = field(default_factory=dict)
    talks: TalkFigures = NO_TALKS


def summarize(
    records: Sequence[RequestRecord],
    window: Window,
    slo: Slo,
    reader: Reader,
    seed: int = 0,
    beats: Sequence[float] = (),
) -> Summary:
    """Summarize a run. `beats`: the client loop's lateness at regular times.

    Latencies and shares cover the requests due in the window. Rates count all answers and tokens that came in the
    window. Latencies, shares and goodput exclude golden probes: prefix caches may speed these up.
    """
    counted = sorted((record for record in records if window.has(record)), key=lambda record: record.due)
    judged = [record for record in counted if record.probe is None]
    boot = Resampling(len(judged), seed)
    good = [float(slo.is_met(record)) for record in judged]
    due = [record.due for record in judged]
    failed = [record for record in counted if record.error]
    whole = [record for record in records if record.is_whole]
    return Summary(
        seconds=window.seconds,
        num_requests=len(counted),
        num_ok=sum(record.is_whole for record in counted),
        num_failed=len(failed),
        num_hung_up=sum(record.hung_up for record in counted),
        prompt_tokens=sum(record.prompt_tokens for record in counted),
        cached_tokens=sum(record.cached_tokens or 0 for record in counted),
        output_tokens=sum(record.num_tokens for record in counted),
        latencies=latencies_of(judged, boot),
        requests_per_s=rate([one.end for one in whole], [1.0] * len(whole), window, seed),
        output_tokens_per_s=rate(*arrivals_of(records), window, seed),
        slo=str(slo),
        slo_share=boot.share(good, [float(not record.hung_up) for record in judged]),
        goodput=rate(due, good, window, seed),
        smooth_goodput=rate(due, [worth(record, slo, reader) for record in judged], window, seed),
        lag=lag_of(counted, beats),
        errors=count_errors(failed),
        talks=talk_figures(judged, boot),
    )


def rate(times: Sequence[float], amounts: Sequence[float], window: Window, seed: int) -> Estimate:
    """Return a rate per second of the window, with an interval from its time slices.

    Unlike single requests, slices also reflect how evenly requests came.
    """
    if not window.seconds > 0:
        return NOTHING
    slices = window.per_slice(times, amounts)
    return Resampling(len(slices), seed).total(slices, window.seconds)


def arrivals_of(records: Sequence[RequestRecord]) -> tuple[list[float], list[float]]:
    """Return (times, token amounts) of all chunks. The server's total, if known, is split over the chunks."""
    times = [at for record in records for at in record.at]
    amounts = [
        count * record.num_tokens / total
        for record in records
        for total in [sum(record.counts)]
        for count in record.counts
    ]
    return times, amounts


def latencies_of(counted: Sequence[RequestRecord], boot: Resampling) -> dict[str, dict[str, Estimate]]:
    """Return TTFT over all requests that got a token, and the other latencies over whole answers."""
    whole = [record if record.is_whole else None for record in counted]
    pools = {
        "ttft": one_each([record.ttft for record in counted]),
        "itl": pooled_gaps(whole),
        "tpot": one_each([one.tpot if one and one.num_tokens > 1 else math.nan for one in whole]),
        "e2e": one_each([one.e2e if one else math.nan for one in whole]),
    }
    return {name: row_of(pool, boot) for name, pool in pools.items()}


def row_of(pool: Pooled, boot: Resampling) -> dict[str, Estimate]:
    estimates = boot.quantiles(pool, list(LEVELS.values()))
    mean = Estimate(pool.mean(), math.nan, math.nan)
    return {"mean": mean, **dict(zip(LEVELS, estimates, strict=True)), "max": maximum_of(pool)}


def maximum_of(pool: Pooled) -> Estimate:
    """Return no interval: resamples never exceed the measured maximum."""
    return Estimate(float(pool.values[-1]), math.nan, math.nan) if len(pool.values) else NOTHING


def pooled_gaps(whole: Sequence[RequestRecord | None]) -> Pooled:
    values: list[float] = []
    owners: list[int] = []
    weights: list[int] = []
    for owner, record in enumerate(whole):
        for wait, count in record.token_gaps() if record else ():
            values.append(wait)
            owners.append(owner)
            weights.append(count)
    return Pooled(values, owners, weights)


def worth(record: RequestRecord, slo: Slo, reader: Reader) -> float:
    """Return one request's value in tokens for smooth goodput.

    If our client left, the tokens so far count. A failed request is worth 0: otherwise a server would gain by breaking
    off late streams.
    """
    if record.error:
        return 0.0
    start = slo.ttft if math.isfinite(slo.ttft) else record.ttft
    idle, num_before = 0.0, 0
    for at, count in zip(record.at, record.counts, strict=True):
        idle = max(idle, at - record.sent - start - num_before / reader.reading_tps)
        num_before += count
    return max(0.0, record.num_tokens - reader.idle_weight * reader.reading_tps * idle)


def lag_of(counted: Sequence[RequestRecord], beats: Sequence[float]) -> Lag:
    sends = [record.send_lag for record in counted if not math.isnan(record.sent)]
    handled = [late for record in counted for late in record.late if not math.isnan(late)]
    return Lag(
        quantile(sends, 0.5),
        quantile(sends, 0.99),
        max(sends, default=math.nan),
        later(quantile(handled, 0.5), quantile(beats, 0.5)),
        later(quantile(handled, 0.99), quantile(beats, 0.99)),
        later(max(handled, default=math.nan), max(beats, default=math.nan)),
    )


def later(one: float, other: float) -> float:
    """Return the maximum; NaN only if both are NaN."""
    return max((value for value in (one, other) if not math.isnan(value)), default=math.nan)


def count_errors(failed: Sequence[RequestRecord]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in failed:
        counts[record.error] = counts.get(record.error, 0) + 1
    return dict(sorted(counts.items(), key=lambda pair: -pair[1]))
