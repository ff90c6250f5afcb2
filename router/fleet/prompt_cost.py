"""Measure what a prompt costs each node, and find the cheaper node of a pair. Sans-IO.

A stream is a running sequence. docs/placement.md defines the two sums that are compared.

    seconds of n prompt tokens = step_s + n * token_s     a line fitted to the steps in a node's heartbeats

A flat rate would make nodes with short prompts look slow, because steps have a fixed part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

HALF_LIFE_STEPS = 64  # a step's weight halves after this number of steps
ENOUGH_STEPS = 8
SETTLED_STEPS = 40  # least weight of steps for comparing two nodes' times; times of fewer steps vary too much
UNLIKE = 0.1  # no line is fitted if lengths vary by less than this part of their mean
HANDOFF_WEIGHT = 0.125  # weight of the newest hand-off
FRESH_S = 60.0  # older figures are dropped: speeds may have changed
MOST_LOCAL_TOKENS = 2048  # longer prompts are handed over, because the cost ignores streams that begin later
# Larger values are implausible.
MOST_STEPS, MOST_TOKENS_PER_S, MOST_STEP_S, MOST_HANDOFF_S = 1e9, 1e8, 600.0, 600.0

STEPS, TOKENS, SECONDS = COUNTERS = ("prompt_steps", "prompt_step_tokens", "prompt_step_seconds")


@dataclass(frozen=True, slots=True)
class PromptSpeed:
    step_s: float
    token_s: float

    def seconds(self, num_tokens: float) -> float:
        return self.step_s + num_tokens * self.token_s

    @property
    def tokens_per_s(self) -> float:
        return 1.0 / self.token_s


@dataclass(slots=True)
class StepSums:
    """Sums for fitting a line, with steps weighted by age. The steps of one heartbeat are assumed to be equally
    long."""

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_tokens: float = 0.0
    tokens_seconds: float = 0.0

    def add_steps(self, steps: float, tokens: float, seconds: float) -> None:
        kept, share = 0.5 ** (steps / HALF_LIFE_STEPS), min(1.0, HALF_LIFE_STEPS / steps)
        self.steps = kept * self.steps + share * steps
        self.tokens = kept * self.tokens + share * tokens
        self.seconds = kept * self.seconds + share * seconds
        self.tokens_tokens = kept * self.tokens_tokens + share * tokens * tokens / steps
        self.tokens_seconds = kept * self.tokens_seconds + share * tokens * seconds / steps

    def speed(self) -> PromptSpeed | None:
        """Return the line fitted by least squares; None for too few steps. A line that falls, starts below zero or
        rests on nearly equal lengths is replaced by a flat rate."""
        if self.steps < ENOUGH_STEPS:
            return None
        length, took = self.tokens / self.steps, self.seconds / self.steps
        variance = self.tokens_tokens / self.steps - length * length
        if variance <= (UNLIKE * length) ** 2:
            return PromptSpeed(0.0, took / length)
        token_s = (self.tokens_seconds / self.steps - length * took) / variance
        if token_s * MOST_TOKENS_PER_S < 1.0 or token_s * length >= took:
            return PromptSpeed(0.0, took / length)
        return PromptSpeed(took - token_s * length, token_s)


class PromptFigures:
    """The figures of one incarnation of a node."""

    __slots__ = ("_handoff_at", "_handoff_s", "_measured_at", "_speed", "_sums", "_totals")

    def __init__(self) -> None:
        self._totals: tuple[float, ...] | None = None
        self._sums = StepSums()
        self._speed: PromptSpeed | None = None
        self._measured_at = -float("inf")
        self._handoff_s = 0.0
        self._handoff_at = -float("inf")

    def learn(self, counters: Mapping[str, float], handoffs: Sequence[float], now: float) -> None:
        """Take a heartbeat's totals, and the seconds that each hand-off took after its prompt. Ignore implausible
        values."""
        before = self._totals
        self._totals = totals = (counters.get(STEPS, 0.0), counters.get(TOKENS, 0.0), counters.get(SECONDS, 0.0))
        if before is not None and totals != before:
            steps, tokens, seconds = (new - old for new, old in zip(totals, before, strict=True))
            if is_plausible(steps, tokens, seconds):
                self._measured(steps, tokens, seconds, now)
        for seconds in handoffs:
            if 0.0 <= seconds <= MOST_HANDOFF_S:
                self._handed_over(seconds, now)

    def _measured(self, steps: float, tokens: float, seconds: float, now: float) -> None:
        if now - self._measured_at > FRESH_S:
            self._sums = StepSums()
        self._sums.add_steps(steps, tokens, seconds)
        self._speed, self._measured_at = self._sums.speed(), now

    def _handed_over(self, seconds: float, now: float) -> None:
        is_first = now - self._handoff_at > FRESH_S
        self._handoff_s = seconds if is_first else self._handoff_s + HANDOFF_WEIGHT * (seconds - self._handoff_s)
        self._handoff_at = now

    def speed(self, now: float) -> PromptSpeed | None:
        """None if not measured lately."""
        return self._speed if now - self._measured_at <= FRESH_S else None

    @property
    def is_settled(self) -> bool:
        return self._sums.steps >= SETTLED_STEPS

    def speed_beside(self, other: PromptSpeed, now: float) -> PromptSpeed:
        """Return this node's line, or else the other node's line. Instead of a flat rate, return the other node's line,
        scaled to this rate at this node's mean length."""
        own = self.speed(now)
        if own is None:
            return other
        if own.step_s:
            return own
        length = self._sums.tokens / self._sums.steps
        times = own.seconds(length) / other.seconds(length)
        return PromptSpeed(times * other.step_s, times * other.token_s)

    def speed_among(self, others: Iterable[PromptFigures], now: float) -> PromptSpeed | None:
        """Return `speed_beside` another node's line, or else its flat rate; None if no node was measured lately."""
        known = [speed for other in others if (speed := other.speed(now)) is not None]
        other = first_line(known) or min(known, key=attrgetter("token_s"), default=None)
        return self.speed(now) if other is None else self.speed_beside(other, now)

    def handoff(self, now: float) -> float | None:
        """Return the seconds that a hand-off takes after its prompt; None if not measured lately."""
        return self._handoff_s if now - self._handoff_at <= FRESH_S else None


