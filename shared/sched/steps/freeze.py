"""Freeze chunks and decode rows into a StepPlan, which refers to no request."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch

from shared.core.request import Request
from shared.engine.plan import ForcedDrafts, HistorySeed, Int32s, Int64s, RowId, ScoreShare, StepPlan
from shared.kernel.code.step_layout import Layout, equal_bounds
from shared.kv.manager import KVManager
from shared.sample.interface import SamplingBatch
from shared.sched.steps.batch import ScheduleBatch
from shared.sched.steps.chunking import ChunkedPrompt
from shared.sched.steps.settings import SchedSettings


@dataclass(frozen=True, slots=True)
class ChunkShare:
    chunk: ChunkedPrompt
    q_len: int

    @property
    def is_last(self) -> bool:
        return self.q_len == self.chunk.remaining


class PlanFreezer:
    """Reuses the last plan's sampling arrays for equal rows: building these arrays takes half of a plan's time."""

    def __init__(self, kv: KVManager, settings: SchedSettings) -> None:
        self._kv = kv
        self._settings = settings
        self._sampling_of: tuple[RowId, ...] = ()
        self._sampling = SamplingBatch.build([], [], [])

    def freeze(
        self,
        step: int,
        shares: Sequence[ChunkShare],
        batch: ScheduleBatch,
        rows: Int64s,
        width: int,
        drafts_next: bool = True,
        narrow: Set[Request] = frozenset(),
    ) -> StepPlan:
        """`rows`: indices into the decode batch. `narrow`: decode rows that take no drafts."""
        reqs = [share.chunk.request for share in shares] + [batch.reqs[i] for i in rows]
        chunk_lens = np.asarray([share.chunk.computed for share in shares], dtype=np.int64)
        chunk_q = [share.q_len for share in shares]
        q_lens = np.asarray(chunk_q + [width] * len(rows), dtype=np.int32)
        upper = np.concatenate([chunk_lens, batch.seq_lens.hi[rows]])
        encoder_lens = self._settings.prompts.encoder_lens(reqs)
        row_ids = tuple(RowId(req.key, req.incarnation) for req in reqs)
        pool_rows = np.asarray([req.row for req in reqs], dtype=np.int64)
        return StepPlan(
            step=step,
            row_ids=row_ids,
            req_pool_indices=pool_rows,
            seq_lens_cpu=np.concatenate([chunk_lens, batch.seq_lens.lo[rows]]),
            lengths_relayed=self._settings.relays_lengths and len(rows) > 0,
            q_lens=q_lens,
            num_prefill=len(shares),
            layout=Layout(
                cu_q_lens=_bounds(q_lens) if shares else equal_bounds(len(rows), width),
                page_tables=self._kv.rows.snapshot(pool_rows),
                max_q_len=max(chunk_q + [width] * bool(len(rows))),
                max_seq_len=int((upper + q_lens).max()),
                encoder_lens=encoder_lens,
            ),
            prefill_input_ids_cpu=self._stage(shares),
            next_prompt_ids=np.asarray([_next_prompt_id(share) for share in shares], dtype=np.int64),
            emits=np.asarray([share.is_last for share in shares] + [True] * len(rows), dtype=np.bool_),
            expect_step=np.concatenate([np.full(len(shares), -1, np.int64), batch.expect_step[rows]]),
            sampling=self._sampling_batch(row_ids, reqs),
            history_rows=np.asarray([self._settings.keeps_history(req) for req in reqs], dtype=np.bool_),
            history_seeds=tuple(self._history_seeds(shares)),
            width=width,
            adapters=np.asarray([self._settings.adapters.slot(req.ask.adapter) for req in reqs], dtype=np.int64),
            chunk_ends=tuple((chunk_lens + np.asarray(chunk_q, dtype=np.int64)).tolist()),
            layer_ends=self._settings.layer_ends if any(req.handoff_to is not None for req in reqs) else (),
            scores=_score_shares(shares) if encoder_lens is None else (),
            constrained=_constrained(reqs),
            narrow=tuple(req in narrow for req in reqs) if narrow and width > 1 else (),
            forced=_forced([batch.reqs[i] for i in rows], width) if width > 1 and batch.constrained else None,
            drafts_next=drafts_next,
        )

    def _stage(self, shares: Sequence[ChunkShare]) -> torch.Tensor | None:
        """The forward stream copies the tokens from host memory (S9)."""
        if not shares:
            return None
        parts = [share.chunk.ids[share.chunk.computed : share.chunk.computed + share.q_len] for share in shares]
        return torch.from_numpy(np.concatenate(parts))

    def _sampling_batch(self, row_ids: tuple[RowId, ...], reqs: Sequence[Request]) -> SamplingBatch:
        if row_ids != self._sampling_of:
            self._sampling_of = row_ids
            self._sampling = SamplingBatch.build(
                [req.ask.sampling for req in reqs],
                [req.ask.seed for req in reqs],
                [len(req.ask.prompt_ids) for req in reqs],
            )
        return self._sampling

    def _history_seeds(self, shares: Sequence[ChunkShare]) -> list[HistorySeed]:
        """Return the cached tokens of rows with a history. No forward writes these tokens to the history."""
        seeds = []
        for share in shares:
            chunk = share.chunk
            if not chunk.started and chunk.computed and self._settings.keeps_history(chunk.request):
                seeds.append(HistorySeed(chunk.request.row, chunk.ids[: chunk.computed].copy()))
        return seeds


def _bounds(q_lens: Int32s) -> Int32s:
    bounds = np.zeros(len(q_lens) + 1, dtype=np.int32)
    np.cumsum(q_lens, out=bounds[1:])
    return bounds


def _constrained(reqs: Sequence[Request]) -> tuple[bool, ...]:
    constrained = tuple(req.constraint is not None for req in reqs)
    return constrained if any(constrained) else ()


def _forced(reqs: Sequence[Request], width: int) -> ForcedDrafts | None:
    """Return enough tokens for this step and the one in flight, or None if no row has any."""
    ids = np.full((len(reqs), 2 * width), -1, dtype=np.int64)
    begins = np.zeros(len(reqs), dtype=np.int64)
    for row, req in enumerate(reqs):
        if req.constraint is not None:
            known = req.constraint.forced
            tokens = known.ids[: 2 * width]
            begins[row] = len(req.ask.prompt_ids) + known.num_emitted
            ids[row, : len(tokens)] = tokens
    return ForcedDrafts(begins, ids) if (ids >= 0).any() else None


def _score_shares(shares: Sequence[ChunkShare]) -> tuple[ScoreShare, ...]:
    found = (_score_share(row, share) for row, share in enumerate(shares))
    return tuple(one for one in found if one is not None)


def _score_share(row: int, share: ChunkShare) -> ScoreShare | None:
    req, chunk = share.chunk.request, share.chunk
    if req.first_unscored is None:
        return None
    first = max(chunk.computed + 1, req.first_unscored)
    end = min(chunk.computed + share.q_len + 1, len(req.ask.prompt_ids))
    if first >= end:
        return None
    return ScoreShare(
        row, first - 1 - chunk.computed, first, chunk.ids[first:end].copy(), req.ask.sampling.prompt_logprobs
    )


def _next_prompt_id(share: ChunkShare) -> int:
    chunk = share.chunk
    return -1 if share.is_last else int(chunk.ids[chunk.computed + share.q_len])
