"""Sampling on a CPU, one output at a time: few vectorised passes over the logits, without a sort.

Ids are ranked by logit, then id. Top-k, top-p and min-p each keep a prefix of the ranking. Without top-k, the code
draws from the ids that min-p keeps. While top-p rejects the drawn id, the code draws again from the ids ranked before
it. This is correct, because the id that wins in a set also wins in each subset that contains it. On average, a draw at
least halves the number of remaining ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.kernel.code.jit import bits_of, float_of
from shared.kernel.sampling.noise import LOG2E, NOISE_BITS, WEIGHT_BITS
from shared.kernel.sampling.noise_numba import exact, nb_gumbel, nb_log, nb_noise_bits, nb_row_keys, nb_weight
from shared.kernel.sampling.sample_constants import GREEDY_BELOW
from shared.kernel.sampling.sample_edits import COUNTS, REALS, SMALLEST, Outputs, RowParams, edited

TEMPERATURE, TOP_P, LOG_MIN_P = map(REALS.index, ("temperature", "top_p", "log_min_p"))
TOP_K, SEED = map(COUNTS.index, ("top_k", "seed"))

_f32 = np.float32
_i32 = np.int32
_u32 = np.uint32
_i64 = np.int64
_LOW32 = 0xFFFFFFFF
_NOTHING = -(1 << 63)
_BLOCK = 256  # ids that are skipped together
_DOUBLING = float(1 << 23)  # added to a float's bits, this doubles the float
_MARGIN = 0.01  # doublings; rounding errors stay below 0.0001
_LARGEST_NOISE_BITS = (1 << NOISE_BITS) - 1


@exact
def _ranked(value: np.float32, token_id: int | np.int64) -> np.int64:
    """Return a key that is larger for a larger value and, of equal values, for the lower id. NaN ranks last."""
    bits = _i32(bits_of(_f32(value + _f32(0))))  # + 0 turns -0.0 into 0.0
    order = _i32(bits ^ _i32((bits >> _i32(31)) & _i32(0x7FFFFFFF)))
    key = (_i64(order) << _i64(32)) | (_i64(_LOW32) - _i64(token_id))
    return key if value == value else _i64(_NOTHING) + (_i64(_LOW32) - _i64(token_id))


@exact
def value_of(key: np.int64) -> np.float32:
    order = _i32(key >> _i64(32))
    return _f32(float_of(_u32(order ^ _i32((order >> _i32(31)) & _i32(0x7FFFFFFF)))))


@exact
def _id_of(key: np.int64) -> np.int64:
    return _i64(_LOW32) - (key & _i64(_LOW32))


@exact
def argmax(logits: npt.NDArray[np.float32]) -> np.int64:
    """Return the lowest id that has the largest logit."""
    best = _i64(_NOTHING)
    for i in range(logits.shape[0]):
        best = max(best, _ranked(logits[i], i))
    return _id_of(best)


@exact
def _before(value: np.float32, token_id: int, bound: np.float32, bound_id: int | np.int64) -> bool:
    is_before: bool = (value > bound) | ((value == bound) & (token_id < bound_id))  # without branches
    return is_before


@exact
def _draw(
    logits: npt.NDArray[np.float32],
    first: np.int64,
    scale: np.float32,
    keys: tuple[np.uint32, np.uint32],
    log_min_p: np.float32,
    bound: np.float32,
    bound_id: int | np.int64,
) -> np.int64:
    """Return the id with the largest score among ids that min-p keeps and that rank before the bound.

    `first` ranks first. Skip blocks in which no score could be the largest.
    """
    best, bits_per_logit = logits[first], _f32(scale * _f32(LOG2E * _DOUBLING))
    chosen = _ranked(nb_gumbel(nb_noise_bits(keys[0], keys[1], int(first))), first)
    for begin in range(0, logits.shape[0], _BLOCK):
        block, reaches, to_beat = logits[begin : begin + _BLOCK], _i32(0), reach_of(value_of(chosen))
        for i in range(block.shape[0]):
            reach = _f32(_f32(_f32(block[i] - best) * bits_per_logit) + to_beat)
            reaches = _i32(reaches | _i32(may_reach(reach, nb_noise_bits(keys[0], keys[1], begin + i))))
        if reaches == 0:
            continue
        for i in range(block.shape[0]):
            scaled = _f32(_f32(block[i] - best) * scale)
            score = _f32(scaled + nb_gumbel(nb_noise_bits(keys[0], keys[1], begin + i)))
            is_kept = (scaled >= log_min_p) & _before(block[i], begin + i, bound, bound_id)
            chosen = max(chosen, _ranked(score if is_kept else _f32(np.nan), begin + i))
    return _id_of(chosen)


@exact
def reach_of(noise: np.float32) -> np.float32:
    """Return, as a number, the bits of a float of at least 2^NOISE_BITS * exp(-noise).

    The float with bits 2^23 * (127 + x) is at least 2^x, because a convex function lies below its chords.
    """
    return _f32(_f32((127 + NOISE_BITS + _MARGIN) * _DOUBLING) - _f32(noise * _f32(LOG2E * _DOUBLING)))


@exact
def may_reach(reach: np.float32, noise_bits: np.int32) -> bool:
    """Return False only if the noise of `noise_bits` is less than the noise whose `reach_of` is given.

    With u as in nb_gumbel, noise = -log(-log(u)) <= -log(1 - u). So noise >= m only if 1 - u <= exp(-m).
    """
    rest = _f32(_i32(_i32(_LARGEST_NOISE_BITS) - noise_bits))  # below 2^NOISE_BITS * (1 - u)
    return bool(_i32(bits_of(rest)) <= _i32(max(_f32(0), reach)))


@exact
def _mass_before(
    logits: npt.NDArray[np.float32], best: np.float32, scale: np.float32, bound: np.float32, bound_id: int | np.int64
) -> np.int64:
    total = _i64(0)
    for i in range(logits.shape[0]):
        weight = nb_weight(_f32(_f32(logits[i] - best) * scale))
        total += weight if _before(logits[i], i, bound, bound_id) else _i64(0)
    return total


@exact
def _sift(heap: npt.NDArray[np.int64], size: int, key: np.int64) -> None:
    parent = 0
    while True:
        child = 2 * parent + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if child >= size or heap[child] >= key:
            break
        heap[parent] = heap[child]
        parent = child
    heap[parent] = key


@exact
def largest(logits: npt.NDArray[np.float32], num: int) -> npt.NDArray[np.int64]:
    """Return (num,) ids, largest logit first, then by id. `num` is at most the vocabulary's size."""
    heap = np.full(num, _NOTHING, dtype=np.int64)
    for i in range(logits.shape[0]):
        key = _ranked(logits[i], i)
        if key > heap[0]:
            _sift(heap, num, key)
    for size in range(num - 1, 0, -1):  # moves the id that ranks last to the end
        smallest = heap[0]
        _sift(heap, size, heap[size])
        heap[size] = smallest
    for rank in range(num):
        heap[rank] = _id_of(heap[rank])
    return heap


