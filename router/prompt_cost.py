"""What a prompt costs the node that computes it, as measured, and on which node of a pair it costs less. Sans-IO.

The currency is stream-seconds: a second that one stream waits. Weighed against each other are

    on the decode node    the prompt's own time there, behind the prompts that wait there, and the same time of this
                          prompt's tokens once more for each stream that runs there and stands still meanwhile
    handed over           the wait on the prefill node, the prompt's own time there, and the part of the hand-off that
                          computing does not hide, up to the word that it is installed

The prompt's own time runs until its decode node can go on with it: the first token of a prompt that is handed over
comes before that, the second one does not. Chunks bound how long a stream stands still at a time. The part of a
step that its length does not change counts once for a prompt, however many steps it takes. Streams count as the node's
last heartbeat told of them. Requests that come later count nowhere. Of a prompt counts what each node lacks of it.

    seconds of n prompt tokens = step_s + n * token_s     a line through the steps that a node's heartbeats tell of

A flat rate would make nodes that are given short prompts look slow, for each step has a part that its length does not
change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

HALF_LIFE_STEPS = 64  # a step counts half once so many have followed it
ENOUGH_STEPS = 8
UNLIKE = 0.1  # lengths that vary by less, beside their mean, tell no line
HANDOFF_WEIGHT = 0.125  # of the newest
FRESH_S = 60.0  # older figures are none: what is done no more is measured no more, and may have changed
MOST_LOCAL_TOKENS = 2048  # longer prompts are handed over whatever it costs: streams to come count nowhere
# What is beyond is nonsense
MOST_STEPS, MOST_TOKENS_PER_S, MOST_STEP_S, MOST_HANDOFF_S = 1e9, 1e8, 600.0, 600.0

STEPS, TOKENS, SECONDS = COUNTERS = ("prompt_steps", "prompt_step_tokens", "prompt_step_seconds")


@dataclass(frozen=True, slots=True)
class PromptSpeed:
    """The line of one node."""

    step_s: float
    token_s: float

    def seconds(self, num_tokens: float) -> float:
        return self.step_s + num_tokens * self.token_s

    @property
    def tokens_per_s(self) -> float:
        """The rate of a long prompt."""
        return 1.0 / self.token_s


@dataclass(slots=True)
class StepSums:
    """What a line needs of the steps, each weighed by its age. A heartbeat's steps count as equally long."""

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_tokens: float = 0.0
    tokens_seconds: float = 0.0

    def add(self, steps: float, tokens: float, seconds: float) -> None:
        """Age the sums by the number of new steps, then add these. They weigh no more than HALF_LIFE_STEPS steps."""
        kept, share = 0.5 ** (steps / HALF_LIFE_STEPS), min(1.0, HALF_LIFE_STEPS / steps)
        self.steps = kept * self.steps + share * steps
        self.tokens = kept * self.tokens + share * tokens
        self.seconds = kept * self.seconds + share * seconds
        self.tokens_tokens = kept * self.tokens_tokens + share * tokens * tokens / steps
        self.tokens_seconds = kept * self.tokens_seconds + share * tokens * seconds / steps

    def speed(self) -> PromptSpeed | None:
        """Fit the line by least squares. One that would fall, begin below zero or rest on equal lengths gives way to
        a rate. None: too few steps."""
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
    """What one node's heartbeats tell, in one life of it. `now` is a monotonic clock in seconds."""

    __slots__ = ("_handoff_at", "_handoff_s", "_measured_at", "_speed", "_sums", "_totals")

    def __init__(self) -> None:
        self._totals: tuple[float, ...] | None = None
        self._sums = StepSums()
        self._speed: PromptSpeed | None = None
        self._measured_at = -float("inf")
        self._handoff_s = 0.0
        self._handoff_at = -float("inf")

    def learn(self, counters: Mapping[str, float], handoffs: Sequence[float], now: float) -> None:
        """Take a heartbeat's totals, and the seconds of each hand-off behind its prompt. Nonsense is passed over. The
        first totals are of the whole life before, and only begin the count."""
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
        self._sums.add(steps, tokens, seconds)
        self._speed, self._measured_at = self._sums.speed(), now

    def _handed_over(self, seconds: float, now: float) -> None:
        is_first = now - self._handoff_at > FRESH_S
        self._handoff_s = seconds if is_first else self._handoff_s + HANDOFF_WEIGHT * (seconds - self._handoff_s)
        self._handoff_at = now

    def speed(self, now: float) -> PromptSpeed | None:
        """None: not measured, or not lately."""
        return self._speed if now - self._measured_at <= FRESH_S else None

    def speed_beside(self, other: PromptSpeed, now: float) -> PromptSpeed:
        """Return this node's line. Without figures it is the other node's. With a rate only, it is the other's line
        times how much slower this node was at its mean length."""
        own = self.speed(now)
        if own is None:
            return other
        if own.step_s:
            return own
        length = self._sums.tokens / self._sums.steps
        times = own.seconds(length) / other.seconds(length)
        return PromptSpeed(times * other.step_s, times * other.token_s)

    def handoff(self, now: float) -> float | None:
        """Return the seconds by which this node's hand-offs end behind their prompts. None: as for `speed`."""
        return self._handoff_s if now - self._handoff_at <= FRESH_S else None


def is_plausible(steps: float, tokens: float, seconds: float) -> bool:
    """Return whether a node can have computed so much in that time. A total that fell is as implausible."""
    return (
        1.0 <= steps <= MOST_STEPS
        and tokens >= steps
        and 0.0 < seconds <= MOST_STEP_S * steps
        and tokens <= MOST_TOKENS_PER_S * seconds
    )


@dataclass(frozen=True, slots=True)
class Work:
    """What a node has before it. `running`: streams that stand still while it computes prompts."""

    waiting_tokens: int
    running: int


class Lacking(NamedTuple):
    """Tokens of a prompt that either node would compute: the others are cached there, as far as is known."""

    on_prefill: int
    on_decode: int


def costs_less_on_decode(
    lacking: Lacking, prefill: PromptSpeed, before: Work, decode: PromptSpeed, beside: Work, handoff_s: float
) -> bool:
    """Return whether a prompt loses fewer stream-seconds on its decode node than by a hand-off. `before`: on the
    prefill node; `beside`: on the decode node."""
    handed_over_s = stream_seconds(lacking.on_prefill, prefill, before) + handoff_s
    return stream_seconds(lacking.on_decode, decode, beside) <= handed_over_s


def stream_seconds(num_tokens: int, speed: PromptSpeed, work: Work) -> float:
    own = speed.seconds(num_tokens) + work.waiting_tokens * speed.token_s
    return own + work.running * num_tokens * speed.token_s
