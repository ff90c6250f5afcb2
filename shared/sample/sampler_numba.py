"""Sample on a CPU: check and lay out arrays for numba kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from shared.core.sampling_params import NUMBERS
from shared.kernel.sampling import sample_cpu as kernels
from shared.kernel.sampling.sample_cpu import logprobs
from shared.kernel.sampling.sample_edits import Outputs, RowParams
from shared.kernel.sampling.sample_team import PlacedParams, TeamSampler
from shared.kernel.team.team import Team
from shared.sample.interface import History, SampleOutput, SamplingBatch, TokenMasks

PARALLEL_FROM = 1 << 18  # with fewer logits, waking a team's threads does not pay
NO_TOKEN = -1  # fills top_ids where a row requested fewer tokens than others
MOST_SIZES = 64  # numbers of outputs whose constant arrays are kept
NO_ROWS, NO_HISTORY = np.zeros(0, np.int64), np.zeros((1, 1), np.int32)
NO_MASKS = np.zeros((0, 0), np.uint32)


def sample_cpu(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: npt.NDArray[np.int64],
    positions: torch.Tensor,
    history: History | None,
    masks: TokenMasks | None = None,
) -> SampleOutput:
    values, params, outputs = kernel_inputs(logits, batch, row_of, positions, history, masks)
    ids = np.zeros(len(values), dtype=np.int64)
    sampler_for(values.size).draw(values, params, outputs, ids)
    if batch.most_logprobs < 0:
        return SampleOutput(torch.from_numpy(ids), *_no_logprobs(len(ids)))
    return with_logprobs(values, batch.num_logprobs[outputs.rows], ids)


def sampler_for(num_logits: int) -> TeamSampler:
    return sampler_of(torch.get_num_threads() if num_logits >= PARALLEL_FROM else 1)


@functools.cache
def sampler_of(num_threads: int) -> TeamSampler:
    return TeamSampler(Team(num_threads))


def kernel_inputs(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: npt.NDArray[np.int64],
    positions: torch.Tensor,
    history: History | None,
    masks: TokenMasks | None = None,
) -> tuple[npt.NDArray[np.float32], PlacedParams, Outputs]:
    outputs = outputs_of(row_of, positions, history, masks)
    _check_range(outputs, len(batch), batch.needs_history)
    if masks is not None:
        check_masks(masks.rows, masks.bits, len(row_of), logits.shape[1])
    return logits.contiguous().numpy(), batch.kept(row_params), outputs


def outputs_of(
    row_of: npt.NDArray[np.int64], positions: torch.Tensor, history: History | None, masks: TokenMasks | None = None
) -> Outputs:
    """Without a history, the kernels read neither `common` nor `drafted`."""
    where = positions.contiguous().numpy()
    num_outputs = len(where)
    rows, tokens, common, drafted = NO_ROWS, NO_HISTORY, where, _no_drafts(num_outputs)
    if history is not None:
        rows, tokens = history.rows.contiguous().numpy(), history.tokens.contiguous().numpy()
        common = where + 1
        if history.common is not None and history.drafted is not None:
            common, drafted = history.common.contiguous().numpy(), history.drafted.contiguous().numpy()
    mask_rows, bits = _unmasked(num_outputs), NO_MASKS
    if masks is not None:
        mask_rows, bits = masks.rows, masks.bits
    return Outputs(np.ascontiguousarray(row_of, np.int64), where, rows, tokens, common, drafted, mask_rows, bits)


@functools.lru_cache(MOST_SIZES)
def _no_drafts(num_outputs: int) -> npt.NDArray[np.int32]:
    return np.zeros((num_outputs, 0), np.int32)


@functools.lru_cache(MOST_SIZES)
def _unmasked(num_outputs: int) -> npt.NDArray[np.int64]:
    return np.full(num_outputs, -1, np.int64)


@functools.lru_cache(MOST_SIZES)
def _no_logprobs(num_outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    none = torch.zeros((num_outputs, 0))
    return torch.zeros(num_outputs), none.to(torch.int64), none


def _check_range(outputs: Outputs, num_rows: int, reads_history: bool) -> None:
    """Raise IndexError for wrong indices, which the kernels do not check."""
    if len(outputs.positions) != len(outputs.rows):
        raise IndexError(f"{len(outputs.rows)} outputs, but {len(outputs.positions)} positions")
    if outputs.rows.size == 0:
        return
    if outputs.rows.min() < 0 or outputs.rows.max() >= num_rows:
        raise IndexError(f"an output belongs to none of the {num_rows} batch rows")
    if not reads_history:
        return
    num_history, max_context = outputs.history.shape
    rows = outputs.history_rows
    if len(rows) < num_rows or rows.min() < 0 or rows.max() >= num_history:
        raise IndexError(f"a batch row has no row among the {num_history} of the history")
    if outputs.common.min() < 0 or outputs.common.max() > max_context:
        raise IndexError(f"an output reads {outputs.common.max()} tokens, past the history's width of {max_context}")
    if len(outputs.common) != len(outputs.rows) or len(outputs.drafted) != len(outputs.rows):
        raise IndexError(f"{len(outputs.rows)} outputs, but draft ancestors for {len(outputs.drafted)}")


def check_masks(rows: npt.NDArray[np.int64], bits: npt.NDArray[np.uint32], num_outputs: int, vocab_size: int) -> None:
    """Raise IndexError unless each output's mask exists, with a bit for each id."""
    if len(rows) != num_outputs:
        raise IndexError(f"{num_outputs} outputs, but masks for {len(rows)}")
    if rows.max(initial=-1) >= len(bits) or (len(bits) and 32 * bits.shape[1] < vocab_size):
        raise IndexError(f"{bits.shape} words of masks are too few for mask {rows.max(initial=-1)} of {vocab_size} ids")


