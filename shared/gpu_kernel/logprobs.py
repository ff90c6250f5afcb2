"""Compute log-probabilities of drawn ids and of the likeliest ids, from raw logits.

    measure    a split's weight, and its best few ids, one after another         E x splits programs
    tell       the sum of weights, the logprobs and the best ids of all splits   E programs

For an output without logprobs, the programs end immediately.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.launch.launcher import launch, recorded
from shared.gpu_kernel.launch.real_models import REAL_MODELS
from shared.gpu_kernel.launch.signatures import REAL_BATCH, Signature
from shared.gpu_kernel.noise import log_mass, weight
from shared.gpu_kernel.ranks import BLOCK, NO_RANK, id_of, ids_of_split, key_of, ranked, splits_of, value_of

EXACT = True  # see noise.py
MOST_BEST = 20  # the limit of OpenAI's API
NO_TOKEN = tl.constexpr(-1)


@triton.jit(do_not_specialize=["width"])
def measure_kernel(logits, heads, num_best, masses, best, stride, vocab_size, width, SPLITS: tl.constexpr):
    """Program (e, s) writes the sum of split s's weights to masses[e, s] int64.

    The split's best ranks go to best[e, s, :] int64."""
    output, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wanted = tl.load(num_best + output)
    if wanted >= 0:
        top = value_of(key_of(tl.max(tl.load(heads + output * SPLITS + tl.arange(0, SPLITS)), 0)))
        begin, end = ids_of_split(split, vocab_size, SPLITS)
        mass = tl.zeros((BLOCK,), tl.int64)
        for start in range(begin, end, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            values = tl.load(logits + output * stride + ids, mask=ids < end, other=float("-inf"))
            mass += tl.where(ids < end, weight(values - top), 0)
        tl.store(masses + output * SPLITS + split, tl.sum(mass, 0))
        last = tl.full((), (1 << 63) - 1, tl.int64)
        for nth in range(0, tl.minimum(wanted, width).to(tl.int32)):
            found = tl.full((BLOCK,), NO_RANK, tl.int64)
            for start in range(begin, end, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                values = tl.load(logits + output * stride + ids, mask=ids < end, other=float("-inf"))
                ranks = ranked(values, ids)
                found = tl.maximum(found, tl.where((ids < end) & (ranks < last), ranks, NO_RANK))
            last = tl.max(found, 0)
            tl.store(best + (output * SPLITS + split) * width + nth, last)


@triton.jit(do_not_specialize=["width"])
def tell_kernel(
    logits, heads, num_best, masses, best, chosen, logprobs, best_ids, best_logprobs, stride, vocab_size, width,
    SPLITS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Program e writes the logprob of chosen[e] to logprobs[e] float32.

    The likeliest ids go to best_ids[e, :] int64, their logprobs to best_logprobs[e, :] float32. Unused entries are -1
    in best_ids and 0 in best_logprobs."""
    output = tl.program_id(0).to(tl.int64)
    wanted = tl.load(num_best + output)
    splits, places = tl.arange(0, SPLITS), tl.arange(0, CANDIDATES)
    logprob = tl.full((), 0.0, tl.float32)
    top, log_total = logprob, logprob
    if wanted >= 0:
        top = value_of(key_of(tl.max(tl.load(heads + output * SPLITS + splits), 0)))
        log_total = log_mass(tl.sum(tl.load(masses + output * SPLITS + splits), 0))
        logprob = (tl.load(logits + output * stride + tl.load(chosen + output)) - top) - log_total
    tl.store(logprobs + output, logprob)
    is_there = (places < SPLITS * width) & (places % tl.maximum(width, 1) < wanted)
    ranks = tl.load(best + output * SPLITS * width + places, mask=is_there, other=NO_RANK)
    last = tl.full((), (1 << 63) - 1, tl.int64)
    for nth in range(0, width):
        last = tl.max(tl.where(ranks < last, ranks, NO_RANK), 0)
        is_asked = (nth < wanted) & (nth < vocab_size)
        value = (value_of(key_of(last)) - top) - log_total
        tl.store(best_ids + output * width + nth, tl.where(is_asked, id_of(last), NO_TOKEN))
        tl.store(best_logprobs + output * width + nth, tl.where(is_asked, value, 0.0))


def tell_logprobs(
    logits: torch.Tensor, heads: torch.Tensor, num_best: torch.Tensor, width: int, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logprobs of `ids` (E,), the likeliest ids (E, width), and their logprobs (E, width).

    Logprobs are float32, ids int64. logits: (E, vocab) float32, rows of any stride. heads: from sample.find_heads.
    num_best: (E,) int64, numbers of likeliest ids, at most `width`; -1 for no logprobs."""
    num, vocab_size = logits.shape
    splits, device = heads.shape[1], logits.device
    masses = torch.empty((num, splits), dtype=torch.int64, device=device)
    best = torch.empty((num, splits, max(1, width)), dtype=torch.int64, device=device)
    logprobs = torch.empty(num, dtype=torch.float32, device=device)
    best_ids = torch.empty((num, width), dtype=torch.int64, device=device)
    best_logprobs = torch.empty((num, width), dtype=torch.float32, device=device)
    sizes = (logits.stride(0), vocab_size, width)
    launch(measure_kernel, (num, splits), logits, heads, num_best, masses, best, *sizes, SPLITS=splits)
    launch(
        tell_kernel, (num,), logits, heads, num_best, masses, best, ids, logprobs, best_ids, best_logprobs, *sizes,
        SPLITS=splits, CANDIDATES=triton.next_power_of_2(splits * max(1, width)),
    )  # fmt: skip
    return logprobs, best_ids, best_logprobs


def real_signatures() -> set[Signature]:
    with recorded() as signatures:
        for model in REAL_MODELS:
            for num in (1, 16, REAL_BATCH):
                logits = torch.empty(num, model.vocab_size, device="meta")
                integers = torch.empty(num, dtype=torch.int64, device="meta")
                heads = torch.empty(num, splits_of(num), dtype=torch.int64, device="meta")
                tell_logprobs(logits, heads, integers, MOST_BEST, integers)
    return signatures
