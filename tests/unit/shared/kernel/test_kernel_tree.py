"""Attention over windows of alternatives: a node's result is that of its root-to-node path run as a chain."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from shared.kernel.attention.attention import AttentionBackend, AttentionInputs, AttentionShape, TorchAttention
from shared.kernel.attention.attention_numba import NumbaAttention
from shared.kernel.attention.rope import inverse_frequencies, rope_tables
from shared.kernel.code.step_layout import Layout
from shared.kernel.team.team import Team
from tests.support.cores.draft_trees import depths, draw_parents, path_to, visible_bits

MAX_LEN = 120
SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=32, eps=1e-5)
ROPE, WIDE_ROPE = (rope_tables(inverse_frequencies(head_dim, 10000.0), MAX_LEN) for head_dim in (32, 64))
WIDE = dataclasses.replace(SHAPE, head_dim=64)  # int8 keys and values are multiplied as integers
SLIDING = dataclasses.replace(SHAPE, windows=(4,))  # shorter than a path may be
Make = Callable[[], AttentionBackend]
BACKENDS: dict[str, Make] = {
    "torch": lambda: TorchAttention(SHAPE, ROPE),
    "numba": lambda: NumbaAttention(SHAPE, torch.float32, ROPE, Team(1)),
    "numba, bfloat16": lambda: NumbaAttention(SHAPE, torch.bfloat16, ROPE, Team(1)),
    "numba, two threads": lambda: NumbaAttention(SHAPE, torch.float32, ROPE, Team(2)),
    "torch, sliding window": lambda: TorchAttention(SLIDING, ROPE),
    "numba, sliding window": lambda: NumbaAttention(SLIDING, torch.float32, ROPE, Team(1)),
    "numba, int8": lambda: NumbaAttention(SHAPE, torch.float32, ROPE, Team(1), page_dtype=torch.int8),
    "numba, int8, sliding window": lambda: NumbaAttention(SLIDING, torch.float32, ROPE, Team(1), page_dtype=torch.int8),
    "numba, int8, wide heads": lambda: NumbaAttention(WIDE, torch.float32, WIDE_ROPE, Team(1), page_dtype=torch.int8),
}


def shape_of(name: str) -> AttentionShape:
    return WIDE if "wide" in name else SHAPE


@dataclass
class Row:
    """A row of a step: its tokens, and where they stand."""

    table_row: int
    qkv: torch.Tensor  # (n, ...)
    start: int
    parents: list[int] | None = None  # a window of alternatives, else a chain

    @property
    def positions(self) -> torch.Tensor:
        return self.start + (
            torch.arange(len(self.qkv)) if self.parents is None else torch.tensor(depths(self.parents))
        )

    @property
    def visible(self) -> torch.Tensor:
        return torch.full((len(self.qkv),), -1) if self.parents is None else visible_bits(self.parents)


class Rows:
    """One layer's pool, NaN where nothing was written, fed in steps."""

    def __init__(self, name: str, page_size: int, num_rows: int = 3) -> None:
        self.backend, self.dtype = BACKENDS[name](), torch.bfloat16 if "bfloat16" in name else torch.float32
        per_row = -(-MAX_LEN // page_size)
        order = torch.randperm(num_rows * per_row, generator=torch.Generator().manual_seed(3)) + 1
        self.table = order.to(torch.int32).view(num_rows, per_row)
        shape = (1 + num_rows * per_row, 1, 2, SHAPE.num_kv_heads, page_size, shape_of(name).head_dim)
        self.kv, self.scales = torch.full(shape, float("nan"), dtype=self.dtype), None
        if "int8" in name:
            self.kv, self.scales = torch.full(shape, 91, dtype=torch.int8), torch.full(shape[:-1], float("nan"))

    def step(self, *rows: Row) -> torch.Tensor:
        lens = torch.tensor([0, *(len(row.qkv) for row in rows)])
        slots = torch.cat([row.start + torch.arange(len(row.qkv)) for row in rows])
        has_tree = any(row.parents is not None for row in rows)
        inputs = AttentionInputs(
            positions=torch.cat([row.positions for row in rows]),
            layout=Layout(
                cu_q_lens=lens.cumsum(0).to(torch.int32),
                page_tables=(self.table[[row.table_row for row in rows]],),
                max_q_len=int(lens.max()),
                max_seq_len=int(slots.max()) + 1,
            ),
            slots=slots if has_tree else None,
            visible=torch.cat([row.visible for row in rows]) if has_tree else None,
        )
        self.backend.begin(inputs, self.kv, self.scales)
        return self.backend.attend(0, torch.cat([row.qkv for row in rows]).to(self.dtype), None, None).clone()


def random_qkv(seed: int, num: int, name: str = "") -> torch.Tensor:
    heads = SHAPE.num_heads + 2 * SHAPE.num_kv_heads
    return torch.randn(num, heads * shape_of(name).head_dim, generator=torch.Generator().manual_seed(seed))


def cancelling(qkv: torch.Tensor) -> torch.Tensor:
    """Give all keys the same weight, and let neighbouring values cancel out. bfloat16 results hide other orders."""
    q, k, v = qkv.unflatten(1, (-1, SHAPE.head_dim)).split((6, 2, 2), dim=1)
    sizes = 2.0 ** (torch.arange(len(qkv)) // 2 * 7 % 24)
    v = v * sizes[:, None, None]
    v[1::2] = -v[: len(v) // 2 * 2 : 2]
    return torch.cat((q * 0, k, v), dim=1).flatten(1)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("width", "chunk"), [(2, 3), (7, 40), (16, 5)])
def test_every_node_is_its_path_run_as_a_chain(name: str, page_size: int, width: int, chunk: int) -> None:
    """In a step with a chunk of another row: long chunks take the reference's other way."""
    rng = random.Random(width)
    for start in (1, 15, 40):
        parents = draw_parents(rng, width)
        before, window, other = (random_qkv(n + 1, count, name) for n, count in enumerate((start, width, chunk)))
        if "bfloat16" in name and start == 15:
            before, window = cancelling(torch.cat((before, window))).split((start, width))
        rows = Rows(name, page_size)
        rows.step(Row(0, before, 0))
        mixed = rows.step(Row(1, other, 0), Row(0, window, start, parents))
        alone = Rows(name, page_size)
        chains = [mixed[:chunk], *(mixed[chunk + n] for n in range(width))]
        want = [alone.step(Row(1, other, 0))]
        for node in range(width):
            alone.step(Row(2, before, 0))
            want.append(alone.step(Row(2, window[path_to(parents, node)], start))[-1])
        for got, expected in zip(chains, want, strict=True):
            if name.startswith("torch"):
                torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
            else:
                assert torch.equal(got, expected), "the same sums in the same order"


@pytest.mark.parametrize("name", ["torch", "numba", "numba, bfloat16", "numba, int8", "numba, int8, wide heads"])
def test_part_of_a_window_sees_what_earlier_steps_wrote_of_it(name: str) -> None:
    """A draft model grows its tree a level a step: a token's highest bit says where its window begins."""
    parents = [0, 0, 1, 1, 2, 3]
    rows, whole = (Rows(name, 4) for _ in range(2))
    window = random_qkv(2, 7, name)
    for each in (rows, whole):
        each.step(Row(0, random_qkv(1, 9, name), 0))
    want = whole.step(Row(0, window, 9, parents))
    bits, depth = visible_bits(parents), torch.tensor(depths(parents))
    for first, last in ((0, 1), (1, 3), (3, 6), (6, 7)):
        inputs = AttentionInputs(
            positions=9 + depth[first:last],
            layout=Layout(
                cu_q_lens=torch.tensor([0, last - first], dtype=torch.int32),
                page_tables=(rows.table[:1],),
                max_q_len=last - first,
                max_seq_len=9 + last,
            ),
            slots=9 + torch.arange(first, last),
            visible=bits[first:last],
        )
        rows.backend.begin(inputs, rows.kv, rows.scales)
        got = rows.backend.attend(0, window[first:last].to(rows.dtype), None, None)
        torch.testing.assert_close(got, want[first:last], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("wrong", ["slot", "visible"])
def test_a_wrong_window_fails_before_anything_is_written(wrong: str) -> None:
    rows = Rows("numba", 16)
    slots = torch.tensor([3, 4]) if wrong == "visible" else torch.tensor([3, 5])
    visible = torch.tensor([1, 0b100000 if wrong == "visible" else 0b11])
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    inputs = AttentionInputs(torch.tensor([3, 4]), Layout(bounds, (rows.table[:1],), 2, 5), slots, visible)
    with pytest.raises(IndexError, match="begins before" if wrong == "visible" else "slots 3..5"):
        rows.backend.begin(inputs, rows.kv)
