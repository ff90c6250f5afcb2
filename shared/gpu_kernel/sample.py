"""Draw one id for each of E outputs without sorting.

    kernel     result                                                                      programs
    largest    the head of the ranking                                                     E x splits
    spread     how many ids lie how far below the largest logit, and what they weigh       E x splits
    gather     a list of the ids that top-k and top-p may keep                             E x splits
    draw       of outputs without top-k and top-p, the largest scaled logit + noise        E x splits
    choose     the largest of all splits; with top-k or top-p, of the listed ids that stay E

An output with top-k or top-p reads the vocabulary three times, another one twice. Every launch covers every output, and
values on the device decide each output's work. So a CUDA graph can hold all launches.

Both filters keep a prefix of the ranking, and `choose` bisects the listed ids' ranks for its end. Counts and integer
weights have exact sums: neither the number of splits nor the order of the list changes a result. The list is short
unless the distribution is flat; then it is nearly the vocabulary, and one program reads it about 50 times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from shared.gpu_kernel.launch.launcher import launch, recorded
from shared.gpu_kernel.launch.real_models import REAL_MODELS
from shared.gpu_kernel.launch.signatures import REAL_BATCH, Signature
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

EXACT = True  # see noise.py

GREEDY = tl.constexpr(0)  # ways of shared/sample/params.py
FILTERED = tl.constexpr(1)
BINS = tl.constexpr(32)
LANES = tl.constexpr(128)  # ids that a program of `spread` reads at a time, into LANES x BINS sums
ROUNDING = tl.constexpr(2.0**-12)  # far more than float32 sums of weights are wrong by


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
def _is_cut(row, best, mode, top_k, top_p, vocab_size):
    """Return whether top-k or top-p filters the row. They don't if its largest logit, `best`, isn't finite."""
    has_filter = (tl.load(top_k + row) < vocab_size) | (tl.load(top_p + row) < 1.0)
    return (tl.load(mode + row) == FILTERED) & has_filter & (tl.abs(best) < float("inf"))


@triton.jit
def _bin_of(scaled):
    """Return how many whole units lie below the largest logit, at most BINS - 1; of NaN, BINS - 1."""
    return tl.where(scaled > 1 - BINS, -scaled, BINS - 1).to(tl.int32)


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


@triton.jit
def spread_kernel(
    logits, heads, counts, masses, totals, num_listed, rows, mode, scale, top_k, top_p, stride, vocab_size,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (e, s) counts and weighs split s's ids by bin, and empties the output's list.

    counts[e, s, :] int32, masses[e, s, :] float32 and rounded, totals[e, s] int64 and exact."""
    output, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, best = tl.load(rows + output), value_of(key_of(_head(heads, output, SPLITS)))
    if _is_cut(row, best, mode, top_k, top_p, vocab_size):
        factor, bins = tl.load(scale + row), tl.arange(0, BINS)
        begin, end = ids_of_split(split, vocab_size, SPLITS)
        count = tl.zeros((LANES, BINS), tl.int32)
        mass = tl.zeros((LANES, BINS), tl.float32)
        total = tl.zeros((LANES,), tl.int64)
        for start in range(begin, end, LANES):
            ids = start + tl.arange(0, LANES)
            values = tl.load(logits + output * stride + ids, mask=ids < end, other=float("-inf"))
            scaled = (values - best) * factor
            amounts = tl.where(ids < end, weight(scaled), 0)
            is_in = (_bin_of(scaled)[:, None] == bins[None, :]) & (ids < end)[:, None]
            count += is_in.to(tl.int32)
            mass += tl.where(is_in, amounts.to(tl.float32)[:, None], 0.0)
            total += amounts
        here = output * SPLITS + split
        tl.store(counts + here * BINS + bins, tl.sum(count, 0))
        tl.store(masses + here * BINS + bins, tl.sum(mass, 0))
        tl.store(totals + here, tl.sum(total, 0))
        if split == 0:
            tl.store(num_listed + output, 0)


@triton.jit
def _last_bin(counts, masses, output, k, p, vocab_size, SPLITS: tl.constexpr):
    """Return the last bin whose ids are listed: all that top-k keeps; without top-k, all that top-p may keep.

    Of the weight, top-p leaves out less than the share 1 - p. That is looked for from the lightest bins on, because a
    sum's rounding is small beside these bins only if they are added first."""
    bins = tl.arange(0, BINS)
    places = (output * SPLITS + tl.arange(0, SPLITS)[:, None]) * BINS + bins[None, :]
    count = tl.cumsum(tl.sum(tl.load(counts + places), 0), 0)
    tail = tl.cumsum(tl.sum(tl.load(masses + places), 0), 0, reverse=True)
    left_out = tail <= tl.max(tail, 0) * (1.0 - p) * (1.0 - ROUNDING)
    of_k = tl.min(tl.where(count >= k, bins, BINS - 1), 0)
    of_p = tl.maximum(tl.min(tl.where(left_out, bins, BINS), 0) - 1, 0)
    return tl.where(k < vocab_size, of_k, of_p)


