"""Choose how many tokens the next step verifies, so that the expected tokens per second are highest.

        width = argmax  expected tokens(width) / time(rows, width)            width 1 is plain decoding

Acceptance at each depth, and device time by rows and tokens, are measured while serving. Probes try the other mode,
plain or drafting. The choice never changes the tokens of a stream. Equal results lead to equal widths.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.config.settings.settings import SpecConfig
from shared.engine.plan import StepResult

CANDIDATES = (1, 2, 3, 4, 6, 8, 12)
MEMORY = 32  # the average covers about this many verifications, of all rows together
GUESSED_RATE = 0.8  # acceptance assumed for an untried depth; high, so that the depth is tried
GUESS_WEIGHT = 1.0  # GUESSED_RATE weighs like this many verifications
GUESSED_COST = 0.1  # assumed time of one more draft, as a share of a plain step's time
SAMPLES = 15  # number of newest step times to keep; their lower quartile ignores delayed steps
ENOUGH_SAMPLES = 3
STALE = 64  # steps after which a measured time expires
MARGIN = 1.05  # the width changes only for a gain above this factor, because of noise; plain steps need no margin
PROBE_STEPS = 4
FIRST_PROBE = 8  # steps until the first probe; doubled after each probe that changes nothing
LONGEST_PROBE = 512
STALE_PLAIN = 2 * LONGEST_PROBE  # steps after which a plain step's time expires, because only probes measure it
FADE = 0.25  # weight of the earlier acceptance when a probe tries drafting again


class WidthChoice(Protocol):
    """Chooses a width for each plan, launched or not. Observes each result, in order."""

    def choose(self, num_rows: int) -> int:
        """Return each decode row's number of tokens, at most the settings' width. 1 may run instead."""
        ...

    def observe(self, result: StepResult) -> None: ...


class FixedWidth:
    def __init__(self, width: int) -> None:
        self._width = width

    def choose(self, num_rows: int) -> int:
        return self._width

    def observe(self, result: StepResult) -> None:
        """Do nothing."""


def make_width_choice(spec: SpecConfig) -> WidthChoice:
    widths = step_widths(spec)
    return FixedWidth(spec.width) if len(widths) == 1 else DraftLength(widths, spec.depth)


def step_widths(spec: SpecConfig) -> list[int]:
    """Return the widths, ascending. A tree is verified whole or not at all: acceptance in its parts is not measured."""
    if spec.width == 1 or not spec.spec_adaptive:
        return [spec.width]
    smaller = [1] if spec.is_tree else [candidate for candidate in CANDIDATES if candidate < spec.width]
    return [*smaller, spec.width]


class Acceptance:
    """Acceptance rates by depth, measured where all earlier drafts were accepted. Newer results weigh more."""

    def __init__(self, depth: int) -> None:
        self._trials = [0.0] * depth
        self._hits = [0.0] * depth

    def observe(self, accept_lens: Sequence[int], depth: int) -> None:
        self._scale((1 - 1 / MEMORY) ** len(accept_lens))
        ended_at = Counter(accept_lens)
        reached = len(accept_lens)
        for i in range(depth):
            self._trials[i] += reached
            reached -= ended_at[i + 1]
            self._hits[i] += reached

    def fade(self) -> None:
        self._scale(FADE)

    def _scale(self, by: float) -> None:
        self._trials = [trials * by for trials in self._trials]
        self._hits = [hits * by for hits in self._hits]

    def expected_tokens(self) -> list[float]:
        """Return the expected numbers of tokens from steps that verify 0, 1, ... chained drafts.

        A depth with few trials gets nearly the previous depth's rate.
        """
        rate, reached, tokens = GUESSED_RATE, 1.0, [1.0]
        for trials, hits in zip(self._trials, self._hits, strict=True):
            rate = (hits + GUESS_WEIGHT * rate) / (trials + GUESS_WEIGHT)
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens


class StepCosts:
    """The times of steps without prompts, by (decode rows, width). Missing times are estimated from neighbours."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._measured: dict[tuple[int, int], int] = {}  # number of the step that gave the newest time
        self._typical: dict[tuple[int, int], float] = {}  # the lower quartile, where enough times were measured
        self._slopes: dict[int, float] = {}  # by decode rows: a draft's time as a share of a plain step's time
        self._steps = 0

    def observe(self, num_rows: int, width: int, seconds: float) -> None:
        self._steps += 1
        cell = (num_rows, width)
        times = self._times[cell]
        if not self._is_fresh(cell):
            times.clear()
            self._typical.pop(cell, None)
        times.append(seconds)
        self._measured[cell] = self._steps
        if len(times) >= ENOUGH_SAMPLES:
            self._typical[cell] = sorted(times)[len(times) // 4]

    def relative(self, num_rows: int, widths: Sequence[int]) -> list[float]:
        self._typical = {cell: seconds for cell, seconds in self._typical.items() if self._is_fresh(cell)}
        self._slopes |= _slopes(self._typical)
        plain, slope = self._typical.get((num_rows, 1)), self._slope(num_rows)
        found = [self._typical.get((num_rows, width)) for width in widths]
        return [
            1 + (width - 1) * slope if plain is None or seconds is None else seconds / plain
            for width, seconds in zip(widths, found, strict=True)
        ]

    def _slope(self, num_rows: int) -> float:
        if not self._slopes:
            return GUESSED_COST
        return self._slopes[min(self._slopes, key=lambda rows: abs(rows - num_rows))]

    def _is_fresh(self, cell: tuple[int, int]) -> bool:
        age = self._steps - self._measured.get(cell, self._steps)
        return age <= (STALE_PLAIN if cell[1] == 1 else STALE)


def _slopes(typical: Mapping[tuple[int, int], float]) -> dict[int, float]:
    found: dict[int, list[float]] = defaultdict(list)
    for (rows, width), seconds in typical.items():
        plain = typical.get((rows, 1))
        if width > 1 and plain is not None:
            found[rows].append((seconds / plain - 1) / (width - 1))
    return {rows: max(0.0, statistics.fmean(slopes)) for rows, slopes in found.items()}


@dataclass
class Choice:
    """The width for about equally many rows, and the next probe."""

    width: int
    interval: int = FIRST_PROBE
    probe_in: int = FIRST_PROBE


class DraftLength:
    """`widths` ascend from 1. `depth`: drafts in a chain, or levels in a tree."""

    def __init__(self, widths: Sequence[int], depth: int) -> None:
        assert len(widths) > 1 and widths[0] == 1, "nothing to choose from"
        self._widths = tuple(widths)
        self._depth = depth
        self._acceptance = Acceptance(depth)
        self._costs = StepCosts()
        self._last = Choice(self._widths[-1])
        self._last_rows = 0  # for which the last width was chosen
        self._choices = dict[int, Choice]()  # by bit length of the number of rows
        self._probe_width = 1
        self._probes_left = 0

    def choose(self, num_rows: int) -> int:
        if self._probes_left:
            return self._probe_width
        if num_rows in (0, self._last_rows):
            return self._last.width
        choice = self._choices.get(num_rows.bit_length(), self._last)
        return self._settled(self._rates(num_rows), choice.width)

    def observe(self, result: StepResult) -> None:
        """Learn from a result. Only results change the state."""
        width, accept_lens = result.width, result.accept_lens[result.num_prefill :].tolist()
        if not accept_lens:
            return
        if width > 1:
            self._acceptance.observe(accept_lens, self._depth_of(width))
        if result.num_prefill == 0 and result.seconds > 0:
            self._costs.observe(len(accept_lens), width, result.seconds)
        self._count_step(len(accept_lens))

    def _count_step(self, num_rows: int) -> None:
        if self._probes_left:
            self._probes_left -= 1
            return
        rates, size = self._rates(num_rows), num_rows.bit_length()
        before = self._choices.get(size, self._last).width
        width = self._settled(rates, before)
        if size not in self._choices or (before == 1) != (width == 1):
            self._choices[size] = Choice(width)
        choice = self._last = self._choices[size]
        choice.width, self._last_rows = width, num_rows
        choice.probe_in -= 1
        if choice.probe_in <= 0:
            self._begin_probe(choice, rates)

    def _depth_of(self, width: int) -> int:
        return min(width - 1, self._depth)

    def _rates(self, num_rows: int) -> dict[int, float]:
        """Return, by width, the expected tokens per row in the time of one plain step."""
        tokens = self._acceptance.expected_tokens()
        costs = self._costs.relative(num_rows, self._widths)
        return {w: tokens[self._depth_of(w)] / cost for w, cost in zip(self._widths, costs, strict=True)}

    def _settled(self, rates: dict[int, float], before: int) -> int:
        best = max(rates, key=lambda width: rates[width])
        margin = 1.0 if best == 1 else MARGIN
        return best if rates[best] > margin * rates[before] else before

    def _begin_probe(self, choice: Choice, rates: dict[int, float]) -> None:
        choice.interval = min(2 * choice.interval, LONGEST_PROBE)
        choice.probe_in = choice.interval
        self._probes_left = PROBE_STEPS
        self._probe_width = 1
        if choice.width == 1:
            self._probes_left += 1  # a plain step comes first
            self._acceptance.fade()
            self._probe_width = max(self._widths[1:], key=lambda width: rates[width])