def speeds_of(nodes: Sequence[PromptFigures], now: float) -> list[PromptSpeed] | None:
    """Return a line for each node; None if one of them has too few recent steps.

    Nodes that have only a rate get another node's line, scaled as in `speed_beside`: a rate counts a step's fixed part
    for each token, and would send long prompts to the others."""
    speeds = [speed for node in nodes if node.is_settled and (speed := node.speed(now)) is not None]
    if len(speeds) < len(nodes):
        return None
    line = first_line(speeds)
    return speeds if line is None else [node.speed_beside(line, now) for node in nodes]


def first_line(speeds: Sequence[PromptSpeed]) -> PromptSpeed | None:
    """Return one of the lines, the same for any order of the nodes. None if all speeds are flat rates."""
    return min((speed for speed in speeds if speed.step_s), key=attrgetter("step_s", "token_s"), default=None)


def is_plausible(steps: float, tokens: float, seconds: float) -> bool:
    return (
        1.0 <= steps <= MOST_STEPS
        and tokens >= steps
        and 0.0 < seconds <= MOST_STEP_S * steps
        and tokens <= MOST_TOKENS_PER_S * seconds
    )


@dataclass(frozen=True, slots=True)
class PendingWork:
    """A node's pending work. `running`: streams that wait for this work."""

    waiting_tokens: int
    running: int


class Lacking(NamedTuple):
    """How many of a prompt's tokens each node would compute."""

    on_prefill: int
    on_decode: int


def costs_less_on_decode(
    lacking: Lacking,
    prefill: PromptSpeed,
    before: PendingWork,
    decode: PromptSpeed,
    beside: PendingWork,
    handoff_s: float,
) -> bool:
    """Return whether the prompt costs no more on the decode node than with a hand-off. `before`: the prefill node's
    work. `beside`: the decode node's work."""
    handed_over_s = stream_seconds(lacking.on_prefill, prefill, before) + handoff_s
    return stream_seconds(lacking.on_decode, decode, beside) <= handed_over_s


def stream_seconds(num_tokens: int, speed: PromptSpeed, work: PendingWork) -> float:
    own = speed.seconds(num_tokens) + work.waiting_tokens * speed.token_s
    return own + work.running * num_tokens * speed.token_s
