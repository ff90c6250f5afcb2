"""Choose the captured graph that can run the model's part of a step.

    rows of a step        1 2 | 3 4 | 5 6 7 8 | ...     use the next larger bucket's graph; its other rows are padding
    tokens of a row       exactly the step's width: a longer window would write past the rows' pages

A padding row has page 0 and length 0. No request reads its KV.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shared.model.interface import ModelInputs

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """A graph's numbers of rows and of tokens per row. `adapted`: whether tokens may have adapters."""

    batch: int
    width: int
    adapted: bool = False

    @property
    def num_tokens(self) -> int:
        return self.batch * self.width


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes that get graphs. A graph reads at most `most_tokens` positions of a row, the step's own included.

    `adapted`: for each shape, whether it gets a graph for steps with adapters, and one for steps without."""

    batches: tuple[int, ...]
    widths: tuple[int, ...]
    most_tokens: int
    adapted: tuple[bool, ...] = (False,)

    @classmethod
    def up_to(cls, most_rows: int, widths: tuple[int, ...], most_tokens: int, has_adapters: bool = False) -> Buckets:
        last = bisect.bisect_left(BATCHES, most_rows)
        return cls(BATCHES[: last + 1], widths, most_tokens, (False, True) if has_adapters else (False,))

    def shapes(self) -> list[Shape]:
        """Return all shapes, largest first, so that later graphs fit into the first one's memory."""
        every = [Shape(*sizes) for sizes in itertools.product(self.batches, self.widths, self.adapted)]
        return sorted(every, key=lambda shape: (shape.num_tokens, shape), reverse=True)

    def shape_of(self, inputs: ModelInputs) -> Shape | str:
        """Return the shape of the step's graph, or the reason why no graph fits (EAGER_REASONS)."""
        layout = inputs.layout
        assert layout.host is not None
        num_rows = len(layout.page_tables[0])
        refused = {
            "prompts": layout.host.num_running < num_rows,
            "rows": not 0 < num_rows <= self.batches[-1],
            "width": layout.max_q_len not in self.widths,
            "length": layout.max_seq_len > self.most_tokens,
        }
        for why, is_so in refused.items():
            if is_so:
                return why
        batch = self.batches[bisect.bisect_left(self.batches, num_rows)]
        return Shape(batch, layout.max_q_len, inputs.adapters is not None)


def some_widths(widths: Sequence[int]) -> tuple[int, ...]:
    """Return the widths that get graphs, ascending: the first, the middle one and the last."""
    return tuple(sorted({widths[0], widths[len(widths) // 2], widths[-1]}))
