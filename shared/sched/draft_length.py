"""How many tokens the next step verifies: as many drafts as pay for themselves, and none when none do.

        width = argmax  expected tokens(width) / time(rows, width)            width 1 is plain decoding

Both halves are measured while serving: how often the draft at each depth was right, and what a step of so many rows and
tokens took on the device. The other mode (plain while drafting, drafting while plain) is tried for a few steps now and
then, counted in steps. Streams don't depend on what is chosen (the verifier sees to that), only their speed does.

Pure: results in, width out; the same results give the same widths. Knows nothing of requests, pages or draft models.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from shared.engine.plan import Int32s, StepResult

MEMORY = 32  # verifies, of any row, that acceptance is averaged over
GUESSED_RATE = 0.8  # of a depth not tried yet: hopeful, so that it is tried
GUESS_WEIGHT = 1.0  # verifies that a guess counts for
GUESSED_COST = 0.1  # of one more draft, relative to a plain step, before anything was measured
SAMPLES = 7  # newest step times, of which the median counts: a step that the system held up changes nothing
ENOUGH_SAMPLES = 3
MARGIN = 1.05  # another width must promise so much more before it is taken: no flapping on noise
PROBE_STEPS = 4
FIRST_PROBE = 8  # steps; doubled after each probe that changed nothing
LONGEST_PROBE = 128
FADE = 0.25  # what old acceptance counts for when drafting is tried again


class WidthChoice(Protocol):
    """Asked once per planned step that has decode rows, told each result in order."""

    def choose(self, num_rows: int) -> int:
        """Tokens that each of `num_rows` decode rows steps, from 1 to the largest width of the settings."""
        ...

    def observe(self, result: StepResult) -> None: ...


class FixedWidth:
    """The largest width, always."""

    def __init__(self, width: int) -> None:
        self._width = width

    def choose(self, num_rows: int) -> int:
        return self._width

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""


class Acceptance:
    """How often the draft at a depth is right where all before it were. Newer verifies count more."""

    def __init__(self, depth: int) -> None:
        self._trials = np.zeros(depth)
        self._hits = np.zeros(depth)

    def observe(self, accept_lens: Int32s, depth: int) -> None:
        """Of verified rows, each with `depth` drafts at least one of which could be looked at."""
        keep = (1 - 1 / MEMORY) ** len(accept_lens)
        depths = np.arange(depth)[:, None]
        self._trials *= keep
        self._hits *= keep
        self._trials[:depth] += (accept_lens - 1 >= depths).sum(axis=1)
        self._hits[:depth] += (accept_lens - 1 > depths).sum(axis=1)

    def fade(self) -> None:
        self._trials *= FADE
        self._hits *= FADE

    def expected_tokens(self) -> list[float]:
        """Of a verify with 0, 1, ... drafts in a chain. A depth seldom reached is taken to be like the one before."""
        rate, reached, tokens = GUESSED_RATE, 1.0, [1.0]
        for trials, hits in zip(self._trials, self._hits, strict=True):
            rate = float((hits + GUESS_WEIGHT * rate) / (trials + GUESS_WEIGHT))
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens


class StepCosts:
    """Times of steps by (decode rows, width), without those that also computed prompts."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._slopes: dict[int, float] = {}  # rows -> cost of one more draft, relative to their plain step

    def observe(self, num_rows: int, width: int, seconds: float) -> None:
        self._times[num_rows, width].append(seconds)
        plain = self._measured(num_rows, 1)
        wide = [(w, self._measured(n, w)) for n, w in self._times if n == num_rows and w > 1]
        slopes = [(seconds / plain - 1) / (w - 1) for w, seconds in wide if seconds is not None and plain is not None]
        if slopes:
            self._slopes[num_rows] = max(0.0, statistics.fmean(slopes))

    def relative(self, num_rows: int, width: int) -> float:
        """Time of a step against that of a plain one with as many rows; from other numbers of rows until measured."""
        plain, wide = self._measured(num_rows, 1), self._measured(num_rows, width)
        if plain is not None and wide is not None:
            return wide / plain
        return 1 + (width - 1) * self._slope(num_rows)

    def _measured(self, num_rows: int, width: int) -> float | None:
        times = self._times.get((num_rows, width), ())
        return statistics.median(times) if len(times) >= ENOUGH_SAMPLES else None

    def _slope(self, num_rows: int) -> float:
        if not self._slopes:
            return GUESSED_COST
        return self._slopes[min(self._slopes, key=lambda rows: abs(rows - num_rows))]


class DraftLength:
    """Chooses among `widths`, ascending, the first of which is 1. `depth`: most drafts of a window that can be
    accepted together; in a chain all of them, in a tree its depth."""

    def __init__(self, widths: Sequence[int], depth: int) -> None:
        assert len(widths) > 1 and widths[0] == 1, "nothing to choose from"
        self._widths = tuple(widths)
        self._depth = depth
        self._acceptance = Acceptance(depth)
        self._costs = StepCosts()
        self._width = self._widths[-1]
        self._probe_width = 1
        self._probes_left = 0
        self._probe_in = self._interval = FIRST_PROBE

    def choose(self, num_rows: int) -> int:
        if not num_rows:
            return self._width
        if self._probes_left:
            self._probes_left -= 1
            return self._probe_width
        rates = self._rates(num_rows)
        self._settle(rates)
        self._probe_in -= 1
        return self._width if self._probe_in > 0 else self._begin_probe(rates)

    def observe(self, result: StepResult) -> None:
        width, accept_lens = result.width, result.accept_lens[result.num_prefill :]
        if not len(accept_lens):
            return
        if width > 1:
            self._acceptance.observe(accept_lens, self._depth_of(width))
        if result.num_prefill == 0 and result.seconds > 0:
            self._costs.observe(len(accept_lens), width, result.seconds)

    def _depth_of(self, width: int) -> int:
        return min(width - 1, self._depth)

    def _rates(self, num_rows: int) -> dict[int, float]:
        """Tokens of each row in the time of a plain step."""
        tokens = self._acceptance.expected_tokens()
        return {w: tokens[self._depth_of(w)] / self._costs.relative(num_rows, w) for w in self._widths}

    def _settle(self, rates: dict[int, float]) -> None:
        best = max(rates, key=lambda width: rates[width])
        if rates[best] <= MARGIN * rates[self._width]:
            return
        if (best == 1) != (self._width == 1):
            self._probe_in = self._interval = FIRST_PROBE
        self._width = best

    def _begin_probe(self, rates: dict[int, float]) -> int:
        self._interval = min(2 * self._interval, LONGEST_PROBE)
        self._probe_in = self._interval
        self._probes_left = PROBE_STEPS - 1
        self._probe_width = 1
        if self._width == 1:
            self._acceptance.fade()
            self._probe_width = max(self._widths[1:], key=lambda width: rates[width])
        return self._probe_width