@triton.jit
def gather_kernel(
    logits, heads, counts, masses, listed, num_listed, rows, mode, scale, top_k, top_p, stride, vocab_size,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (e, s) appends split s's ids to listed[e, :] int32, in any order, and counts them in num_listed[e]."""
    output, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, best = tl.load(rows + output), value_of(key_of(_head(heads, output, SPLITS)))
    if _is_cut(row, best, mode, top_k, top_p, vocab_size):
        last = _last_bin(counts, masses, output, tl.load(top_k + row), tl.load(top_p + row), vocab_size, SPLITS)
        factor = tl.load(scale + row)
        begin, end = ids_of_split(split, vocab_size, SPLITS)
        for start in range(begin, end, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            values = tl.load(logits + output * stride + ids, mask=ids < end, other=float("-inf"))
            is_near = (ids < end) & (_bin_of((values - best) * factor) <= last)
            nth = tl.cumsum(is_near.to(tl.int32), 0)
            num = tl.max(nth, 0)
            if num > 0:
                first = tl.atomic_add(num_listed + output, num, sem="relaxed")
                tl.store(listed + output * vocab_size + first + nth - 1, ids, is_near)


@triton.jit
def draw_kernel(
    logits, heads, drawn, positions, rows, mode, scale, log_min_p, seeds, top_k, top_p, stride, vocab_size,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """`drawn`: (E, SPLITS) int64, unless top-k or top-p filters the output."""
    output, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = tl.load(rows + output), _head(heads, output, SPLITS)
    best = value_of(key_of(head))
    if not _is_cut(row, best, mode, top_k, top_p, vocab_size):
        result = head
        if (tl.load(mode + row) != GREEDY) & (tl.abs(best) < float("inf")):
            factor, floor = tl.load(scale + row), tl.load(log_min_p + row)
            first, second = row_keys(tl.load(seeds + row), tl.load(positions + output) + 1)
            begin, end = ids_of_split(split, vocab_size, SPLITS)
            ranks = tl.full((BLOCK,), NO_RANK, tl.int64)
            for start in range(begin, end, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                values = tl.load(logits + output * stride + ids, mask=ids < end, other=float("-inf"))
                scaled = (values - best) * factor
                scores = scaled + gumbel(noise_bits(first, second, ids))
                ranks = tl.maximum(ranks, tl.where((ids < end) & (scaled >= floor), ranked(scores, ids), NO_RANK))
            result = tl.max(ranks, 0)
        tl.store(drawn + output * SPLITS + split, result)


@triton.jit
def _read_list(logits, listed, num, start, id_bits):
    """Return a block of listed ids, whether they are there, their logits, and their ranks without unused bits."""
    places = start + tl.arange(0, BLOCK)
    is_there = places < num
    ids = tl.load(listed + places, is_there, other=0)
    values = tl.load(logits + ids, is_there, other=float("-inf"))
    ranks = (ordered(values) << id_bits) | (((1 << id_bits) - 1) ^ ids)
    return ids, is_there, values, ranks


@triton.jit
def _sum_from(logits, listed, num, lowest, best, factor, id_bits, BY_MASS: tl.constexpr):
    """Return how many listed ids rank at least `lowest`, or what they weigh."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, num, BLOCK):
        _, is_there, values, ranks = _read_list(logits, listed, num, start, id_bits)
        amounts = weight((values - best) * factor) if BY_MASS else tl.full((BLOCK,), 1, tl.int64)
        total += tl.where(is_there & (ranks >= lowest), amounts, 0)
    return tl.sum(total, 0)


@triton.jit
def _last_kept(logits, listed, num, goal, best, factor, id_bits, BY_MASS: tl.constexpr):
    """Return the greatest rank from which the listed ids reach `goal`, a number of ids or a weight."""
    rank = tl.full((), 0, tl.int64)
    for step in range(32 + id_bits):
        tried = rank | (tl.full((), 1, tl.int64) << (31 + id_bits - step).to(tl.int64))
        if _sum_from(logits, listed, num, tried, best, factor, id_bits, BY_MASS) >= goal:
            rank = tried
    return rank


@triton.jit
def _choose_listed(logits, listed, num, total, first, second, best, factor, floor, k, p, vocab_size, id_bits):
    """Return the rank of the listed id that all filters keep and whose scaled logit + noise is the largest."""
    lowest = tl.full((), 0, tl.int64)
    if k < vocab_size:
        lowest = _last_kept(logits, listed, num, k, best, factor, id_bits, False)
    if p < 1.0:
        if k < vocab_size:
            total = _sum_from(logits, listed, num, lowest, best, factor, id_bits, True)
        goal = tl.maximum((p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        lowest = _last_kept(logits, listed, num, goal, best, factor, id_bits, True)
    chosen = tl.full((BLOCK,), NO_RANK, tl.int64)
    for start in range(0, num, BLOCK):
        ids, is_there, values, ranks = _read_list(logits, listed, num, start, id_bits)
        scaled = (values - best) * factor
        scores = scaled + gumbel(noise_bits(first, second, ids))
        stays = is_there & (ranks >= lowest) & (scaled >= floor)
        chosen = tl.maximum(chosen, tl.where(stays, ranked(scores, ids), NO_RANK))
    return tl.max(chosen, 0)


@triton.jit
def choose_kernel(drawn, chosen, SPLITS: tl.constexpr):
    """`chosen`: (E,) int64."""
    output = tl.program_id(0).to(tl.int64)
    tl.store(chosen + output, id_of(_head(drawn, output, SPLITS)))


@triton.jit
def choose_filtered_kernel(
    logits, heads, totals, listed, num_listed, drawn, chosen, positions, rows, mode, scale, log_min_p, seeds, top_k,
    top_p, stride, vocab_size, id_bits, SPLITS: tl.constexpr,
):  # fmt: skip
    """The same, of a batch in which top-k or top-p filters some outputs."""
    output = tl.program_id(0).to(tl.int64)
    row, best = tl.load(rows + output), value_of(key_of(_head(heads, output, SPLITS)))
    if _is_cut(row, best, mode, top_k, top_p, vocab_size):
        first, second = row_keys(tl.load(seeds + row), tl.load(positions + output) + 1)
        rank = _choose_listed(
            logits + output * stride, listed + output * vocab_size, tl.load(num_listed + output),
            tl.sum(tl.load(totals + output * SPLITS + tl.arange(0, SPLITS)), 0), first, second, best,
            tl.load(scale + row), tl.load(log_min_p + row), tl.load(top_k + row), tl.load(top_p + row), vocab_size,
            id_bits,
        )  # fmt: skip
    else:
        rank = _head(drawn, output, SPLITS)
    tl.store(chosen + output, id_of(rank))


def find_heads(logits: torch.Tensor) -> torch.Tensor:
    """Return each split's best rank, (E, splits) int64, for logits (E, vocab) float32."""
    num, vocab_size = logits.shape
    splits = splits_of(num)
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
    splits, device = heads.shape[1], logits.device
    grid, sizes = (num, splits), (logits.stride(0), vocab_size)
    ids = torch.empty(num, dtype=torch.int64, device=device)
    how = (draws.rows, draws.mode, draws.scale, draws.log_min_p, draws.seeds, draws.top_k, draws.top_p)
    drawn = heads
    if is_warm:
        drawn = torch.empty_like(heads)
        launch(draw_kernel, grid, logits, heads, drawn, positions, *how, *sizes, SPLITS=splits)
    if not filters:
        launch(choose_kernel, (num,), drawn, ids, SPLITS=splits)
        return ids
    counts = torch.empty((num, splits, BINS.value), dtype=torch.int32, device=device)
    masses, totals = torch.empty_like(counts, dtype=torch.float32), torch.empty_like(heads)
    listed = torch.empty((num, vocab_size), dtype=torch.int32, device=device)
    num_listed = torch.empty(num, dtype=torch.int32, device=device)
    cut = (draws.rows, draws.mode, draws.scale, draws.top_k, draws.top_p)
    launch(spread_kernel, grid, logits, heads, counts, masses, totals, num_listed, *cut, *sizes, SPLITS=splits)
    launch(gather_kernel, grid, logits, heads, counts, masses, listed, num_listed, *cut, *sizes, SPLITS=splits)
    launch(
        choose_filtered_kernel, (num,), logits, heads, totals, listed, num_listed, drawn, ids, positions, *how, *sizes,
        max(1, (vocab_size - 1).bit_length()), SPLITS=splits, num_warps=8,
    )  # fmt: skip
    return ids


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
