"""How many tokens the next step verifies: as many drafts as pay for themselves, and none when none do.

        width = argmax  expected tokens(width) / time(rows, width)            width 1 is plain decoding

Both halves are measured while serving: how often the draft at each depth was right, and what a step of so many rows and
tokens took on the device. The other mode (plain while drafting, drafting while plain) is tried for a few steps now and
then, counted in steps. Streams don't depend on what is chosen (the verifier sees to that), only their speed does.

Pure: results in, width out; the same results give the same widths. Knows nothing of requests, pages or draft models.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from shared.config.settings import SpecConfig
from shared.engine.plan import StepResult

CANDIDATES = (1, 2, 3, 4, 6, 8, 12)
MEMORY = 32  # verifies, of any row, that acceptance is averaged over
GUESSED_RATE = 0.8  # of a depth not tried yet: hopeful, so that it is tried
GUESS_WEIGHT = 1.0  # verifies that a guess counts for
GUESSED_COST = 0.1  # of one more draft, relative to a plain step, before anything was measured
SAMPLES = 15  # newest step times, of which the lower quartile counts: steps that the system held up change nothing
ENOUGH_SAMPLES = 3
STALE = 64  # steps after which times say nothing any more: the machine may have changed, or they were held up
MARGIN = 1.05  # another width must promise so much more before it is taken: no flapping on noise
PROBE_STEPS = 4
FIRST_PROBE = 8  # steps; doubled after each probe that changed nothing
LONGEST_PROBE = 128
STALE_PLAIN = 2 * LONGEST_PROBE  # of plain steps, which probes measure
FADE = 0.25  # what old acceptance counts for when drafting is tried again


class WidthChoice(Protocol):
    """Asked for each plan, also for one that comes to nothing; told each result, in order."""

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


def make_width_choice(spec: SpecConfig) -> WidthChoice:
    """Up to its width, the first few one by one and then in larger steps. A tree whole or not at all: how deep part of
    one would be accepted is not what was measured."""
    widths = step_widths(spec)
    return FixedWidth(spec.width) if len(widths) == 1 else DraftLength(widths, spec.depth)


def step_widths(spec: SpecConfig) -> list[int]:
    """What may be chosen, ascending."""
    if spec.width == 1 or not spec.spec_adaptive:
        return [spec.width]
    smaller = [1] if spec.is_tree else [candidate for candidate in CANDIDATES if candidate < spec.width]
    return [*smaller, spec.width]


class Acceptance:
    """How often the draft at a depth is right where all before it were. Newer verifies count more."""

    def __init__(self, depth: int) -> None:
        self._trials = [0.0] * depth
        self._hits = [0.0] * depth

    def observe(self, accept_lens: Sequence[int], depth: int) -> None:
        """Of verified rows, each with `depth` drafts one after the other."""
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
        """Of a verify with 0, 1, ... drafts in a chain. A depth seldom reached is taken to be like the one before."""
        rate, reached, tokens = GUESSED_RATE, 1.0, [1.0]
        for trials, hits in zip(self._trials, self._hits, strict=True):
            rate = (hits + GUESS_WEIGHT * rate) / (trials + GUESS_WEIGHT)
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens


class StepCosts:
    """Times of steps by (decode rows, width), without those that also computed prompts. What was not measured of late
    is taken to be like its neighbours."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._measured: dict[tuple[int, int], int] = {}  # when last, in steps
        self._typical: dict[tuple[int, int], float] = {}  # where there are times enough
        self._slopes: dict[int, float] = {}  # by decode rows, as last measured: of one more draft
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
        """Time of a step of each width against that of a plain one with as many rows; from other numbers of rows until
        measured."""
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
    """By decode rows: what one more draft costs relative to a plain step, where both were measured."""
    found: dict[int, list[float]] = defaultdict(list)
    for (rows, width), seconds in typical.items():
        plain = typical.get((rows, 1))
        if width > 1 and plain is not None:
            found[rows].append((seconds / plain - 1) / (width - 1))
    return {rows: max(0.0, statistics.fmean(slopes)) for rows, slopes in found.items()}


class DraftLength:
    """Chooses among `widths`, ascending, the first of which is 1. `depth`: most drafts of a window that can be
    accepted together; in a chain all of them, in a tree its depth."""

    def __init__(self, widths: Sequence[int], depth: int) -> None:
        assert len(widths) > 1 and widths[0] == 1, "nothing to choose from"
        self._widths = tuple(widths)
        self._depth = depth
        self._acceptance = Acceptance(depth)
        self._costs = StepCosts()
        self._width = self._widths[-1]  # settled on, for so many rows
        self._num_rows = 0
        self._probe_width = 1
        self._probes_left = 0
        self._probe_in = self._interval = FIRST_PROBE

    def choose(self, num_rows: int) -> int:
        if self._probes_left:
            return self._probe_width
        return self._width if num_rows in (0, self._num_rows) else self._settled(self._rates(num_rows))

    def observe(self, result: StepResult) -> None:
        """Everything that changes does so here: a plan that comes to nothing leaves no trace."""
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
        rates = self._rates(num_rows)
        before, self._width, self._num_rows = self._width, self._settled(rates), num_rows
        if (before == 1) != (self._width == 1):
            self._probe_in = self._interval = FIRST_PROBE
        self._probe_in -= 1
        if self._probe_in <= 0:
            self._begin_probe(rates)

    def _depth_of(self, width: int) -> int:
        return min(width - 1, self._depth)

    def _rates(self, num_rows: int) -> dict[int, float]:
        """Tokens of each row in the time of a plain step."""
        tokens = self._acceptance.expected_tokens()
        costs = self._costs.relative(num_rows, self._widths)
        return {w: tokens[self._depth_of(w)] / cost for w, cost in zip(self._widths, costs, strict=True)}

    def _settled(self, rates: dict[int, float]) -> int:
        best = max(rates, key=lambda width: rates[width])
        return best if rates[best] > MARGIN * rates[self._width] else self._width

    def _begin_probe(self, rates: dict[int, float]) -> None:
        self._interval = min(2 * self._interval, LONGEST_PROBE)
        self._probe_in = self._interval
        self._probes_left = PROBE_STEPS
        self._probe_width = 1
        if self._width == 1:
            self._acceptance.fade()
            self._probe_width = max(self._widths[1:], key=lambda width: rates[width])
