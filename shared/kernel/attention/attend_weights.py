"""Turn the scores of a run into weights, and store what they sum up: parts of attend_numba.py's task."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shared.kernel.code.jit import copied, exp32, floats_at, inlined, store, tanh32
from shared.kernel.code.sums import sum_of
from shared.kernel.product.attend_places import Run, oldest_of
from shared.kernel.product.simd import narrow_weights

_f32 = np.float32


class RunRoom(NamedTuple):
    """Addresses in a thread's scratch. R: a run's largest length. G: queries per kv head."""

    items: int  # (lanes,) int64: addresses of a block's keys or values
    scales: int  # (lanes,) int64: addresses of their scales
    block: int  # what transpose_block or copy_block wrote
    edge: int  # (G, lanes) float32: weights of a partial block
    sums: int  # (R, G, value size) float32: weighted values
    tops: int  # (R, G, lanes) float32: largest scores
    scores: int  # (R, G, row) float32, in the order of a token's keys; then what narrow_weights made of them


@inlined
def room_at(memory: int, run_tokens: int, group: int, size: int, lanes: int) -> RunRoom:
    scales = memory + lanes * 8
    block = scales + lanes * 8
    edge = block + lanes * size * 4
    sums = edge + group * lanes * 4
    tops = sums + run_tokens * group * size * 4
    return RunRoom(memory, scales, block, edge, sums, tops, tops + run_tokens * group * lanes * 4)


@copied
def soften_run(items: int, room: RunRoom, run: Run, stride: int, group: int, lanes: int, scale: np.float32) -> None:
    """Turn scores into weights exp(scale (score - top)), and the scores behind the last key into 0.

    Write 1 / (sum of a query's weights) to its first number of `tops`."""
    for i in range(run.length):
        num_keys = run.num_keys + i - oldest_of(run.num_keys + i, run.window, run.num_unread)
        for query in range(i * group, (i + 1) * group):
            row = room.scores + query * stride
            x, tops = floats_at(row), floats_at(room.tops + query * lanes * 4)
            top = tops[0]
            for lane in range(1, lanes):
                top = max(top, tops[lane])
            for s in range(num_keys):
                x[s] = exp32((x[s] - top) * scale)
            for s in range(num_keys, num_keys + lanes):
                x[s] = _f32(0.0)
            whole = (num_keys + lanes - 1) // lanes * lanes
            tops[0] = _f32(1.0) / sum_of(row, whole, False, False)
            narrow_weights(items, row, whole // lanes)


@copied
def soften_more(
    items: int, room: RunRoom, run: Run, stride: int, group: int, lanes: int, scale: np.float32, softcap: np.float32,
    sinks: int, is_capped: bool, has_sinks: bool,
) -> None:  # fmt: skip
    """Do what soften_run does, for capped scores and for sinks: (G,) float32 at the address `sinks`.

    If is_capped, a score becomes softcap * tanh(scale * score). If has_sinks, each sum of weights has one more, of a
    query's sink."""
    for i in range(run.length):
        num_keys = run.num_keys + i - oldest_of(run.num_keys + i, run.window, run.num_unread)
        for g in range(group):
            query = i * group + g
            row = room.scores + query * stride
            x, tops = floats_at(row), floats_at(room.tops + query * lanes * 4)
            top = tops[0]
            for lane in range(1, lanes):
                top = max(top, tops[lane])
            top = softcap * tanh32(scale * top) if is_capped else scale * top
            if has_sinks:
                top = max(top, floats_at(sinks)[g])
            for s in range(num_keys):
                score = softcap * tanh32(scale * x[s]) if is_capped else scale * x[s]
                x[s] = exp32(score - top)
            for s in range(num_keys, num_keys + lanes):
                x[s] = _f32(0.0)
            whole = (num_keys + lanes - 1) // lanes * lanes
            total = sum_of(row, whole, False, False)
            if has_sinks:
                total += exp32(floats_at(sinks)[g] - top)
            tops[0] = _f32(1.0) / total
            narrow_weights(items, row, whole // lanes)


@inlined
def store_run(
    run: Run, sums: int, shares: int, share_bytes: int, out: int, out_bytes: int, group: int, head_dim: int,
    is_half: bool,
) -> None:  # fmt: skip
    for i in range(run.length):
        for g in range(group):
            query = i * group + g
            share = floats_at(shares + query * share_bytes)[0]
            for d in range(head_dim):
                total = floats_at(sums)[query * head_dim + d]
                store(out + i * out_bytes, g * head_dim + d, total * share, is_half)
