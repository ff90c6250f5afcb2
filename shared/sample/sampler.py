"""The sampler: one function of (logits, parameters, seed, position, history), with no state between calls.

    penalties -> bias -> masks -> temperature -> top-k -> top-p -> min-p -> Gumbel-max; ties go to the lowest id

The token at position p + 1 is drawn from the logits of the token at p with noise hash(seed, p + 1, id), so batch mates,
chunks, speculation and the node that runs it can't show. Two implementations give equal ids: numba on a CPU, torch
elsewhere. Knows nothing of requests, streams or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.sample_cpu import GREEDY_BELOW, logprobs, sample_parallel, sample_serial
from shared.kernel.sample_edits import Outputs, RowParams
from shared.sample.interface import History, SampleOutput, SamplingBatch, TokenMasks
from shared.sample.sampler_torch import sample_torch, score_torch

PARALLEL_FROM = 1 << 18  # logits; below it waking threads costs more than it saves
NO_TOKEN = -1  # in top_ids, where a row asked for fewer than the widest


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: npt.NDArray[np.int64],
    positions: torch.Tensor,
    history: History | None = None,
    masks: TokenMasks | None = None,
) -> SampleOutput:
    """Draw one token for each of E outputs; runs on the stream that made the logits and leaves them as they are.

    logits (E, vocab) float32; row_of (E,) batch row of each output, on the host; positions (E,) int64 of the input
    tokens, on the logits' device. `history` may be None when no row has penalties or bad words of several tokens,
    `masks` when no row has a grammar.
    """
    if logits.dtype != torch.float32:
        raise TypeError(f"logits are {logits.dtype}: sampling is float32 from the lm_head on")
    if history is None and needs_history(batch):
        raise ValueError("a row has penalties or bad words, but there is no history of its tokens")
    if logits.device.type == "cpu":
        return sample_cpu(logits, batch, row_of, positions, history, masks)
    return sample_torch(logits, batch, row_of, positions, history, masks)


def needs_history(batch: SamplingBatch) -> bool:
    return bool(
        (batch.repetition_penalty != 1).any()
        or (batch.presence_penalty != 0).any()
        or (batch.frequency_penalty != 0).any()
        or any(len(word) > 1 for words in batch.bad_words for word in words)
    )


def takes_largest(batch: SamplingBatch) -> bool:
    """Whether every row's draw is its largest logit, whichever ids the logits are of."""
    lists = (*batch.logit_bias, *batch.allowed_ids, *batch.bad_words)
    edits = needs_history(batch) or any(map(len, lists)) or bool((batch.min_tokens > 0).any())
    return not edits and bool((batch.temperature < GREEDY_BELOW).all())


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
    parallel = values.size >= PARALLEL_FROM and numba.get_num_threads() > 1
    (sample_parallel if parallel else sample_serial)(values, params, outputs, ids)
    return with_logprobs(values, batch.num_logprobs[outputs.rows], ids)


