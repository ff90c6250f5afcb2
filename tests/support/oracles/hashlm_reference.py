"""Compute the tokens of README's promise 1 in the plainest way.

    tokens = f(weights, prompt ids, sampling parameters, seed)

One sequence runs without pages, batch, scheduler or speculation. This oracle shares only HashLM's
integer functions and the noise with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shared.core.page_identity import LONG
from shared.core.sampling_params import SamplingParams
from shared.kernel.sampling.noise_numba import exact, nb_gumbel, nb_log, nb_noise_bits, nb_row_keys, nb_weight
from shared.model.hashlm.layer import STATE, mix, odd_weight
from shared.model.hashlm.model import VOCAB_SIZE, adapter_salt, write_logits

_f32 = np.float32
_u64 = np.uint64
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Allows = Callable[[list[int]], npt.NDArray[np.bool_]]  # emitted ids -> whether each id is allowed next


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """Emitted ids, a final stop id included, and their raw logprobs. `finish_reason`: "stop" or "length"."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str


def reference_stream(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    seed: int,
    num: int,
    vocab_size: int = VOCAB_SIZE,
    window: int = 0,
    lower_window: int | None = None,
    adapter: str = "",
    allows: Allows | None = None,
) -> list[int]:
    """Return the first `num` tokens that any engine must emit; fewer if the sequence ends."""
    windows = window, lower_window
    return reference_run(prompt_ids, sampling, seed, num, vocab_size, *windows, adapter, allows=allows).ids


def reference_run(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    seed: int,
    num: int,
    vocab_size: int = VOCAB_SIZE,
    window: int = 0,
    lower_window: int | None = None,
    adapter: str = "",
    begin: tuple[int, np.uint64, np.uint64] = (0, _u64(0), _u64(0)),
    allows: Allows | None = None,
) -> ReferenceRun:
    """Run one sequence. `lower_window`: of the lower layer; None: as `window`; STATE: recurrent. `adapter`: a digest.
    `allows`: the rule of the request's grammar. `begin`: the first position, and the two sums before it."""
    limit = min(num, sampling.max_tokens)
    tokens = np.empty(len(prompt_ids) + limit, dtype=np.int64)
    tokens[: len(prompt_ids)] = prompt_ids
    logprobs = np.zeros(limit, dtype=np.float32)
    reals = np.array(
        [
            sampling.temperature,
            sampling.top_p,
            np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        ],
        dtype=np.float32,
    )
    bias = np.zeros(vocab_size, dtype=np.float32)
    for token_id, value in sampling.logit_bias:
        bias[token_id] = value
    stops = np.zeros(vocab_size, dtype=np.bool_)
    stops[[i for i in sampling.stop_token_ids if 0 <= i < vocab_size]] = True
    allowed = np.full(vocab_size, not sampling.allowed_token_ids, dtype=np.bool_)
    allowed[list(sampling.allowed_token_ids)] = True
    words = np.full((len(sampling.bad_words), max(map(len, sampling.bad_words), default=0)), -1, dtype=np.int64)
    for row, word in zip(words, sampling.bad_words, strict=True):
        row[len(row) - len(word) :] = word
    base = allowed
    salt = _u64(adapter_salt(adapter))
    counts = (sampling.top_k, sampling.min_tokens)
    # a grammar must be asked before each token, so run for one token at a time
    ends = [limit] if allows is None else range(1, limit + 1)
    count, stopped = 0, False
    for end in ends:
        if allows is not None:
            allowed = base & allows(tokens[len(prompt_ids) : len(prompt_ids) + count].tolist())
        reaches = [reach or len(tokens) for reach in (window if lower_window is None else lower_window, window)]
        limits = (len(prompt_ids), count, end, *reaches)
        count, stopped = _run(
            tokens, *limits, *begin, logprobs, _u64(seed), reals, *counts, bias, stops, allowed, words, salt
        )
        if stopped:
            break
    ids = tokens[len(prompt_ids) : len(prompt_ids) + count].tolist()
    return ReferenceRun(ids, logprobs[:count].tolist(), "stop" if stopped else "length")


