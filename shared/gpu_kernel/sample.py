"""Draw one id for each of E outputs without sorting.

    kernel     result                                                               programs
    largest    the head of the ranking                                              E x splits
    search     top-k's threshold: each pass counts ids by four bits of their keys   8 passes of E x splits
    weigh      the weight of the ids above top-k's threshold                        E x splits
    search     top-p's threshold: the same, with weights instead of counts          8 passes of E x splits
    draw       the largest scaled logit + noise of the kept ids                     E x splits
    choose     the largest of all the splits                                        E

Every launch covers every output, and values on the device decide each output's work. So a CUDA graph can hold all
launches.

A threshold is a logit's key (ranks.py). Ids with a greater key are kept. Of the ids with an equal key, only the first
few are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from shared.gpu_kernel.launcher import launch, recorded
from shared.gpu_kernel.noise import gumbel, noise_bits, row_keys, weight
from shared.gpu_kernel.ranks import (
    BLOCK,
    NO_RANK,
    id_of,
    ids_of_split,
    key_of,
    ordered,
    ranked,
    splits_of,
    value_of,
)
from shared.gpu_kernel.real_models import REAL_MODELS
from shared.gpu_kernel.signatures import REAL_BATCH, Signature

EXACT = True  # see noise.py

GREEDY = tl.constexpr(0)  # ways of shared/sample/params.py
FILTERED = tl.constexpr(1)
DIGIT_BITS = tl.constexpr(4)
DIGITS = tl.constexpr(16)
PASSES = tl.constexpr(8)
LANES = tl.constexpr(256)  # ids that a program of `search` reads at a time, into LANES x DIGITS sums
ALL = tl.constexpr(-1)  # a threshold below every key


@dataclass(frozen=True, slots=True)
class Draws:
    """E outputs' parameters, on the device. See shared/sample/params.py."""

    rows: torch.Tensor  # (E,) int64
    mode: torch.Tensor  # (B,) int64
    scale: torch.Tensor  # (B,) float32
    top_k: torch.Tensor  # (B,) int64
    top_p: torch.Tensor  # (B,) float32
    log_min_p: torch.Tensor  # (B,) float32
    seeds: torch.Tensor  # (B,) int64


@triton.jit
def _head(heads, output, SPLITS: tl.constexpr):
    return tl.max(tl.load(heads + output * SPLITS + tl.arange(0, SPLITS)), 0)


@triton.jit
def _digit_sums(sums, output, SPLITS: tl.constexpr):
    places = tl.arange(0, SPLITS)[:, None] * DIGITS + tl.arange(0, DIGITS)[None, :]
    return tl.load(sums + output * (SPLITS * DIGITS) + places)


@triton.jit
def _narrow(prefix, left, sums):
    """Add the digits' sums, greatest digit first; find the digit that makes them reach `left`.

    Return the prefix with this digit appended, `left` minus the sums of greater digits, and the digit."""
    digits = tl.arange(0, DIGITS)
    total = tl.sum(sums, 0)
    above = tl.sum(total, 0) - tl.cumsum(total, 0)
    digit = tl.min(tl.where(above < left, digits, DIGITS - 1), 0)
    left -= tl.sum(tl.where(digits == digit, above, 0), 0)
    return (prefix << DIGIT_BITS) | digit, left, digit


@triton.jit
def _found(state, sums, output, num, SPLITS: tl.constexpr):
    """Return the threshold's key, the sum that ids with this key must still reach, and their sums per split."""
    last = (PASSES - 1) * num + output
    found = _digit_sums(sums, last, SPLITS)
    key, left, digit = _narrow(tl.load(state + 2 * last), tl.load(state + 2 * last + 1), found)
    is_digit = tl.arange(0, DIGITS)[None, :] == digit
    return key, left, tl.sum(tl.where(is_digit, found, 0), 1)


