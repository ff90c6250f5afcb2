"""Turn a plan into arrays for the device.

tokens     | chunk of row 0 | chunk of row 1 | window of row 2 | window of row 3 |     T
outputs          (scored)  s               s   w   w   w   w     w   w   w   w         E
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, fields
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from shared.engine.plan import HistorySeed, Int32s, Int64s, StepPlan
from shared.kernel.code.step_layout import HostLengths, Layout

A = TypeVar("A", np.ndarray, torch.Tensor)
NOTHING = np.zeros(0, dtype=np.int64)
NO_SEEDS = np.zeros(0, dtype=np.int32)
MOST_LAYOUTS = 64


class TokenArrays(NamedTuple):
    """The part of StepArrays that depends only on the rows' numbers of tokens and on which rows emit."""

    q_lens: Int64s
    emits: Int64s
    emitting: Int64s
    token_rows: Int64s
    offsets: Int64s
    logits_idx: Int64s
    output_rows: Int64s
    output_of: Int64s


@dataclass(frozen=True, slots=True)
class StepArrays(Generic[A]):
    """Arrays for B rows, T tokens, E outputs, C chunk tokens and P prefill rows; (B,) int64 unless noted.

    It has many fields because one copy sends all arrays of a step.
    """

    q_lens: A
    emits: A  # 0 or 1
    emitting: A  # indices of the batch rows that emit
    token_rows: A  # (T,) batch rows
    offsets: A  # (T,) the token's index among its row's tokens of this step
    logits_idx: A  # (E,) index into T of each output's token
    output_rows: A  # (E,) batch rows
    output_of: A  # (B, width) index of row b's j-th sampled output, clamped if row b has fewer
    rows: A  # request-pool rows
    seq_lens: A  # the plan's lengths
    expect_step: A
    layout: Layout[A]
    chunk_ids: A  # (C,)
    next_prompt_ids: A  # (P,)
    history_tokens: A  # indices into T of tokens that enter the history before the forward
    history_rows: A  # batch rows whose accepted drafts enter the history
    seeded: A  # int32, tokens of all history seeds
    scored: A  # ids of all scored prompt tokens
    adapters: A | None = None  # (T,); None without adapters
    narrow: A | None = None  # (D,) bool, as in the plan, of the D decode rows; None if all rows take drafts
    forced_from: A | None = None  # (D,), and
    forced: A | None = None  # (D, n), as in ForcedDrafts; None if no row's tokens are forced
    sampled: A | None = None  # indices of the sampled outputs; None if all are sampled

    def named(self) -> dict[str, A]:
        """Return all arrays, those of the layout too."""
        own = {name: value for name, value in zip(NAMES, VALUES(self), strict=True) if value is not None}
        return own | self.layout.arrays()

    def on_device(self, copies: dict[str, torch.Tensor], host: HostLengths) -> StepArrays[torch.Tensor]:
        """Return the step with the copies of `named` on the device."""
        layout = self.layout.with_arrays(copies, host=host)
        return StepArrays(layout=layout, **{name: copies[name] for name in NAMES if name in copies})


NAMES = tuple(one.name for one in fields(StepArrays) if one.name != "layout")
VALUES = operator.attrgetter(*NAMES)


def step_arrays(plan: StepPlan, chunk_ids: Int64s) -> StepArrays[np.ndarray]:
    """`chunk_ids`: the step's prompt tokens. The arrays are read-only: steps share them."""
    tokens = _token_arrays(plan) if plan.num_prefill else _window_arrays(plan.batch_size, plan.width)
    sampled, scored = None, NOTHING
    if plan.scores:
        idx = np.sort(np.concatenate([tokens.logits_idx, *_scored_idx(plan, plan.layout.cu_q_lens)]))
        sampled = np.searchsorted(idx, tokens.logits_idx)
        tokens = tokens._replace(logits_idx=idx, output_rows=tokens.token_rows[idx])
        scored = np.concatenate([share.targets for share in plan.scores])
    keeps_history, first = plan.history_rows.any(), plan.num_prefill  # the first decode row
    return StepArrays(
        **tokens._asdict(),
        rows=plan.req_pool_indices,
        seq_lens=plan.seq_lens_cpu,
        expect_step=plan.expect_step,
        layout=plan.layout,
        chunk_ids=chunk_ids,
        next_prompt_ids=plan.next_prompt_ids,
        history_tokens=_history_tokens(plan, tokens.token_rows) if keeps_history else NOTHING,
        history_rows=np.flatnonzero(plan.history_rows[first:]) + first if keeps_history else NOTHING,
        seeded=flat_seeds(plan.history_seeds) if plan.history_seeds else NO_SEEDS,
        scored=scored,
        adapters=plan.adapters[tokens.token_rows] if plan.adapters.any() else None,
        narrow=np.asarray(plan.narrow[plan.num_prefill :]) if plan.narrow else None,
        forced_from=plan.forced.begins if plan.forced is not None else None,
        forced=plan.forced.ids if plan.forced is not None else None,
        sampled=sampled,
    )


