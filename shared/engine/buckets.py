"""Choose the captured graph that can run a step.

    rows of a step        1 2 | 3 4 | 5 6 7 8 | ...     use the next larger bucket's graph; its other rows are padding
    tokens of a row       exactly the step's width: a longer window would write past the rows' pages

A padding row has request row 0, page 0 and length 0, and emits nothing. No request reads its KV.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.core.keys import RequestKey
from shared.core.sampling_params import SamplingParams
from shared.engine.plan import RowId, StepPlan
from shared.engine.results import has_logprobs
from shared.kernel.step_layout import Layout, equal_bounds
from shared.sample.interface import SamplingBatch
from shared.sample.params import DRAWING, FILTERED, Params

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)
PADDING = RowId(RequestKey("padding", 0, "", 0, 0), 0)


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """A graph's numbers of rows and of tokens per row. `filtered`: whether rows may use filters."""

    batch: int
    width: int
    filtered: bool


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes that get graphs. A graph reads at most `most_tokens` positions of a row, the step's own included."""

    batches: tuple[int, ...]
    widths: tuple[int, ...]
    most_tokens: int

    @classmethod
    def up_to(cls, most_rows: int, widths: tuple[int, ...], most_tokens: int) -> Buckets:
        last = bisect.bisect_left(BATCHES, most_rows)
        return cls(BATCHES[: last + 1], widths, most_tokens)

    def shapes(self) -> list[Shape]:
        """Return all shapes, largest first, so that later graphs fit into the first one's memory."""
        every = [Shape(*sizes) for sizes in itertools.product(self.batches, self.widths, (False, True))]
        return sorted(every, key=lambda shape: (shape.batch * shape.width, shape), reverse=True)

    def shape_of(self, plan: StepPlan, params: Params[np.ndarray]) -> Shape | str:
        """Return the shape of the step's graph, or the reason why no graph fits (EAGER_REASONS)."""
        refused = {
            "prompts": plan.num_prefill > 0 or bool(plan.history_seeds or plan.layer_ends),
            "grammars": any(plan.constrained),
            "edits": has_edits(params),
            "logprobs": has_logprobs(plan),
            "adapters": bool(plan.adapters.any()),
            "rows": not 0 < plan.batch_size <= self.batches[-1],
            "width": plan.width not in self.widths,
            "length": plan.layout.max_seq_len > self.most_tokens,
        }
        for why, is_so in refused.items():
            if is_so:
                return why
        batch = self.batches[bisect.bisect_left(self.batches, plan.batch_size)]
        return Shape(batch, plan.width, bool((params["mode"] == FILTERED).any()))


def has_edits(params: Params[np.ndarray]) -> bool:
    """Return whether any row's logits are edited before a draw."""
    lists = (params["stop_ids"], params["bias_ids"], params["bad_ids"])
    return any(map(len, lists)) or bool(params["is_penalised"].any() or params["is_limited"].any())


def some_widths(widths: Sequence[int]) -> tuple[int, ...]:
    """Return the widths that get graphs, ascending: the first, the middle one and the last."""
    return tuple(sorted({widths[0], widths[len(widths) // 2], widths[-1]}))


def frame_of(shape: Shape, most_tokens: int, *, keeps_history: bool) -> StepPlan:
    """Return a plan with the fields that all steps of the shape share. Only the device knows the rows' lengths."""
    batch, width, none = shape.batch, shape.width, np.zeros(0, np.int64)
    zeros = np.zeros(batch, np.int64)
    return StepPlan(
        step=0,
        row_ids=(PADDING,) * batch,
        req_pool_indices=zeros,
        seq_lens_cpu=zeros,
        lengths_relayed=True,
        q_lens=np.full(batch, width, np.int32),
        num_prefill=0,
        layout=Layout(equal_bounds(batch, width), (np.zeros((batch, 1), np.int32),), width, most_tokens),
        prefill_input_ids_cpu=None,
        next_prompt_ids=none,
        emits=np.ones(batch, np.bool_),
        expect_step=zeros,
        sampling=SamplingBatch.build([SamplingParams(1)] * batch, [0] * batch, [0] * batch),
        history_rows=np.full(batch, keeps_history, np.bool_),
        history_seeds=(),
        width=width,
        adapters=zeros,
    )


def row_arrays(plan: StepPlan, params: Params[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays that each step sends, one element per row. A length is -1 if only the relay on the device has
    it."""
    lengths = np.full(plan.batch_size, -1, np.int64) if plan.lengths_relayed else plan.seq_lens_cpu
    own = {
        "rows": plan.req_pool_indices,
        "seq_lens": lengths,
        "expect_step": plan.expect_step,
        "emits": plan.emits.astype(np.int64),
    }
    return own | plan.layout.per_row() | {name: params[name] for name in DRAWING}