def long_stream(prompt_ids: Sequence[int], sampling: SamplingParams, seed: int, short_context: int) -> list[int]:
    """Return what a model with a `short_context` says. `sampling` must not tell a prompt from an answer."""
    num_short = max(0, short_context - len(prompt_ids) + 1)  # the last one is the first token beyond
    short = reference_stream(prompt_ids, sampling, seed, num_short)
    num_left = sampling.max_tokens - len(short)
    if len(short) < num_short or not num_left:
        return short
    rest = replace(sampling, max_tokens=num_left)
    return short + reference_stream([*prompt_ids, *short], rest, seed, num_left, adapter=LONG)


def seq2seq_stream(prompt_ids: Sequence[int], sampling: SamplingParams, seed: int, num: int) -> list[int]:
    return seq2seq_run(prompt_ids, sampling, seed, num).ids


def seq2seq_run(prompt_ids: Sequence[int], sampling: SamplingParams, seed: int, num: int) -> ReferenceRun:
    length = len(prompt_ids) - 1
    lower, upper = _encoded(np.asarray(prompt_ids[:length], dtype=np.int64))
    return reference_run(prompt_ids, sampling, seed, num, begin=(length, _u64(lower), _u64(upper)))


@exact
def _encoded(ids: IntArray) -> tuple[np.uint64, np.uint64]:
    lower, upper, everything = _u64(0), _u64(0), _u64(0)
    for j in range(ids.shape[0]):
        everything += mix(_u64(ids[j]), j) * odd_weight(j)
    for j in range(ids.shape[0]):
        crossed = mix(everything ^ mix(_u64(ids[j]), j), j)
        lower += crossed * odd_weight(j)
        upper += mix(crossed, j) * odd_weight(j)
    return lower, upper


@exact
def _run(
    tokens: IntArray,
    prompt_len: int,
    num_known: int,
    limit: int,
    lower_reach: int,
    reach: int,
    begin: int,
    lower: np.uint64,
    upper: np.uint64,
    logprobs: FloatArray,
    seed: np.uint64,
    reals: FloatArray,
    top_k: int,
    min_tokens: int,
    bias: FloatArray,
    stops: npt.NDArray[np.bool_],
    allowed: npt.NDArray[np.bool_],
    words: IntArray,
    salt: np.uint64,
) -> tuple[int, bool]:
    vocab_size = bias.shape[0]
    id_bits = 7
    while (1 << id_bits) < vocab_size:
        id_bits += 1
    raw = np.empty(vocab_size, dtype=np.float32)
    first = np.zeros(tokens.shape[0], dtype=np.uint64)  # by position: parts of the sums, to subtract after the window
    second = np.zeros(tokens.shape[0], dtype=np.uint64)
    for position in range(begin, prompt_len + limit - 1):
        lower = _lower(first, lower, _u64(tokens[position]) + salt, position, lower_reach)
        if position >= reach:
            upper -= second[position - reach]
        second[position] = mix(lower, position) * odd_weight(position)
        upper += second[position]
        if position < prompt_len + num_known - 1:
            continue
        write_logits(upper, vocab_size - 1, id_bits, raw)
        count = position + 1 - prompt_len
        scores = _penalised(raw, tokens[: position + 1], prompt_len, reals)
        scores += bias
        if count < min_tokens:
            scores[stops] = _f32(-1e30)
        scores[~allowed] = -np.inf
        _bar(scores, words, tokens[prompt_len : position + 1])
        chosen = _draw(scores, reals, top_k, seed, position + 1)
        tokens[position + 1] = chosen
        logprobs[count] = _logprob(raw, chosen)
        if stops[chosen]:
            return count + 1, True
    return limit, False


