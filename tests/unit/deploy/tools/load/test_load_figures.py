"""Percentiles, intervals and the summary of a run whose script is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.tools.traffic.figures import figures
from deploy.tools.traffic.figures.figures import NOTHING, Pooled, Resampling, one_each, quantile
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.figures.slo import Slo, parse_slo
from deploy.tools.traffic.figures.summary import Reader, Window, rate, summarize, worth
from deploy.tools.traffic.workloads.driver import Driver, HangUps, Limits
from shared.core.errors import ConfigError
from tests.support.web.virtual_load import Script, always, play, single_turns

WINDOW = Window(0.0, 20.0)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_the_value_that_so_many_do_not_exceed(values, level):
    found = quantile(values, level)
    assert found in values
    assert sum(value <= found for value in values) >= level * len(values) - 1e-6
    assert sum(value < found for value in values) < level * len(values) or level * len(values) < 1


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 5)), min_size=1, max_size=30))
def test_a_weight_counts_as_so_many_values(pairs):
    weighted = Pooled([value for value, _ in pairs], range(len(pairs)), [weight for _, weight in pairs])
    repeated = [value for value, weight in pairs for _ in range(weight)]
    assert weighted.quantiles([0.5, 0.99], None) == [quantile(repeated, 0.5), quantile(repeated, 0.99)]
    assert weighted.mean() == pytest.approx(sum(repeated) / len(repeated))


def test_only_intervals_are_made_of_fewer_values(monkeypatch):
    monkeypatch.setattr(figures, "MAX_POOLED", 10)
    pooled = Pooled([float(i) for i in range(99, -1, -1)], range(100), [1] * 100)
    median, top = Resampling(100, resamples=60).quantiles(pooled, [0.5, 1.0])
    assert (median.value, top.value, pooled.values[-1], pooled.mean()) == (49.0, 99.0, 99.0, 49.5)
    assert median.low < 49.0 < median.high and len(pooled.thinned().values) == 10


def coverage(draw, truth, runs=150):
    """How often the interval of the mean holds the truth."""
    hits = 0
    for run in range(runs):
        values = draw(np.random.default_rng(run))
        estimate = Resampling(len(values), seed=run, resamples=200).total(list(values), len(values))
        hits += estimate.low <= truth <= estimate.high
    return hits / runs


def smoothed(rng):
    """Neighbours alike, as queueing makes them: a moving mean over 10."""
    noise = rng.normal(5.0, 1.0, 309)
    return np.convolve(noise, np.ones(10) / 10, "valid")


def test_blocks_know_that_neighbours_are_alike():
    """Single requests drawn at random would say 95 % and mean 50."""
    assert coverage(smoothed, 5.0) > 0.75


def test_nothing_measured_is_nothing_said():
    boot = Resampling(0)
    assert boot.total([], 5.0) == NOTHING
    assert all(math.isnan(one.value) for one in boot.quantiles(one_each([]), [0.5]))
    assert Resampling(3).total([1.0, 1.0, 1.0], 0.0) == NOTHING


def run(script=None, seconds=20.0, rate=5.0, tokens=11, hang_ups=None):
    arrivals = (i / rate for i in range(10**6))
    driver = Driver(single_turns(tokens), arrivals, 0, Limits(seconds), hang_ups)
    return play(driver, script or always(Script(ttft=0.2, itl=0.05)))


def test_a_scripted_run_gives_the_script_back():
    summary = summarize(run(), WINDOW, parse_slo("ttft<300ms,tpot<60ms"), Reader())
    for name, value in (("ttft", 0.2), ("tpot", 0.05), ("itl", 0.05), ("e2e", 0.7)):
        for level in ("mean", "p50", "p99", "max"):
            assert summary.latencies[name][level].value == pytest.approx(value), (name, level)
    assert (summary.num_requests, summary.num_ok, summary.num_failed) == (100, 100, 0)
    assert summary.goodput.value == pytest.approx(5.0)
    assert summary.slo_share.value == 1.0
    steady = summarize(run(), Window(5.0, 20.0), Slo(), Reader())
    assert steady.requests_per_s.value == pytest.approx(5.0)
    assert steady.output_tokens_per_s.value == pytest.approx(55.0, rel=0.01)


def test_what_comes_after_the_window_is_no_rate_of_it():
    """A server that answers one request a second of two that are asked, and is drained for as long again."""
    overloaded = run(lambda request: Script(ttft=2 * request.number - request.due, itl=0.05), seconds=20.0, rate=1.0)
    summary = summarize(overloaded, WINDOW, Slo(), Reader())
    assert summary.num_ok == 20 and summary.requests_per_s.value == pytest.approx(10 / 20)
    assert summary.output_tokens_per_s.value == pytest.approx(10 * 11 / 20, rel=0.05)


def test_answers_in_the_window_to_warm_up_requests_are_counted():
    summary = summarize(run(lambda request: Script(ttft=5.0)), Window(10.0, 20.0), Slo(), Reader())
    assert summary.requests_per_s.value == pytest.approx(5.0)


def test_chunks_that_are_not_tokens_share_the_server_s_count():
    one = record(1.0, 2.0, 30.0, 31.0)
    one.reported_tokens = 12
    assert summarize([one], WINDOW, Slo(), Reader()).output_tokens_per_s.value == pytest.approx(6 / 20)


def poisson(seed, per_s=8.0, seconds=60.0):
    """The rate of requests that are all alike, and its interval."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / per_s, round(2 * per_s * seconds)))
    return rate(list(times), [1.0] * len(times), Window(1.0, seconds), seed)


