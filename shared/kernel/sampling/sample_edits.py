"""Edits of an output's logits before the draw: penalties, bias and masks.

    repetition, presence, frequency -> bias -> no early stop ids -> allowed ids, grammar -> bad words

Allowed ids and a grammar set all other logits to -inf. An early stop id or a bad word is drawn only if nothing else is
left.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared.core.sampling_params import NUMBERS
from shared.kernel.sampling.noise_numba import exact
from shared.kernel.sampling.sample_constants import BARRED

REALS = [one.array for one in NUMBERS if one.kind is float]  # columns of RowParams.reals
COUNTS = [*(one.array for one in NUMBERS if one.kind is int), "prompt_len", "seed"]  # columns of RowParams.counts
REPETITION, PRESENCE, FREQUENCY = map(REALS.index, ("repetition_penalty", "presence_penalty", "frequency_penalty"))
MIN_TOKENS, PROMPT_LEN = map(COUNTS.index, ("min_tokens", "prompt_len"))

_f32 = np.float32
_DONE = -1
SMALLEST = _f32(-np.inf)


class RowParams(NamedTuple):
    """Parameters of B rows. Row b's ids lie at [offsets[b], offsets[b + 1])."""

    reals: npt.NDArray[np.float32]  # (B, len(REALS))
    counts: npt.NDArray[np.int64]  # (B, len(COUNTS)); the column "seed" has the unsigned seed's bits
    stop_ids: npt.NDArray[np.int64]
    stop_offsets: npt.NDArray[np.int64]  # (B + 1,)
    bias_ids: npt.NDArray[np.int64]
    bias_values: npt.NDArray[np.float32]
    bias_offsets: npt.NDArray[np.int64]  # (B + 1,)
    allowed_ids: npt.NDArray[np.int64]
    allowed_offsets: npt.NDArray[np.int64]  # (B + 1,); a row without ids allows all ids
    bad_ids: npt.NDArray[np.int64]
    bad_ends: npt.NDArray[np.int64]  # (W + 1,); word w's ids lie at [bad_ends[w], bad_ends[w + 1])
    bad_offsets: npt.NDArray[np.int64]  # (B + 1,) offsets into the words


class Outputs(NamedTuple):
    """E outputs. Penalties count the first `common` tokens of the history row and up to N drafts, oldest first."""

    rows: npt.NDArray[np.int64]  # (E,) each output's row of the parameters
    positions: npt.NDArray[np.int64]  # (E,) of the input tokens
    history_rows: npt.NDArray[np.int64]  # (B,) each batch row's row of `history`
    history: npt.NDArray[np.int32]  # (rows, max_context)
    common: npt.NDArray[np.int64]  # (E,)
    drafted: npt.NDArray[np.int32]  # (E, N); -1: no draft
    mask_rows: npt.NDArray[np.int64]  # (E,) each output's row of `masks`; -1 allows all ids
    masks: npt.NDArray[np.uint32]  # (M, at least V / 32): a bit per id, lowest first