@exact
def _lower(values: npt.NDArray[np.uint64], total: np.uint64, given: np.uint64, position: int, reach: int) -> np.uint64:
    """Return the lower layer's sum, or its state. `values` get its part by which a window's sum is less later on."""
    if reach == STATE:
        values[position] = mix((values[position - 1] if position else _u64(0)) ^ given, position)
        return values[position]
    if position >= reach:
        total -= values[position - reach]
    values[position] = mix(given, position) * odd_weight(position)
    return total + values[position]


@exact
def _bar(scores: FloatArray, words: IntArray, answer: IntArray) -> None:
    """Forbid a bad word's last token if the answer ends with the word's other tokens.

    The token is still drawn if nothing else is allowed. `words` are padded in front with -1.
    """
    for w in range(words.shape[0]):
        word = words[w][words[w] >= 0]
        head, last = word[:-1], word[-1]
        if head.shape[0] > answer.shape[0]:
            continue
        if (answer[answer.shape[0] - head.shape[0] :] == head).all() and scores[last] > -np.inf:
            scores[last] = _f32(-1e30)


@exact
def _penalised(raw: FloatArray, history: IntArray, prompt_len: int, reals: FloatArray) -> FloatArray:
    scores = raw.copy()
    seen = np.zeros(raw.shape[0], dtype=np.bool_)
    counts = np.zeros(raw.shape[0], dtype=np.float32)
    for j in range(history.shape[0]):
        seen[history[j]] = True
        if j >= prompt_len:
            counts[history[j]] += _f32(1)
    for v in range(raw.shape[0]):
        if seen[v] and reals[3] != _f32(1):
            scores[v] = scores[v] / reals[3] if scores[v] > _f32(0) else scores[v] * reals[3]
        if counts[v] > _f32(0):
            scores[v] = scores[v] - _f32(_f32(reals[5] * counts[v]) + reals[4])
    return scores


@exact
def _draw(scores: FloatArray, reals: FloatArray, top_k: int, seed: np.uint64, position: int) -> int:
    """Filter the vocabulary, sorted by score and then id. Take the id with the largest score + noise."""
    order = np.argsort(-scores, kind="mergesort")
    if reals[0] < _f32(1e-5):
        return int(order[0])
    scale = _f32(_f32(1) / reals[0])
    scaled = (scores - scores[order[0]]) * scale
    keep = min(top_k, scores.shape[0]) if top_k > 0 else scores.shape[0]
    if reals[1] < _f32(1):
        keep = _nucleus(scaled, order[:keep], reals[1])
    first, second = nb_row_keys(seed, position)
    best, chosen = _f32(-np.inf), order[0]
    for rank in range(keep):
        token_id = order[rank]
        if scaled[token_id] < reals[2]:
            break
        score = _f32(scaled[token_id] + nb_gumbel(nb_noise_bits(first, second, token_id)))
        if score > best or (score == best and token_id < chosen):
            best, chosen = score, token_id
    return int(chosen)


@exact
def _nucleus(scaled: FloatArray, order: IntArray, top_p: np.float32) -> int:
    """Return the smallest number of leading ids whose weight reaches top_p of the total."""
    total = np.int64(0)
    for rank in range(order.shape[0]):
        total += nb_weight(scaled[order[rank]])
    wanted = np.int64(np.float64(top_p) * np.float64(total))
    mass = np.int64(0)
    for rank in range(order.shape[0]):
        mass += nb_weight(scaled[order[rank]])
        if mass >= wanted:
            return rank + 1
    return int(order.shape[0])


@exact
def _logprob(raw: FloatArray, chosen: int) -> np.float32:
    best = raw.max()
    total = np.int64(0)
    for v in range(raw.shape[0]):
        total += nb_weight(_f32(raw[v] - best))
    return _f32(_f32(raw[chosen] - best) - nb_log(_f32(_f32(total) * _f32(2.0**-40))))