def row_params(batch: SamplingBatch) -> PlacedParams:
    reals = [batch.array(one) for one in NUMBERS if one.kind is float]
    counts = [batch.array(one) for one in NUMBERS if one.kind is int]
    stop_ids, stop_offsets = _ragged(batch.stop_ids)
    bias_ids, bias_offsets = _ragged([[i for i, _ in row] for row in batch.logit_bias])
    bias_values = np.array([value for row in batch.logit_bias for _, value in row], dtype=np.float32)
    allowed_ids, allowed_offsets = _ragged(batch.allowed_ids)
    bad_ids, bad_ends = _ragged([word for words in batch.bad_words for word in words])
    params = RowParams(
        np.stack(reals, axis=1),
        np.stack([*counts, batch.prompt_lens, batch.seeds.view(np.int64)], axis=1, dtype=np.int64),
        stop_ids,
        stop_offsets,
        bias_ids,
        bias_values,
        bias_offsets,
        allowed_ids,
        allowed_offsets,
        bad_ids,
        bad_ends,
        np.cumsum([0, *map(len, batch.bad_words)], dtype=np.int64),
    )
    return PlacedParams(params)


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.array([i for row in rows for i in row], dtype=np.int64), offsets


def with_logprobs(
    values: npt.NDArray[np.float32], num_best: npt.NDArray[np.int32], ids: npt.NDArray[np.int64]
) -> SampleOutput:
    """Return the ids with their logprobs, and each output's likeliest tokens.

    `num_best` (E,): how many likeliest tokens; below 0: no logprobs."""
    width = max(0, int(num_best.max(initial=-1)))
    chosen = np.zeros(len(ids), dtype=np.float32)
    best_ids = np.full((len(ids), width), NO_TOKEN, dtype=np.int64)
    best = np.zeros((len(ids), width), dtype=np.float32)
    if (num_best >= 0).any():
        logprobs(values, ids, num_best, chosen, best_ids, best)
    tensors = (torch.from_numpy(array) for array in (ids, chosen, best_ids, best))
    return SampleOutput(*tensors)


def rank_candidates_cpu(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: npt.NDArray[np.int64],
    positions: torch.Tensor,
    history: History | None,
    num: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    values, params, outputs = kernel_inputs(logits, batch, row_of, positions, history)
    ids, log_probs = np.zeros((len(values), num), np.int64), np.zeros((len(values), num), np.float32)
    kernels.rank_candidates(values, params.params, outputs, ids, log_probs)
    return torch.from_numpy(ids), torch.from_numpy(log_probs)
