"""Define the values that scheduler and engine exchange. None of them holds a Request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shared.core.keys import RequestKey
from shared.kernel.code.step_layout import Layout
from shared.sample.interface import SamplingBatch

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class RowId(NamedTuple):
    """A request's incarnation. A retraction begins a new incarnation; results of an older incarnation are dropped."""

    key: RequestKey
    incarnation: int


@dataclass(frozen=True, slots=True)
class HistorySeed:
    """A row's first len(ids) tokens, from a prefix-cache hit or a hand-off. No forward of the row has them as input."""

    row: int
    ids: Int64s


@dataclass(frozen=True, slots=True)
class ScoreShare:
    """n prompt tokens to score. The logits of the token before it score each one."""

    row: int  # row in the batch
    offset: int  # index in the chunk of the token before the first target
    first: int  # first target's prompt position
    targets: Int64s  # (n,)
    num_top: int  # number of likeliest tokens to return per target


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of n tokens of a prompt. K is the ScoreShare's num_top, or the vocabulary's size if that is smaller."""

    row: int
    first: int
    logprobs: npt.NDArray[np.float32]  # (n,)
    top_ids: npt.NDArray[np.int64]  # (n, K)
    top_logprobs: npt.NDArray[np.float32]  # (n, K)


@dataclass(frozen=True, slots=True)
class ForcedDrafts:
    """Tokens of D decode rows that their grammars leave no choice about."""

    begins: Int64s  # (D,) each row's index of the first of them in the sequence
    ids: Int64s  # (D, n), -1 behind a row's last


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of B rows: first the rows with prompt chunks, then the decode rows (`mix_running_indices`).

        committed + q_len = attention length.  Chunk rows: q_len tokens from `prefill_input_ids_cpu`.
        Decode rows: q_len = width; the first token comes from the FutureMap, the others from the drafter.

    Arrays are (B,) unless noted. They are copies, so the batch may change while the plan is in flight (S7). A plan is
    launched once.

    It has many fields because a step knows its requests by these values alone.
    """

    step: int
    row_ids: tuple[RowId, ...]
    req_pool_indices: Int64s
    seq_lens_cpu: Int64s  # numbers of committed tokens before the step
    lengths_relayed: bool  # whether decode rows' seq_lens_cpu are lower bounds of the FutureMap's exact lengths
    q_lens: Int32s
    num_prefill: int
    layout: Layout[np.ndarray]  # its page tables are copies
    prefill_input_ids_cpu: torch.Tensor | None  # (sum of chunk q_lens,) int64
    next_prompt_ids: Int64s  # (num_prefill,) the token after each chunk, -1 at the prompt's end
    emits: Bools  # whether the row samples
    expect_step: Int64s  # the step that wrote the row's relay; -1 for chunk rows
    sampling: SamplingBatch
    history_rows: Bools  # whether sampling or drafter reads the row's history
    history_seeds: tuple[HistorySeed, ...]
    width: int
    adapters: Int64s  # as in ModelInputs, (B,)
    chunk_ends: tuple[int, ...] = ()  # (num_prefill,) numbers of committed tokens after the step
    layer_ends: tuple[int, ...] = ()  # for each n, an event fires once the first n layers have written KV
    scores: tuple[ScoreShare, ...] = ()  # in row order
    constrained: tuple[bool, ...] = ()  # whether a grammar masks the row; () without grammars
    narrow: tuple[bool, ...] = ()  # whether the row takes no drafts, having one mask at most; () if all take them
    forced: ForcedDrafts | None = None
    drafts_next: bool = True  # whether the rows' next steps may draft

    @property
    def batch_size(self) -> int:
        return len(self.row_ids)

    @property
    def has_one_token_each(self) -> bool:
        return self.num_prefill == 0 and self.width == 1

    @property
    def prompt_tokens(self) -> int:
        return int(self.q_lens[: self.num_prefill].sum()) if self.num_prefill else 0

    @property
    def mix_running_indices(self) -> Int64s:
        """Return the decode rows' request-pool rows."""
        return self.req_pool_indices[self.num_prefill :]


@dataclass(frozen=True, slots=True)
class Admission:
    """Rows that join the batch without a forward (PREBUILT). This is a step with its own lease."""

    step: int
    row_ids: tuple[RowId, ...]
    req_pool_indices: Int64s  # (B,)
    tokens: Int64s  # (B,) next input tokens
    committed: Int64s  # (B,)
    draft_state: dict[str, torch.Tensor]  # (B, *shape) on the host, by name of the relayed extra
    history_seeds: tuple[HistorySeed, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Host copies of a step's results, as in Verified. k = width."""

    step: int
    row_ids: tuple[RowId, ...]
    num_prefill: int
    tokens: Int64s  # (B, k)
    accept_lens: Int32s  # (B,)
    seq_lens: Int64s  # (B,)
    tag_ok: Bools  # (B,), as in Prepared
    draft_state: dict[str, torch.Tensor]  # (num_prefill, *shape) on the host, for a hand-off
    draft_seconds: float  # the drafter's time on the forward stream
    verify_seconds: float  # time of the step's other work; without a clock both times are 0
    logprobs: npt.NDArray[np.float32]  # (B, k)
    top_ids: npt.NDArray[np.int64]  # (B, k, K)
    top_logprobs: npt.NDArray[np.float32]  # (B, k, K)
    scores: tuple[PromptScores, ...] = ()
    prompt_tokens: int = 0

    @classmethod
    def plain(cls, plan: StepPlan, tokens: Sequence[int]) -> StepResult:
        """Return the result of a step that drafts nothing, in no time. `tokens`: one for each row."""
        return cls(
            step=plan.step,
            row_ids=plan.row_ids,
            num_prefill=plan.num_prefill,
            tokens=np.asarray(tokens, np.int64).reshape(-1, 1),
            accept_lens=plan.emits.astype(np.int32),
            seq_lens=plan.seq_lens_cpu + plan.q_lens,
            tag_ok=np.ones(plan.batch_size, np.bool_),
            draft_state={},
            draft_seconds=0.0,
            verify_seconds=0.0,
            logprobs=np.zeros((plan.batch_size, 1), np.float32),
            top_ids=np.zeros((plan.batch_size, 1, 0), np.int64),
            top_logprobs=np.zeros((plan.batch_size, 1, 0), np.float32),
            prompt_tokens=plan.prompt_tokens,
        )

    @property
    def width(self) -> int:
        width: int = self.tokens.shape[1]
        return width

    def stepped(self, index: int) -> int:
        """Return the limit on the tokens that the step commits in row `index`; 0 for a chunk row."""
        return 0 if index < self.num_prefill else self.width

    @property
    def seconds(self) -> float:
        """Return the step's time on the forward stream."""
        return self.draft_seconds + self.verify_seconds
