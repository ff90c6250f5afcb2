"""HashDraft: a draft model for HashLM that is right exactly where a hash of the position says so.

It has nothing but its own paged state, which depends on the next token as EAGLE's does, and what is relayed:

    draft[j] = (token_j + 1) * A  xor  mix(token_{j+1}, j)

From the bonus token (at position L = committed, not in the pool yet) the context is decoded backwards through the page
table, L-1 down to 0; a wrong page, a stale slot or a wrong bonus token makes garbage of all that comes before it.
The relayed hidden state must equal the one the context gives. So at committed length L a verify of width k accepts
`expected_accept_len(L, k, hit_rate)` tokens, and bad draft state lowers that number, but never changes the stream.
Knows nothing of sampling: the caller passes the function that draws.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.noise import exact
from shared.kv.pool import KVPool
from shared.model.hashlm import HashLM, mix, odd_weight

FACTOR = 0xD1342543DE82EF95
INVERSE = pow(FACTOR, -1, 1 << 64)

_u64 = np.uint64


class NextToken(Protocol):
    """Draws the token after `input_ids`, one per batch row, with the row's own parameters, noise and history."""

    def __call__(self, logits: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(B, vocab) float32, (B,) int64, (B,) int64 -> (B,) int64. The history gets the input ids first."""
        ...


@exact
def is_hit(position: int, hit_rate: int) -> bool:
    """Whether the draft is right about the token at this position."""
    return np.int64(mix(_u64(0xD4AF7), position) % _u64(100)) < hit_rate


@exact
def expected_accept_len(committed: int, width: int, hit_rate: int) -> int:
    """What a verify of `width` tokens at this committed length must accept: leading hits + 1 (the bonus token)."""
    accepted = 1
    while accepted < width and is_hit(committed + accepted, hit_rate):
        accepted += 1
    return accepted


@exact
def _extend(
    ids: npt.NDArray[np.int64],
    next_ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    cu_q_lens: npt.NDArray[np.int32],
    page_table: npt.NDArray[np.int32],
    draft: npt.NDArray[np.uint64],
) -> None:
    page_size = draft.shape[1]
    for row in range(cu_q_lens.shape[0] - 1):
        for t in range(cu_q_lens[row], cu_q_lens[row + 1]):
            position = positions[t]
            value = _u64(_u64(ids[t] + 1) * _u64(FACTOR)) ^ mix(_u64(next_ids[t]), position)
            draft[page_table[row, position // page_size], position % page_size] = value


@exact
def _rebuild(
    bonus_ids: npt.NDArray[np.int64],
    committed: npt.NDArray[np.int64],
    page_table: npt.NDArray[np.int32],
    draft: npt.NDArray[np.uint64],
    lower: npt.NDArray[np.uint64],
    upper: npt.NDArray[np.uint64],
) -> None:
    """Decodes each row's context backwards and computes HashLM's sums of it, forwards."""
    page_size = draft.shape[1]
    for row in range(bonus_ids.shape[0]):
        context = np.empty(committed[row], dtype=np.uint64)
        following = _u64(bonus_ids[row])
        for j in range(committed[row] - 1, -1, -1):
            value = draft[page_table[row, j // page_size], j % page_size] ^ mix(following, j)
            following = _u64(value * _u64(INVERSE)) - _u64(1)
            context[j] = following
        lower[row], upper[row] = _u64(0), _u64(0)
        for j in range(committed[row]):
            _advance(context[j], j, row, lower, upper)


@exact
def _advance(
    token_id: np.uint64, position: int, row: int, lower: npt.NDArray[np.uint64], upper: npt.NDArray[np.uint64]
) -> None:
    weight = odd_weight(position)
    lower[row] += mix(token_id, position) * weight
    upper[row] += mix(lower[row], position) * weight


@exact
def _advance_all(
    ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    lower: npt.NDArray[np.uint64],
    upper: npt.NDArray[np.uint64],
) -> None:
    for row in range(ids.shape[0]):
        _advance(_u64(ids[row]), positions[row], row, lower, upper)


@exact
def _drafts(
    true_ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    hidden_ok: npt.NDArray[np.bool_],
    hit_rate: int,
    vocab_size: int,
    out: npt.NDArray[np.int64],
) -> None:
    """The true id where the hash allows it, surely another one where not or where the relayed state was wrong."""
    for row in range(true_ids.shape[0]):
        right = hidden_ok[row] and is_hit(positions[row], hit_rate)
        shift = 1 + np.int64(mix(_u64(true_ids[row]), positions[row]) % _u64(vocab_size - 1))
        out[row] = true_ids[row] if right else (true_ids[row] + shift) % vocab_size


class HashDraft:
    """Draft head of one HashLM built with draft=True; its state is the plane "draft" of the same pages.

    Both methods run on the forward stream on CPU tensors; hit_rate is in percent.
    """

    def __init__(self, model: HashLM, hit_rate: int = 70) -> None:
        if not model.draft:
            raise ValueError("HashDraft needs a HashLM with draft=True: its pages have no draft plane")
        self.model = model
        self.hit_rate = hit_rate

    def extend(
        self,
        input_ids: torch.Tensor,
        next_ids: torch.Tensor,
        positions: torch.Tensor,
        cu_q_lens: torch.Tensor,
        page_table: torch.Tensor,
        kv: KVPool,
    ) -> None:
        """Writes draft state of T tokens; shapes and dtypes as in ModelInputs, next_ids[t] is the token after t."""
        _extend(
            input_ids.contiguous().numpy(),
            next_ids.contiguous().numpy(),
            positions.contiguous().numpy(),
            cu_q_lens.contiguous().numpy(),
            page_table.contiguous().numpy(),
            kv.plane("draft").numpy().view(np.uint64),
        )

    def propose(
        self,
        bonus_ids: torch.Tensor,
        committed: torch.Tensor,
        hidden: torch.Tensor,
        page_table: torch.Tensor,
        kv: KVPool,
        width: int,
        next_token: NextToken,
    ) -> torch.Tensor:
        """Drafts for positions committed + 1 .. committed + width - 1: (B, width - 1) int64.

        bonus_ids (B,) int64 sit at position committed (B,) int64; hidden (B, 1) int64 is HashLM's at committed - 1.
        """
        lower = np.empty(len(bonus_ids), dtype=np.uint64)
        upper = np.empty(len(bonus_ids), dtype=np.uint64)
        bonus_ids, committed, page_table = bonus_ids.contiguous(), committed.contiguous(), page_table.contiguous()
        draft = kv.plane("draft").numpy().view(np.uint64)
        _rebuild(bonus_ids.numpy(), committed.numpy(), page_table.numpy(), draft, lower, upper)
        hidden_ok = upper.view(np.int64) == hidden.numpy()[:, 0]
        drafts = np.empty((width - 1, len(bonus_ids)), dtype=np.int64)
        true_ids = bonus_ids
        for i in range(width - 1):
            positions = committed + i
            _advance_all(true_ids.numpy(), positions.numpy(), lower, upper)
            true_ids = next_token(self.model.logits_of(upper), true_ids, positions)
            vocab_size = self.model.spec.vocab_size
            _drafts(true_ids.numpy(), positions.numpy() + 1, hidden_ok, self.hit_rate, vocab_size, drafts[i])
        return torch.from_numpy(np.ascontiguousarray(drafts.T))