@exact
def _count(tokens: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> None:
    for j in range(tokens.shape[0]):
        if 0 <= tokens[j] < counts.shape[0]:
            counts[tokens[j]] += 1


@exact
def _penalise(
    logits: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    reals: npt.NDArray[np.float32],
) -> None:
    """Penalise each id of `tokens` once, and mark it in `counts` as done."""
    vocab_size = logits.shape[0]
    for j in range(tokens.shape[0]):
        i = tokens[j]
        if i < 0 or i >= vocab_size or counts[i] == _DONE:
            continue
        if reals[REPETITION] != _f32(1):
            shrink = logits[i] > _f32(0)
            logits[i] = _f32(logits[i] / reals[REPETITION]) if shrink else _f32(logits[i] * reals[REPETITION])
        if counts[i] > 0:
            logits[i] = _f32(logits[i] - _f32(_f32(reals[FREQUENCY] * _f32(counts[i])) + reals[PRESENCE]))
        counts[i] = _DONE


@exact
def _add(logits: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> None:
    for j in range(ids.shape[0]):
        if 0 <= ids[j] < logits.shape[0]:
            logits[ids[j]] = _f32(logits[ids[j]] + values[j])


@exact
def _allow(logits: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    narrowed = np.full_like(logits, SMALLEST)
    for j in range(ids.shape[0]):
        if 0 <= ids[j] < logits.shape[0]:
            narrowed[ids[j]] = logits[ids[j]]
    return narrowed


@exact
def _keep(logits: npt.NDArray[np.float32], mask: npt.NDArray[np.uint32]) -> None:
    for i in range(logits.shape[0]):
        if not (mask[i >> 5] >> np.uint32(i & 31)) & np.uint32(1):
            logits[i] = SMALLEST


@exact
def _ends_with(
    tokens: npt.NDArray[np.int32], drafted: npt.NDArray[np.int32], begin: np.int64, word: npt.NDArray[np.int64]
) -> bool:
    """Return whether the answer (tokens[begin:], then drafts) ends with all tokens of `word` except the last one."""
    left = word.shape[0] - 2
    for j in range(drafted.shape[0] - 1, -1, -1):
        if left >= 0 and drafted[j] >= 0:
            if drafted[j] != word[left]:
                return False
            left -= 1
    emitted, num = tokens[begin:], left + 1
    return emitted.shape[0] >= num and bool((emitted[emitted.shape[0] - num :] == word[:num]).all())


@exact
def _ban(logits: npt.NDArray[np.float32], params: RowParams, outputs: Outputs, e: int) -> None:
    row = outputs.rows[e]
    for w in range(params.bad_offsets[row], params.bad_offsets[row + 1]):
        word = params.bad_ids[params.bad_ends[w] : params.bad_ends[w + 1]]
        last = word[word.shape[0] - 1]
        if not 0 <= last < logits.shape[0] or logits[last] == SMALLEST:
            continue
        if word.shape[0] > 1:
            tokens = outputs.history[outputs.history_rows[row], : outputs.common[e]]
            if not _ends_with(tokens, outputs.drafted[e], params.counts[row, PROMPT_LEN], word):
                continue
        logits[last] = BARRED


@exact
def edited(logits: npt.NDArray[np.float32], params: RowParams, outputs: Outputs, e: int) -> npt.NDArray[np.float32]:
    """Return an edited copy, or the logits themselves if no edit is needed."""
    row, position = outputs.rows[e], outputs.positions[e]
    reals, counts = params.reals[row], params.counts[row]
    stops = params.stop_ids[params.stop_offsets[row] : params.stop_offsets[row + 1]]
    begin, end = params.bias_offsets[row], params.bias_offsets[row + 1]
    penalised = reals[REPETITION] != _f32(1) or reals[PRESENCE] != _f32(0) or reals[FREQUENCY] != _f32(0)
    masked = stops.shape[0] > 0 and position + 1 - counts[PROMPT_LEN] < counts[MIN_TOKENS]
    allowed = params.allowed_ids[params.allowed_offsets[row] : params.allowed_offsets[row + 1]]
    has_bad_words = params.bad_offsets[row] < params.bad_offsets[row + 1]
    has_grammar = outputs.mask_rows[e] >= 0
    narrowed = masked or allowed.shape[0] > 0 or has_grammar or has_bad_words
    if not penalised and begin == end and not narrowed:
        return logits
    logits = logits.copy()
    if penalised:
        tokens = outputs.history[outputs.history_rows[row], : outputs.common[e]]
        uses = np.zeros(logits.shape[0], dtype=np.int32)
        _count(tokens[counts[PROMPT_LEN] :], uses)
        _count(outputs.drafted[e], uses)
        _penalise(logits, tokens, uses, reals)
        _penalise(logits, outputs.drafted[e], uses, reals)
    _add(logits, params.bias_ids[begin:end], params.bias_values[begin:end])
    if masked:
        for j in range(stops.shape[0]):
            if 0 <= stops[j] < logits.shape[0]:
                logits[stops[j]] = BARRED
    if allowed.shape[0]:
        logits = _allow(logits, allowed)
    if has_grammar:
        _keep(logits, outputs.masks[outputs.mask_rows[e]])
    if has_bad_words:
        _ban(logits, params, outputs, e)
    return logits
