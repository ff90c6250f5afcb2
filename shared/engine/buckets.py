"""Choose the captured graph that can run the model's part of a step.

    decode rows     1 | 2 | 3 4 | 5 6 7 8 | ...     use the next larger bucket's graph; its other rows are padding
    tokens a row    exactly the step's width: a longer window would write past the rows' pages
    positions       up to 512 | up to 2048 | all      of the longest row, for MANY_ROWS rows or more of one token each
    prompt tokens   1 .. 64 | 65 .. 128 | ...       of up to MOST_PROMPTS rows; the row behind them has the padding

Padding tokens have position 0, in page 0. No request reads their KV.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from shared.model.math.interface import ModelInputs

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)
# A product tile has at least 64 rows. Reading the weights takes as long as multiplying them by about 200 tokens, so
# padding costs little up to 256 tokens. Above, it adds at most half of the step's tokens.
# Attention's programs that find no keys of theirs cost a small batch nothing. At 256 rows of 512 tokens, 32 programs a
# head instead of 2 took an H100 half as long again (docs/gpu-results.md).
MANY_ROWS = 32
SHORT_LENGTHS = (512, 2048)
PROMPT_TOKENS = (64, 128, 256, 384, 512)
MOST_PROMPTS = 8  # rows with prompts in one graph


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """A graph of decode rows: how many, and their tokens.

    `length`: how many positions of a row it reads, the step's own included. `adapted`: whether tokens may have
    adapters."""

    batch: int
    width: int
    length: int
    adapted: bool = False

    @property
    def num_tokens(self) -> int:
        return self.batch * self.width

    @property
    def num_outputs(self) -> int:
        return self.num_tokens

    def __str__(self) -> str:
        return f"{self.batch} rows of {self.width} up to {self.length} tokens" + " with adapters" * self.adapted


@dataclass(frozen=True, slots=True)
class PromptShape:
    """A graph of prompts' chunks, with MOST_PROMPTS rows and one row of padding. `length`: as in Shape."""

    num_tokens: int
    length: int
    adapted: bool = False

    @property
    def batch(self) -> int:
        return MOST_PROMPTS + 1

    @property
    def num_outputs(self) -> int:
        return MOST_PROMPTS

    def __str__(self) -> str:
        return f"{self.num_tokens} prompt tokens" + " with adapters" * self.adapted


AnyShape = Shape | PromptShape


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes that get graphs. `lengths`: as in Shape, ascending. Graphs of few rows, of windows and of prompts have
    the last.

    `adapted`: for each shape, whether it gets a graph for steps with adapters, and one for steps without. `prompts`:
    numbers of tokens, ascending; (): prompts have no graphs."""

    batches: tuple[int, ...]
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    adapted: tuple[bool, ...] = (False,)
    prompts: tuple[int, ...] = ()

    @classmethod
    def up_to(
        cls,
        most_rows: int,
        widths: tuple[int, ...],
        lengths: tuple[int, ...],
        has_adapters: bool = False,
        prompts: tuple[int, ...] = (),
    ) -> Buckets:
        adapted = (False, True) if has_adapters else (False,)
        return cls(some_up_to(BATCHES, most_rows), widths, lengths, adapted, prompts)

    def shapes(self) -> list[AnyShape]:
        """Return all shapes, largest first, so that later graphs fit into the first one's memory."""
        windows = [
            Shape(batch, width, *sizes)
            for batch, width in itertools.product(self.batches, self.widths)
            for sizes in itertools.product(self.lengths_of(batch, width), self.adapted)
        ]
        chunks = [PromptShape(*sizes) for sizes in itertools.product(self.prompts, self.lengths[-1:], self.adapted)]
        by_size = attrgetter("num_tokens", "batch", "length", "adapted")
        return sorted([*windows, *chunks], key=by_size, reverse=True)

    def shape_of(self, inputs: ModelInputs) -> AnyShape | str:
        """Return the shape of the step's graph, or the reason why no graph fits (EAGER_REASONS)."""
        layout = inputs.layout
        assert layout.host is not None
        num_rows, num_running = len(layout.page_tables[0]), layout.host.num_running
        if layout.max_seq_len > self.lengths[-1]:
            return "length"
        if num_running == num_rows:
            return self._of_windows(inputs, num_rows)
        return "mixed" if num_running else self._of_prompts(inputs, num_rows)

    def _of_windows(self, inputs: ModelInputs, num_rows: int) -> Shape | str:
        width = inputs.layout.max_q_len
        if not 0 < num_rows <= self.batches[-1]:
            return "rows"
        if width not in self.widths:
            return "width"
        batch = next_larger(self.batches, num_rows)
        length = next_larger(self.lengths_of(batch, width), inputs.layout.max_seq_len)
        return Shape(batch, width, length, inputs.adapters is not None)

    def _of_prompts(self, inputs: ModelInputs, num_rows: int) -> PromptShape | str:
        num_tokens = len(inputs.input_ids)
        refused = {
            "prompts": not self.prompts,
            "tokens": num_tokens > max(self.prompts, default=0),
            "rows": num_rows > MOST_PROMPTS,
            "scores": len(inputs.logits_idx) > MOST_PROMPTS,
        }
        why = next((why for why, is_so in refused.items() if is_so), None)
        return why or PromptShape(next_larger(self.prompts, num_tokens), self.lengths[-1], inputs.adapters is not None)

    def lengths_of(self, batch: int, width: int) -> tuple[int, ...]:
        return self.lengths if batch >= MANY_ROWS and width == 1 else self.lengths[-1:]


def next_larger(sizes: Sequence[int], num: int) -> int:
    """Return the first of the ascending sizes that is at least `num`."""
    return sizes[bisect.bisect_left(sizes, num)]


def lengths_up_to(most: int) -> tuple[int, ...]:
    return (*(length for length in SHORT_LENGTHS if length < most), most)


def some_up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the ascending sizes that steps of up to `most` use, as far as there are any."""
    return sizes[: bisect.bisect_left(sizes, most) + 1]


def some_widths(widths: Sequence[int]) -> tuple[int, ...]:
    """Return the widths that get graphs, ascending: the first, the middle one and the last."""
    return tuple(sorted({widths[0], widths[len(widths) // 2], widths[-1]}))