@exact
def _sample(
    logits: npt.NDArray[np.float32], reals: npt.NDArray[np.float32], top_k: int, keys: tuple[np.uint32, np.uint32]
) -> np.int64:
    """Draw from final logits. If the largest logit is not finite, its id wins."""
    first = argmax(logits)
    if reals[TEMPERATURE] < _f32(GREEDY_BELOW) or not np.isfinite(logits[first]):
        return first
    scale = _f32(_f32(1) / reals[TEMPERATURE])
    if 0 < top_k < logits.shape[0]:
        return _draw_top_k(logits, largest(logits, top_k), scale, keys, reals)
    chosen = _draw(logits, first, scale, keys, reals[LOG_MIN_P], SMALLEST, logits.shape[0])
    return chosen if reals[TOP_P] >= _f32(1) else _narrow(logits, first, scale, keys, chosen, reals[TOP_P])


@exact
def _wanted(top_p: np.float32, mass: np.int64) -> np.int64:
    """Return a nucleus's weight. An id is in the nucleus if the ids ranked before it weigh less."""
    return _i64(np.float64(top_p) * np.float64(mass))


@exact
def _draw_top_k(
    logits: npt.NDArray[np.float32],
    ranking: npt.NDArray[np.int64],
    scale: np.float32,
    keys: tuple[np.uint32, np.uint32],
    reals: npt.NDArray[np.float32],
) -> np.int64:
    best, total, mass = logits[ranking[0]], _i64(0), _i64(0)
    for rank in range(ranking.shape[0]):
        total += nb_weight(_f32(_f32(logits[ranking[rank]] - best) * scale))
    wanted = _wanted(reals[TOP_P], total) if reals[TOP_P] < _f32(1) else total + _i64(1)
    chosen = _ranked(SMALLEST, ranking[0])
    for rank in range(ranking.shape[0]):
        i = ranking[rank]
        scaled = _f32(_f32(logits[i] - best) * scale)
        if rank > 0 and (mass >= wanted or scaled < reals[LOG_MIN_P]):
            break
        mass += nb_weight(scaled)
        chosen = max(chosen, _ranked(_f32(scaled + nb_gumbel(nb_noise_bits(keys[0], keys[1], i))), i))
    return _id_of(chosen)


