"""Draw endless arrival times for an open loop, in seconds from the run's start. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from shared.core.errors import ConfigError

SHAPES = "poisson, constant, gamma:CV (bursts; CV 1 is poisson, 2 and more are bursts), ramp:RATE"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`shape`: the first word of --arrivals. `value`: gamma's coefficient of variation, or a ramp's last rate."""

    shape: str
    rate: float  # requests per second
    value: float = 0.0
    over_s: float = 0.0  # duration of a ramp; the rate then stays the same

    def offsets(self, seed: int) -> Iterator[float]:
        rng = random.Random(f"{seed} arrivals")
        if self.shape == "constant":
            return constant(self.rate)
        if self.shape == "ramp":
            return ramp(self.rate, self.value, self.over_s, rng)
        return gamma(self.rate, self.value if self.shape == "gamma" else 1.0, rng)


def parse_arrivals(text: str, rate: float, over_s: float) -> Arrivals:
    shape, _, tail = text.partition(":")
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"--rate is {rate:g}; it must be above 0 (requests per second)")
    if shape not in ("poisson", "constant", "gamma", "ramp") or bool(tail) != (shape in ("gamma", "ramp")):
        raise ConfigError(f"--arrivals is {text!r}; it must be one of: {SHAPES}")
    try:
        value = float(tail or 0)
    except ValueError:
        value = math.nan
    if tail and not (math.isfinite(value) and value > 0):
        raise ConfigError(f"--arrivals {shape}: {tail!r} is not a number above 0")
    return Arrivals(shape, rate, value, over_s)


def constant(rate: float) -> Iterator[float]:
    number = 0
    while True:
        yield number / rate
        number += 1


def gamma(rate: float, variation: float, rng: random.Random) -> Iterator[float]:
    """Yield times whose gaps have the mean 1 / rate. A `variation` of 1 makes a Poisson process, a greater one makes
    bursts."""
    shape = 1 / variation**2
    at = 0.0
    while True:
        at += rng.gammavariate(shape, 1 / (rate * shape))
        yield at


def ramp(first: float, last: float, over_s: float, rng: random.Random) -> Iterator[float]:
    """Yield a Poisson process whose rate goes linearly from `first` to `last`, and then stays.

    Stretch a Poisson process of rate 1: its time x becomes the time by which x arrivals are expected.
    """
    expected = 0.0
    while True:
        expected += rng.expovariate(1.0)
        yield when_expected(expected, first, last, over_s)


def when_expected(number: float, first: float, last: float, over_s: float) -> float:
    """Return the time by which `number` arrivals are expected.

    During the ramp, number = first t + (last - first) t^2 / (2 over_s).
    """
    on_slope = (first + last) / 2 * over_s
    if number >= on_slope:
        return over_s + (number - on_slope) / last
    bend = (last - first) / over_s
    # In this form, the solution of bend/2 t^2 + first t = number stays exact for a `bend` close to 0.
    return 2 * number / (first + math.sqrt(first * first + 2 * bend * number))