def score(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> SampleOutput:
    """How likely each of E given tokens is, and the `num_top` likeliest beside it.

    logits (E, vocab) float32, ids (E,) int64 on their device. The same numbers as `sample` gives for a token that it
    has drawn: of the raw distribution, before penalties, bias, temperature and filters.
    """
    num_best = np.full(len(ids), min(num_top, logits.shape[1]), dtype=np.int32)
    if logits.device.type == "cpu":
        return with_logprobs(logits.contiguous().numpy(), num_best, ids.numpy())
    return score_torch(logits, num_best, ids)


def kernel_inputs(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: npt.NDArray[np.int64],
    positions: torch.Tensor,
    history: History | None,
    masks: TokenMasks | None = None,
) -> tuple[npt.NDArray[np.float32], RowParams, Outputs]:
    """What the numba kernels take, checked."""
    history = history or History(torch.zeros((1, 1), dtype=torch.int32), row_of[:0])
    outputs = outputs_of(row_of, positions, history, masks)
    _check_range(outputs, len(batch), needs_history(batch))
    check_masks(outputs.mask_rows, outputs.masks, len(row_of), logits.shape[1])
    return logits.contiguous().numpy(), row_params(batch), outputs


def outputs_of(
    row_of: npt.NDArray[np.int64], positions: torch.Tensor, history: History, masks: TokenMasks | None = None
) -> Outputs:
    """In the layout of the numba kernels."""
    where = positions.contiguous().numpy()
    rows, tokens = history.rows.astype(np.int64), history.tokens.numpy()
    common, drafted = where + 1, np.zeros((len(where), 0), np.int32)
    if history.common is not None and history.drafted is not None:
        common, drafted = history.common.contiguous().numpy(), history.drafted.contiguous().numpy()
    mask_rows, bits = np.full(len(where), -1, np.int64), np.zeros((0, 0), np.uint32)
    if masks is not None:
        mask_rows, bits = masks.rows, masks.bits
    return Outputs(np.array(row_of, np.int64), where, rows, tokens, common, drafted, mask_rows, bits)


def _check_range(outputs: Outputs, num_rows: int, reads_history: bool) -> None:
    """The kernels check no index: a wrong one must not read foreign memory."""
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
        raise IndexError(f"an output counts {outputs.common.max()} tokens, past the history's {max_context}")
    if len(outputs.common) != len(outputs.rows) or len(outputs.drafted) != len(outputs.rows):
        raise IndexError(f"{len(outputs.rows)} outputs, but drafts of {len(outputs.drafted)}")


def check_masks(rows: npt.NDArray[np.int64], bits: npt.NDArray[np.uint32], num_outputs: int, vocab_size: int) -> None:
    """Raise IndexError unless each output has its mask, and each mask a bit for each id."""
    if len(rows) != num_outputs:
        raise IndexError(f"{num_outputs} outputs, but masks of {len(rows)}")
    if rows.max(initial=-1) >= len(bits) or (len(bits) and 32 * bits.shape[1] < vocab_size):
        raise IndexError(f"{bits.shape} words of masks do not hold mask {rows.max(initial=-1)} of {vocab_size} ids")


def row_params(batch: SamplingBatch) -> RowParams:
    """The batch's values in the layout of the numba kernels."""
    with np.errstate(divide="ignore"):
        log_min_p = np.log(batch.min_p).astype(np.float32)
    knobs = (batch.temperature, batch.top_p, log_min_p)
    penalties = (batch.repetition_penalty, batch.presence_penalty, batch.frequency_penalty)
    counts = (batch.top_k, batch.prompt_lens, batch.min_tokens, batch.seeds.view(np.int64))
    stop_ids, stop_offsets = _ragged(batch.stop_ids)
    bias_ids, bias_offsets = _ragged([[i for i, _ in row] for row in batch.logit_bias])
    bias_values = np.array([value for row in batch.logit_bias for _, value in row], dtype=np.float32)
    allowed_ids, allowed_offsets = _ragged(batch.allowed_ids)
    bad_ids, bad_ends = _ragged([word for words in batch.bad_words for word in words])
    return RowParams(
        np.stack((*knobs, *penalties), axis=1, dtype=np.float32),
        np.stack(counts, axis=1, dtype=np.int64),
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


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows of different lengths -> values one after another, and where each row begins (one entry more)."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.array([i for row in rows for i in row], dtype=np.int64), offsets


def with_logprobs(
    values: npt.NDArray[np.float32], num_best: npt.NDArray[np.int32], ids: npt.NDArray[np.int64]
) -> SampleOutput:
    """`num_best`: (E,) likeliest tokens to name beside each; below 0 nothing is said of it."""
    width = max(0, int(num_best.max(initial=-1)))
    chosen = np.zeros(len(ids), dtype=np.float32)
    best_ids = np.full((len(ids), width), NO_TOKEN, dtype=np.int64)
    best = np.zeros((len(ids), width), dtype=np.float32)
    if (num_best >= 0).any():
        logprobs(values, ids, num_best, chosen, best_ids, best)
    tensors = (torch.from_numpy(array) for array in (ids, chosen, best_ids, best))
    return SampleOutput(*tensors)