def test_a_rate_is_as_uncertain_as_the_arrivals_of_like_requests():
    found = [poisson(seed) for seed in range(60)]
    assert sum(one.low <= 8.0 <= one.high for one in found) >= 50
    summary = summarize(run(), Window(0.1, 20.0), Slo(), Reader())
    assert summary.requests_per_s.low < summary.requests_per_s.value < summary.requests_per_s.high


def test_warm_up_is_not_counted():
    script = lambda request: Script(ttft=9.0 if request.due < 4 else 0.2)  # noqa: E731
    summary = summarize(run(script), Window(4.0, 20.0), Slo(), Reader())
    assert summary.num_requests == 80 and summary.latencies["ttft"]["max"].value == pytest.approx(0.2)


def test_what_failed_is_counted_by_its_cause_and_never_good():
    script = lambda request: Script(error="503 no nodes" if request.number % 4 == 0 else "")  # noqa: E731
    summary = summarize(run(script), WINDOW, Slo(), Reader())
    assert summary.num_failed == 25 and summary.errors == {"503 no nodes": 25}
    assert summary.slo_share.value == pytest.approx(0.75)
    assert summary.latencies["e2e"]["max"].value == pytest.approx(0.2)


def test_golden_probes_are_load_but_no_figure_of_it():
    """They are answered from a cache."""
    records = run(lambda request: Script(ttft=0.01 if request.number % 4 == 0 else 2.0))
    for one in records[::4]:
        one.probe = 0
    summary = summarize(records, Window(0.0, 30.0), parse_slo("ttft<1s"), Reader())
    assert summary.latencies["ttft"]["p50"].value == summary.latencies["ttft"]["mean"].value == pytest.approx(2.0)
    assert summary.slo_share.value == summary.goodput.value == 0.0 and summary.smooth_goodput.value < 75 * 11 / 30
    assert summary.num_requests == 100 and summary.output_tokens == 1100
    assert summary.output_tokens_per_s.value == pytest.approx(1100 / 30)


def test_who_hangs_up_is_no_failure_of_the_server():
    summary = summarize(run(hang_ups=HangUps(0.5, 1)), WINDOW, Slo(), Reader())
    assert summary.num_failed == 0 and 30 < summary.num_hung_up < 70
    assert summary.slo_share.value == pytest.approx(1.0) == summary.slo_share.high


def record(*times, counts=None, sent=0.0, end=None):
    made = RequestRecord(0, 0, 0, sent, 100, sent=sent, finish_reason="length")
    for position, at in enumerate(times):
        made.token(at, 0.0, counts[position] if counts else 1)
    made.end = end if end is not None else times[-1] if times else sent
    return made


def test_the_clients_lag_is_its_loops_where_chunks_tell_less():
    lag = summarize([record(1.0, 2.0)], WINDOW, Slo(), Reader(), beats=[0.0] * 9 + [0.5]).lag
    assert (lag.handle_p50, lag.handle_p99, lag.handle_max) == (0.0, 0.5, 0.5)
    assert summarize([record(1.0, 2.0)], WINDOW, Slo(), Reader()).lag.handle_max == 0.0
    assert math.isnan(summarize([], WINDOW, Slo(), Reader()).lag.handle_max)


def test_tokens_that_come_together_share_the_wait():
    got = record(1.0, 1.6, 1.9, counts=[2, 3, 1])
    assert [(pytest.approx(gap), count) for gap, count in [(0.2, 3), (0.3, 1)]] == got.token_gaps()
    assert got.num_tokens == 6 and got.tpot == pytest.approx(0.9 / 5)
    got.reported_tokens = 10
    assert got.tpot == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        ("ttft<=1s", True), ("ttft<999ms", False), ("itl<=601 ms", True), ("itl<599ms", False),
        ("tpot<451ms", True), ("tpot<449ms", False), ("e2e=1.9", True), ("e2e<1.8s,ttft<5s", False), ("", True),
    ],
)  # fmt: skip
def test_each_bound_bounds_its_own(slo, met):
    assert parse_slo(slo).is_met(record(1.0, 1.6, 1.9)) is met


@pytest.mark.parametrize("text", ["ttft", "ttft<", "ttfb<1s", "ttft<1m", "ttft<1s,ttft<2s", "tpot<1..2ms"])
def test_a_wrong_slo_is_refused(text):
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo(text)


SMOOTH = Slo(ttft=1.0)
READER = Reader(reading_tps=10.0, idle_weight=1.0)


def test_smooth_goodput_by_hand():
    in_time = record(*[1.0 + 0.1 * i for i in range(20)])
    assert worth(in_time, SMOOTH, READER) == pytest.approx(20)
    early_burst_then_a_pause = record(*[0.5] * 10, *[1.9 + 0.1 * i for i in range(10)])
    assert worth(early_burst_then_a_pause, SMOOTH, READER) == pytest.approx(20)  # the reader had enough to read
    a_pause_of_a_second = record(*[1.0 + 0.1 * i for i in range(10)], *[3.0 + 0.1 * i for i in range(10)])
    assert worth(a_pause_of_a_second, SMOOTH, READER) == pytest.approx(10)
    late = record(*[2.5 + 0.1 * i for i in range(20)])
    assert worth(late, SMOOTH, READER) == pytest.approx(5)


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=30), st.integers(0, 29), st.floats(0.0, 5.0))
def test_neither_giving_up_nor_holding_back_pays(gaps, position, pause):
    times = list(np.cumsum(gaps))
    whole = worth(record(*times), SMOOTH, READER)
    assert 0 <= whole <= len(times)
    held_back = [max(at, times[min(position, len(times) - 1)] + pause) for at in times]
    assert worth(record(*held_back), SMOOTH, READER) <= whole + 1e-9
    broken_off = record(*times[:position])
    broken_off.error = "too late"
    assert worth(broken_off, SMOOTH, READER) <= whole
