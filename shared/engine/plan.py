"""What the scheduler hands to the engine (StepPlan, Admission) and gets back (StepResult). Values only, no Request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shared.core.keys import RequestKey
from shared.sample.interface import SamplingBatch

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class RowId(NamedTuple):
    """Which life of which request a batch row belongs to; results of an older incarnation are dropped."""

    key: RequestKey
    incarnation: int


@dataclass(frozen=True, slots=True)
class HistorySeed:
    """Tokens that a row's history must hold before this step, because no forward of this row writes them
    (prefix-cache hits, KV that came by hand-off): positions [0, len(ids))."""

    row: int
    ids: Int64s


@dataclass(frozen=True, slots=True)
class ScoreShare:
    """n prompt tokens whose log-probabilities a step brings. Each is read off the logits of the token before it, which
    this step computes."""

    row: int  # of the batch, a chunk's
    offset: int  # in the chunk, of the token before the first target
    first: int  # the first target's position in the prompt
    targets: Int64s  # (n,)
    num_top: int  # likeliest tokens to name with each


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What a step says of n prompt tokens of one row. K = the share's num_top, less where the vocabulary is smaller."""

    row: int
    first: int
    logprobs: npt.NDArray[np.float32]  # (n,)
    top_ids: npt.NDArray[np.int64]  # (n, K)
    top_logprobs: npt.NDArray[np.float32]  # (n, K)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launched step. B rows: chunks of prompts first, then decode rows (`mix_running_indices`).

        committed + q_len = attention length.  Chunk rows: q_len tokens out of `prefill_input_ids_cpu`.
        Decode rows: q_len = width, the first token comes from the FutureMap, the others from the drafter.

    Frozen and launched once. All arrays are copies, so nobody waits for a plan before changing what it was made of
    (S7): the batch's lengths, the page table.
    """

    step: int
    row_ids: tuple[RowId, ...]
    req_pool_indices: Int64s  # (B,)
    seq_lens_cpu: Int64s  # (B,) committed before the step
    lengths_relayed: bool  # of decode rows these are lower bounds, and the FutureMap has the exact lengths
    q_lens: Int32s  # (B,)
    num_prefill: int
    page_table: Int32s  # (B, P) copy
    prefill_input_ids_cpu: torch.Tensor | None  # (sum of chunk q_lens,) int64
    next_prompt_ids: Int64s  # (num_prefill,) the prompt token after the chunk, -1 when the chunk ends the prompt
    emits: Bools  # (B,) whether the row samples
    expect_step: Int64s  # (B,) the step that wrote the row's relay; -1 for chunk rows
    sampling: SamplingBatch
    history_rows: Bools  # (B,) whether its sampling or the drafter reads the row's history
    history_seeds: tuple[HistorySeed, ...]
    width: int
    max_seq_len: int  # >= committed + q_len of every row
    adapters: Int64s  # (B,) 0 none, n the model's n-th LoRA adapter
    chunk_ends: tuple[int, ...] = ()  # (num_prefill,) committed after the step
    layer_ends: tuple[int, ...] = ()  # somebody waits for the KV of the first so many layers
    encoder_lens: Int64s | None = None  # (B,) positions that are the encoder's; None: the model has none
    scores: tuple[ScoreShare, ...] = ()  # in the order of their rows
    constrained: tuple[bool, ...] = ()  # (B,) whether a grammar masks the row's outputs; () where none has one

    @property
    def batch_size(self) -> int:
        return len(self.row_ids)

    @property
    def prompt_tokens(self) -> int:
        """Tokens that its chunks compute."""
        return int(self.q_lens[: self.num_prefill].sum())

    @property
    def mix_running_indices(self) -> Int64s:
        """Pool rows of the decode tail, which attention may run apart from the chunks."""
        return self.req_pool_indices[self.num_prefill :]


@dataclass(frozen=True, slots=True)
class Admission:
    """PREBUILT: rows that join the running batch without a forward. A step of its own, with its own lease."""

    step: int
    row_ids: tuple[RowId, ...]
    req_pool_indices: Int64s  # (B,)
    tokens: Int64s  # (B,) the next input token of each row
    committed: Int64s  # (B,)
    draft_state: dict[str, torch.Tensor]  # (B, *shape) host, per relayed extra of the drafter
    history_seeds: tuple[HistorySeed, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Host copies of what a step brought. k = width; row b emitted tokens[b, :accept_lens[b]].

    tag_ok[b] is False when the relay row that b read had been written by another step than the plan expected.
    """

    step: int
    row_ids: tuple[RowId, ...]
    num_prefill: int
    tokens: Int64s  # (B, k)
    accept_lens: Int32s  # (B,) 0 for rows that don't emit
    seq_lens: Int64s  # (B,) committed after the step
    tag_ok: Bools  # (B,)
    draft_state: dict[str, torch.Tensor]  # (num_prefill, *shape) host: what a hand-off takes along
    draft_seconds: float  # on the forward stream: propose and extend
    verify_seconds: float  # everything else of the step; both 0 where no clock runs
    logprobs: npt.NDArray[np.float32]  # (B, k)
    top_ids: npt.NDArray[np.int64]  # (B, k, K)
    top_logprobs: npt.NDArray[np.float32]  # (B, k, K)
    scores: tuple[PromptScores, ...] = ()
    prompt_tokens: int = 0  # that its chunks computed

    @property
    def width(self) -> int:
        """The plan's."""
        width: int = self.tokens.shape[1]
        return width

    def stepped(self, index: int) -> int:
        """Tokens that row `index` may have committed of the FutureMap's and the drafts': none in a chunk."""
        return 0 if index < self.num_prefill else self.width

    @property
    def seconds(self) -> float:
        """What the step took on the forward stream."""
        return self.draft_seconds + self.verify_seconds
