"""Draw lengths of prompts and answers and numbers of turns: integers of at least 1. Draw pauses, in seconds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from shared.core.errors import ConfigError

FORMS = "128, 64-512 (uniform), normal:MEAN,SD, lognormal:MEDIAN,SIGMA, mix:128=4,2048=1 (by weight)"
PAUSE_FORMS = "5 (the mean), 0.5-30 (between them, mostly short)"
Draw = Callable[[random.Random], float]


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    text: str
    draw_value: Draw

    def draw(self, rng: random.Random) -> int:
        return max(1, round(self.draw_value(rng)))


ONE = DrawnLengths("1", lambda rng: 1)


@dataclass(frozen=True, slots=True)
class Pauses:
    """Draw the seconds between an answer and the next turn."""

    draw: Draw


NO_PAUSE = Pauses(lambda rng: 0.0)


def parse_lengths(flag: str, text: str) -> DrawnLengths:
    try:
        return DrawnLengths(text, parse(text))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{flag} is {text!r}; it must look like one of: {FORMS}") from None


def parse(text: str) -> Draw:
    """Raise ValueError if `text` has none of FORMS."""
    form, colon, tail = text.partition(":")
    if colon and form == "mix":
        return mixture(tail)
    if colon:
        middle, spread = (positive(part) for part in tail.split(","))
        if form == "normal":
            return lambda rng: rng.gauss(middle, spread)
        if form == "lognormal":
            return lambda rng: rng.lognormvariate(math.log(middle), spread)
        raise ValueError(form)
    low, dash, high = text.partition("-")
    least, most = positive(low), positive(high if dash else low)
    if least > most or least != int(least) or most != int(most):
        raise ValueError(text)
    return lambda rng: rng.randint(int(least), int(most))


def mixture(text: str) -> Draw:
    pairs = [part.split("=") for part in text.split(",")]
    values = [positive(value) for value, _ in pairs]
    weights = [positive(weight) for _, weight in pairs]
    return lambda rng: rng.choices(values, weights)[0]


def positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(text)
    return value


def parse_pauses(flag: str, text: str) -> Pauses:
    """A range is drawn log-uniformly: of the tools that agents call, most are fast, and a few take long."""
    try:
        if not any(map(float, text.split("-"))):
            return NO_PAUSE
        least, *rest = map(positive, text.split("-"))
        (most,) = rest or [least]
        if least > most:
            raise ValueError(text)
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; it must look like one of: {PAUSE_FORMS}") from None
    if not rest:
        return Pauses(lambda rng: rng.expovariate(1 / least))
    return Pauses(lambda rng: math.exp(rng.uniform(math.log(least), math.log(most))))