@triton.jit
def _of_top_k(k_state, k_sums, output, num, is_cut, SPLITS: tl.constexpr):
    """Return top-k's threshold, and how many ids with this key to keep, or (ALL, 0) if top-k removes no id."""
    key, left = tl.full((), ALL, tl.int64), tl.full((), 0, tl.int64)
    if is_cut:
        key, left, _ = _found(k_state, k_sums, output, num, SPLITS)
    return key, left


@triton.jit
def largest_kernel(logits, heads, stride, vocab_size, SPLITS: tl.constexpr):
    """`heads`: (E, SPLITS) int64."""
    output, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = ids_of_split(split, vocab_size, SPLITS)
    best = tl.full((BLOCK,), NO_RANK, tl.int64)
    for start in range(begin, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(logits + output * stride + ids, mask=ids < end, other=float("-inf"))
        best = tl.maximum(best, tl.where(ids < end, ranked(values, ids), NO_RANK))
    tl.store(heads + output * SPLITS + split, tl.max(best, 0))


@triton.jit(do_not_specialize=["num"])
def mass_kernel(
    logits, heads, masses, rows, mode, scale, top_k, top_p, k_state, k_sums, stride, vocab_size, num,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (e, s) writes the weight of split s's ids above top-k's threshold to masses[e, s] int64."""
    output, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + output)
    if (tl.load(mode + row) == FILTERED) & (tl.load(top_p + row) < 1.0):
        bound, _ = _of_top_k(k_state, k_sums, output, num, tl.load(top_k + row) < vocab_size, SPLITS)
        best, factor = value_of(key_of(_head(heads, output, SPLITS))), tl.load(scale + row)
        begin, end = ids_of_split(split, vocab_size, SPLITS)
        mass = tl.zeros((BLOCK,), tl.int64)
        for start in range(begin, end, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            values = tl.load(logits + output * stride + ids, mask=ids < end, other=float("-inf"))
            is_above = (ids < end) & (ordered(values) > bound)
            mass += tl.where(is_above, weight((values - best) * factor), 0)
        tl.store(masses + output * SPLITS + split, tl.sum(mass, 0))


@triton.jit
def _first_goal(output, row, top_k, top_p, masses, k_state, k_sums, best, factor, vocab_size, num,
                BY_MASS: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Return the sum that the first ids of the ranking must reach: `top_k` ids, or the share `top_p` of the weight."""
    if BY_MASS:
        key, equals = _of_top_k(k_state, k_sums, output, num, tl.load(top_k + row) < vocab_size, SPLITS)
        mass = tl.sum(tl.load(masses + output * SPLITS + tl.arange(0, SPLITS)), 0)
        if equals > 0:
            mass += equals * weight((value_of(key) - best) * factor)
        wanted = (tl.load(top_p + row).to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
        goal = tl.maximum(wanted, 1)
    else:
        goal = tl.load(top_k + row)
    return goal


@triton.jit(do_not_specialize=["num", "step"])
def search_kernel(
    logits, heads, masses, state, sums, k_state, k_sums, rows, mode, scale, top_k, top_p, stride, vocab_size, num, step,
    BY_MASS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (e, s) of pass `step` counts or weighs split s's ids by the next four bits of their keys.

    Ids are skipped unless their keys begin with the bits found so far. Results go to sums[step, e, s, :] int64.
    state[step, e, :] int64 holds the bits found so far and the sum still to reach."""
    output, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + output)
    is_cut = tl.load(top_p + row) < 1.0 if BY_MASS else tl.load(top_k + row) < vocab_size
    if (tl.load(mode + row) == FILTERED) & is_cut:
        best, factor = value_of(key_of(_head(heads, output, SPLITS))), tl.load(scale + row)
        if step == 0:
            prefix = tl.full((), 0, tl.int64)
            left = _first_goal(
                output, row, top_k, top_p, masses, k_state, k_sums, best, factor, vocab_size, num, BY_MASS, SPLITS
            )
        else:
            last = (step - 1) * num + output
            prefix, left, _ = _narrow(
                tl.load(state + 2 * last), tl.load(state + 2 * last + 1), _digit_sums(sums, last, SPLITS)
            )
        here = step * num + output
        if split == 0:
            tl.store(state + 2 * here, prefix)
            tl.store(state + 2 * here + 1, left)
        shift = (28 - step * DIGIT_BITS).to(tl.int64)
        begin, end = ids_of_split(split, vocab_size, SPLITS)
        found = tl.zeros((LANES, DIGITS), tl.int64)
        for start in range(begin, end, LANES):
            ids = start + tl.arange(0, LANES)
            values = tl.load(logits + output * stride + ids, mask=ids < end, other=float("-inf"))
            keys = ordered(values)
            amounts = weight((values - best) * factor) if BY_MASS else tl.full((LANES,), 1, tl.int64)
            amounts = tl.where((ids < end) & ((keys >> (shift + DIGIT_BITS)) == prefix), amounts, 0)
            digits = (keys >> shift) & (DIGITS - 1)
            found += tl.where(digits[:, None] == tl.arange(0, DIGITS)[None, :], amounts[:, None], 0)
        places = (here * SPLITS + split) * DIGITS + tl.arange(0, DIGITS)
        tl.store(sums + places, tl.sum(found, 0))


@triton.jit
def _what_stays(output, split, row, top_k, top_p, k_state, k_sums, p_state, p_sums, best, factor, vocab_size, num,
                SPLITS: tl.constexpr):  # fmt: skip
    """Return the threshold, how many ids with this key to keep, and how many such ids earlier splits have."""
    key, equals, before = tl.full((), ALL, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    is_before = tl.arange(0, SPLITS) < split
    if tl.load(top_p + row) < 1.0:
        key, left, of_splits = _found(p_state, p_sums, output, num, SPLITS)
        each = tl.maximum(weight((value_of(key) - best) * factor), 1)
        equals = (left + each - 1) // each
        before = tl.sum(tl.where(is_before, of_splits, 0), 0) // each
    elif tl.load(top_k + row) < vocab_size:
        key, equals, of_splits = _found(k_state, k_sums, output, num, SPLITS)
        before = tl.sum(tl.where(is_before, of_splits, 0), 0)
    return key, equals, before


@triton.jit(do_not_specialize=["num"])
def draw_kernel(
    logits, heads, drawn, positions, rows, mode, scale, log_min_p, seeds, top_k, top_p, k_state, k_sums, p_state,
    p_sums, stride, vocab_size, num, FILTERS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """`drawn`: (E, SPLITS) int64."""
    output, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + output)
    head = _head(heads, output, SPLITS)
    best, row_mode = value_of(key_of(head)), tl.load(mode + row)
    result = head
    if (row_mode != GREEDY) & (tl.abs(best) < float("inf")):
        factor, floor = tl.load(scale + row), tl.load(log_min_p + row)
        key, equals, seen = tl.full((), ALL, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        if FILTERS:  # noqa: SIM102 (a constant: the other half is not compiled)
            if row_mode == FILTERED:
                key, equals, seen = _what_stays(
                    output, split, row, top_k, top_p, k_state, k_sums, p_state, p_sums, best, factor, vocab_size, num,
                    SPLITS,
                )  # fmt: skip
        first, second = row_keys(tl.load(seeds + row), tl.load(positions + output) + 1)
        begin, end = ids_of_split(split, vocab_size, SPLITS)
        ranks = tl.full((BLOCK,), NO_RANK, tl.int64)
        for start in range(begin, end, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            inside = ids < end
            values = tl.load(logits + output * stride + ids, mask=inside, other=0.0)
            scaled = (values - best) * factor
            stays = inside & (scaled >= floor)
            if FILTERS:
                keys = ordered(values)
                is_equal = inside & (keys == key)
                nth = seen + tl.cumsum(is_equal.to(tl.int32), 0)
                stays = stays & ((keys > key) | (is_equal & (nth <= equals)))
                seen += tl.sum(is_equal.to(tl.int64), 0)
            scores = scaled + gumbel(noise_bits(first, second, ids))
            ranks = tl.maximum(ranks, tl.where(stays, ranked(scores, ids), NO_RANK))
        result = tl.max(ranks, 0)
    tl.store(drawn + output * SPLITS + split, result)


@triton.jit
def choose_kernel(drawn, chosen, SPLITS: tl.constexpr):
    """`chosen`: (E,) int64."""
    output = tl.program_id(0).to(tl.int64)
    tl.store(chosen + output, id_of(_head(drawn, output, SPLITS)))


def find_heads(logits: torch.Tensor, splits: int | None = None) -> torch.Tensor:
    """Return each split's best rank, (E, splits) int64, for logits (E, vocab) float32."""
    num, vocab_size = logits.shape
    splits = splits_of(num) if splits is None else splits
    heads = torch.empty((num, splits), dtype=torch.int64, device=logits.device)
    launch(largest_kernel, (num, splits), logits, heads, logits.stride(0), vocab_size, SPLITS=splits)
    return heads


def is_cut(params: Mapping[str, np.ndarray], vocab_size: int) -> np.ndarray:
    """Return whether each row needs thresholds, (B,) bool."""
    cut: np.ndarray = (params["top_p"] < 1) | (params["top_k"] < vocab_size)
    return cut


def draw_ids(
    logits: torch.Tensor, heads: torch.Tensor, positions: torch.Tensor, draws: Draws, is_warm: bool, filters: bool
) -> torch.Tensor:
    """Return (E,) int64 ids, the same as `sampler_torch`'s.

    logits: (E, vocab) float32, edited, rows of any stride. heads: from `find_heads`. positions: (E,) int64, of the
    input tokens. `is_warm`: some row is not greedy. `filters`: some row has top-k or top-p."""
    num, vocab_size = logits.shape
    splits = heads.shape[1]
    sizes = (logits.stride(0), vocab_size, num)
    drawn = heads
    if is_warm:
        found = _search_both(logits, heads, draws) if filters else (heads,) * 4
        drawn = torch.empty_like(heads)
        launch(
            draw_kernel, (num, splits), logits, heads, drawn, positions, draws.rows, draws.mode, draws.scale,
            draws.log_min_p, draws.seeds, draws.top_k, draws.top_p, *found, *sizes, FILTERS=filters, SPLITS=splits,
        )  # fmt: skip
    ids = torch.empty(num, dtype=torch.int64, device=logits.device)
    launch(choose_kernel, (num,), drawn, ids, SPLITS=splits)
    return ids


def _search_both(logits: torch.Tensor, heads: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, ...]:
    num, vocab_size = logits.shape
    splits, device = heads.shape[1], logits.device
    sizes = (logits.stride(0), vocab_size, num)
    passes = PASSES.value
    state = torch.empty((2, passes, num, 2), dtype=torch.int64, device=device)
    sums = torch.empty((2, passes, num, splits, DIGITS.value), dtype=torch.int64, device=device)
    masses = torch.empty((num, splits), dtype=torch.int64, device=device)
    cut = (draws.rows, draws.mode, draws.scale, draws.top_k, draws.top_p)
    for by_mass in (False, True):
        if by_mass:
            launch(mass_kernel, (num, splits), logits, heads, masses, *cut, state[0], sums[0], *sizes, SPLITS=splits)
        for step in range(passes):
            launch(
                search_kernel, (num, splits), logits, heads, masses, state[int(by_mass)], sums[int(by_mass)],
                state[0], sums[0], *cut, *sizes, step, BY_MASS=by_mass, SPLITS=splits,
            )  # fmt: skip
    return state[0], sums[0], state[1], sums[1]


def real_signatures() -> set[Signature]:
    with recorded() as signatures:
        for model in REAL_MODELS:
            for num in (1, 16, REAL_BATCH):
                logits = torch.empty(num, model.vocab_size, device="meta")
                integers, floats = torch.empty(num, dtype=torch.int64, device="meta"), torch.empty(num, device="meta")
                draws = Draws(integers, integers, floats, integers, floats, floats, integers)
                heads = find_heads(logits)
                for filters in (False, True):
                    draw_ids(logits, heads, integers, draws, is_warm=True, filters=filters)
    return signatures