@exact
def _narrow(
    logits: npt.NDArray[np.float32],
    first: np.int64,
    scale: np.float32,
    keys: tuple[np.uint32, np.uint32],
    chosen: np.int64,
    top_p: np.float32,
) -> np.int64:
    """Draw again, from the ids ranked before the chosen one, until the nucleus contains the chosen id.

    All these ids pass min-p, because the chosen id did."""
    best = logits[first]
    wanted = _wanted(top_p, _mass_before(logits, best, scale, SMALLEST, logits.shape[0]))
    while chosen != first and _mass_before(logits, best, scale, logits[chosen], chosen) >= wanted:
        chosen = _draw(logits, first, scale, keys, SMALLEST, logits[chosen], chosen)
    return chosen


@exact
def draw_output(logits: npt.NDArray[np.float32], params: RowParams, outputs: Outputs, e: int) -> np.int64:
    """`logits`: (V,)."""
    row, position = outputs.rows[e], outputs.positions[e]
    keys = nb_row_keys(np.uint64(params.counts[row, SEED]), position + 1)
    final = edited(logits, params, outputs, e)
    return _sample(final, params.reals[row], params.counts[row, TOP_K], keys)


@exact
def rank_candidates(
    logits: npt.NDArray[np.float32],
    params: RowParams,
    outputs: Outputs,
    ids: npt.NDArray[np.int64],
    log_probs: npt.NDArray[np.float32],
) -> None:
    """Write (E, K) ids for (E, V) logits: the drawn id, then the ids with the largest scores.

    A score is logit + temperature * noise, without filters. log_probs (E, K): the scores' log-softmax; for the
    drawn id, the largest score's."""
    for e in range(logits.shape[0]):
        row, position = outputs.rows[e], outputs.positions[e]
        keys = nb_row_keys(np.uint64(params.counts[row, SEED]), position + 1)
        final = edited(logits[e], params, outputs, e)
        first = _sample(final, params.reals[row], params.counts[row, TOP_K], keys)
        scores = final.copy()
        if params.reals[row, TEMPERATURE] >= _f32(GREEDY_BELOW):
            for i in range(scores.shape[0]):
                noise = nb_gumbel(nb_noise_bits(keys[0], keys[1], i))
                scores[i] = _f32(final[i] + _f32(params.reals[row, TEMPERATURE] * noise))
        best = scores[argmax(scores)]
        mass = _mass_before(scores, best, _f32(1), SMALLEST, scores.shape[0])
        log_total = nb_log(_f32(_f32(mass) * _f32(2.0**-WEIGHT_BITS)))
        scores[first] = _f32(np.inf)
        ranking = largest(scores, ids.shape[1])
        for rank in range(ids.shape[1]):
            score = best if rank == 0 else scores[ranking[rank]]
            ids[e, rank], log_probs[e, rank] = ranking[rank], _f32(_f32(score - best) - log_total)


@exact
def logprobs(
    logits: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int64],
    num_best: npt.NDArray[np.int32],
    chosen: npt.NDArray[np.float32],
    best_ids: npt.NDArray[np.int64],
    best: npt.NDArray[np.float32],
) -> None:
    """Write the raw log-softmax of the drawn id and of the num_best[e] likeliest ids."""
    for e in range(logits.shape[0]):
        if num_best[e] < 0:
            continue
        top = logits[e, argmax(logits[e])]
        mass = _mass_before(logits[e], top, _f32(1), SMALLEST, logits.shape[1])
        log_total = nb_log(_f32(_f32(mass) * _f32(2.0**-WEIGHT_BITS)))
        chosen[e] = _f32(_f32(logits[e, ids[e]] - top) - log_total)
        if num_best[e] > 0:
            ranking = largest(logits[e], min(num_best[e], logits.shape[1]))
            for rank in range(ranking.shape[0]):
                best_ids[e, rank] = ranking[rank]
                best[e, rank] = _f32(_f32(logits[e, ranking[rank]] - top) - log_total)
