"""Arrivals and lengths: rates, bursts, ramps by their laws, and what a wrong flag is told."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.tools.traffic.workloads.arrivals import parse_arrivals
from deploy.tools.traffic.workloads.lengths import parse_lengths
from shared.core.errors import ConfigError


def first(text, count, rate=10.0, over_s=60.0, seed=1):
    return list(itertools.islice(parse_arrivals(text, rate, over_s).offsets(seed), count))


def gaps(times):
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@given(st.sampled_from(["poisson", "constant", "gamma:0.5", "gamma:3", "ramp:40", "ramp:1"]), st.integers(0, 99))
def test_times_rise_and_repeat_with_the_seed(text, seed):
    times = first(text, 200, seed=seed)
    assert times == sorted(times) == first(text, 200, seed=seed)
    assert times[0] >= 0


def test_constant_is_a_clock():
    assert first("constant", 4, rate=4.0) == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(("text", "variation"), [("poisson", 1.0), ("gamma:0.5", 0.5), ("gamma:3", 3.0)])
def test_gaps_have_the_mean_and_the_variation_asked_for(text, variation):
    found = gaps(first(text, 40_000))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(variation, rel=0.08)


def test_a_ramp_goes_up_and_stays():
    times = first("ramp:30", 4000, rate=10.0, over_s=60.0)
    per_ten = [sum(10 * i <= at < 10 * i + 10 for at in times) for i in range(12)]
    for i in range(6):
        middle = 10 + 20 * (10 * i + 5) / 60
        assert per_ten[i] == pytest.approx(10 * middle, rel=0.25)
    assert sum(per_ten[6:]) == pytest.approx(6 * 300, rel=0.1)


@pytest.mark.parametrize("text", ["", "poison", "gamma", "gamma:x", "gamma:-1", "gamma:nan", "ramp:0", "poisson:2"])
def test_a_wrong_shape_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="--arrivals"):
        parse_arrivals(text, 1.0, 60.0)


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [
        ("7", 7, 7, 7),
        ("3-5", 3, 5, 4),
        ("normal:100,10", 40, 160, 100),
        ("lognormal:100,0.5", 1, 5000, 113.3),
        ("mix:10=3,30=1", 10, 30, 15),
    ],
)
def test_lengths_have_their_range_and_mean(text, low, high, mean):
    lengths, rng = parse_lengths("--prompt-tokens", text), random.Random(2)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert low <= min(drawn) and max(drawn) <= high
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.03)


@given(st.integers(0, 9999))
def test_no_length_is_below_one(seed):
    assert parse_lengths("--turns", "normal:1,5").draw(random.Random(seed)) >= 1


@pytest.mark.parametrize("text", ["", "0", "-3", "5-3", "1.5", "a", "normal:5", "normal:5,x", "zipf:2", "mix:3", "inf"])
def test_a_wrong_length_is_refused_by_its_flag(text):
    with pytest.raises(ConfigError, match="--output-tokens"):
        parse_lengths("--output-tokens", text)