def _token_arrays(plan: StepPlan) -> TokenArrays:
    """Lay out a step whose outputs are all sampled."""
    token_rows, cu_q_lens = np.repeat(np.arange(plan.batch_size), plan.q_lens), plan.layout.cu_q_lens
    logits_idx = _sampled_idx(plan, cu_q_lens)
    return TokenArrays(
        q_lens=plan.q_lens.astype(np.int64),
        emits=plan.emits.astype(np.int64),
        emitting=np.flatnonzero(plan.emits),
        token_rows=token_rows,
        offsets=np.arange(len(token_rows)) - cu_q_lens[token_rows],
        logits_idx=logits_idx,
        output_rows=token_rows[logits_idx],
        output_of=_output_of(plan),
    )


@functools.lru_cache(MOST_LAYOUTS)
def _window_arrays(num_rows: int, width: int) -> TokenArrays:
    """Lay out a step of decode rows, which all emit."""
    rows, tokens = np.arange(num_rows), np.arange(num_rows * width)
    return TokenArrays(
        q_lens=np.full(num_rows, width, dtype=np.int64),
        emits=np.ones(num_rows, dtype=np.int64),
        emitting=rows,
        token_rows=rows.repeat(width),
        offsets=tokens % width,
        logits_idx=tokens,
        output_rows=rows.repeat(width),
        output_of=tokens.reshape(num_rows, width),
    )


def flat_seeds(seeds: tuple[HistorySeed, ...]) -> Int32s:
    return np.concatenate([np.zeros(0, np.int32), *(seed.ids.astype(np.int32) for seed in seeds)])


def scored_outputs(plan: StepPlan, output_rows: Int64s) -> list[slice]:
    """Return where each ScoreShare's outputs are: they are the first outputs of its row."""
    firsts = [int(np.searchsorted(output_rows, share.row)) for share in plan.scores]
    return [slice(first, first + len(share.targets)) for first, share in zip(firsts, plan.scores, strict=True)]


def _scored_idx(plan: StepPlan, cu_q_lens: Int32s) -> list[Int64s]:
    return [int(cu_q_lens[share.row]) + share.offset + np.arange(len(share.targets)) for share in plan.scores]


def _sampled_idx(plan: StepPlan, cu_q_lens: Int32s) -> Int64s:
    num_prefill = plan.num_prefill
    chunk_last = cu_q_lens[1 : num_prefill + 1][plan.emits[:num_prefill]] - 1
    window = np.arange(cu_q_lens[num_prefill], cu_q_lens[-1])
    return np.concatenate([chunk_last, window]).astype(np.int64)


def _output_of(plan: StepPlan) -> Int64s:
    num_prefill = plan.num_prefill
    emitted = plan.emits[:num_prefill]
    num_chunk_outputs = int(emitted.sum())
    table = np.zeros((plan.batch_size, plan.width), dtype=np.int64)
    table[:num_prefill] = np.maximum(np.cumsum(emitted) - 1, 0)[:, None]
    num_decode = plan.batch_size - num_prefill
    table[num_prefill:] = num_chunk_outputs + np.arange(num_decode * plan.width).reshape(num_decode, plan.width)
    return table


def _history_tokens(plan: StepPlan, token_rows: Int64s) -> Int64s:
    """Return `history_tokens`, without a decode row's drafts, which are not known yet."""
    is_wanted = plan.history_rows[token_rows]
    num_chunk = int(plan.q_lens[: plan.num_prefill].sum())
    is_wanted[num_chunk:] &= np.arange(len(is_wanted) - num_chunk) % plan.width == 0
    return np.flatnonzero(is_wanted)
