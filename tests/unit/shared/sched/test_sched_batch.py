"""Lengths of rows: bounds that hold the true one, and nobody changes what a plan may hold; batches keep their columns
aligned through every filter and merge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.sched.steps.batch import ScheduleBatch
from shared.sched.steps.lengths import Lengths


def i64(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def request(rid: int, row: int) -> Request:
    key = RequestKey("test", 1, f"r{rid}", 0, 0)
    return Request(key, NodeAsk(i64(1, 2, 3), SamplingParams(max_tokens=9), 1), rid, row=row)


def batch_of(lengths: list[int], first_row: int = 1, step: int = 7, in_flight: int = 0) -> ScheduleBatch:
    reqs = [request(first_row + i, first_row + i) for i in range(len(lengths))]
    return ScheduleBatch.of(reqs, lengths, step, in_flight)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("advance"), st.integers(0, 2**16)),
        st.tuples(st.just("filter"), st.integers(0, 2**16)),
        st.tuples(st.just("merge"), st.integers(0, 3)),
    ),
    max_size=15,
)


@pytest.mark.rule("S7")
@given(st.lists(st.integers(0, 500), max_size=6), operations)
def test_lengths_follow_their_rows_and_old_arrays_never_change(lengths: list[int], ops: list) -> None:
    """A plan in flight may hold any array that was the batch's."""
    own = Lengths(np.asarray(lengths, np.int64))
    model, seen = list(lengths), [(own.lo, list(lengths))]
    for name, bits in ops:
        picked = [i for i in range(len(model)) if bits >> i & 1]
        if name == "advance":
            own.advance(np.asarray([bits >> i & 1 for i in range(len(model))], np.int64))
            model = [value + (bits >> i & 1) for i, value in enumerate(model)]
        elif name == "filter":
            own.filter(np.asarray(picked, np.int64))
            model = [model[i] for i in picked]
        else:
            own.merge(Lengths(np.full(bits, 40 + bits, np.int64)))
            model += [40 + bits] * bits
        seen.append((own.lo, list(model)))
        assert own.lo.tolist() == own.hi.tolist() == model
    for array, expected in seen:
        assert array.tolist() == expected


@pytest.mark.rule("I6")
@given(st.booleans(), st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(1, 4)), max_size=40))
def test_bounds_hold_the_true_length_whatever_is_processed_when(
    fresh: bool, moves: list[tuple[bool, int, int]]
) -> None:
    """lo <= true <= hi with two steps of any width in flight, the first perhaps the chunk that ended the prompt; the
    bounds are no wider apart than what is in flight."""
    batch = batch_of([10], in_flight=int(fresh))
    req, true, in_flight = batch.reqs[0], 10, [(10, 0)] if fresh else []
    for launch, width, accepted in moves:
        if launch and len(in_flight) < 2:
            batch.mark_planned(i64(0), 8, width, speculative=True)
            true += min(accepted, width)
            in_flight.append((true, width))
        elif in_flight:
            batch.on_processed(req, *in_flight.pop(0), speculative=True)
        lo, hi = int(batch.seq_lens.lo[0]), int(batch.seq_lens.hi[0])
        assert lo <= true <= hi <= lo + sum(width for _, width in in_flight)


def test_filter_then_merge_keeps_every_column_aligned() -> None:
    batch = batch_of([5, 6, 7], in_flight=1)
    batch.mark_planned(i64(1, 2), step=9, width=1, speculative=False)
    batch.filter_batch(i64(0, 2))
    batch.merge_batch(batch_of([30, 31], first_row=8, step=10))
    assert batch.req_pool_indices.tolist() == [1, 3, 8, 9] == [req.row for req in batch.reqs]
    assert batch.expect_step.tolist() == [7, 9, 10, 10]
    assert batch.in_flight.tolist() == [1, 2, 0, 0]
    for _ in range(2):  # the second time nothing was planned since
        batch.prepare_for_decode(speculative=False)
        assert batch.seq_lens.lo.tolist() == [5, 8, 30, 31] == batch.seq_lens.hi.tolist()


@pytest.mark.rule("H26")
def test_filter_to_empty_leaves_no_stale_column() -> None:
    batch = batch_of([5, 6])
    batch.mark_planned(i64(0, 1), step=9, width=1, speculative=False)
    batch.filter_batch(i64())
    assert len(batch) == 0 and len(batch.seq_lens) == 0
    batch.merge_batch(batch_of([12]))
    batch.prepare_for_decode(speculative=False)
    assert batch.seq_lens.lo.tolist() == [12] and batch.in_flight.tolist() == [0]


def test_planning_never_writes_an_array_that_a_plan_may_hold() -> None:
    batch = batch_of([5, 6])
    columns = (batch.req_pool_indices, batch.expect_step, batch.seq_lens.lo, batch.seq_lens.hi)
    before = [column.copy() for column in columns]
    batch.mark_planned(i64(0), step=9, width=4, speculative=True)
    batch.mark_planned(i64(1), step=9, width=1, speculative=False)
    batch.prepare_for_decode(speculative=False)
    for column, old in zip(columns, before, strict=True):
        assert np.array_equal(column, old)


@pytest.mark.rule("Rb", "H27")
def test_filter_and_merge_between_publish_and_resolve() -> None:
    """Regression (b), (k): the batch changed after the lengths were published; resolve asks for the rows that are
    there now, and the batch takes the answer."""
    batch = batch_of([10, 20, 30])
    published = np.zeros(12, dtype=np.int64)
    published[[1, 2, 3]] = [13, 22, 31]
    published[8] = 40
    for _ in range(2):
        batch.mark_planned(np.arange(3), step=9, width=4, speculative=True)
    batch.filter_batch(i64(0, 2))
    batch.merge_batch(batch_of([40], first_row=8))
    batch.seq_lens.set_exact(published[batch.req_pool_indices])
    assert batch.seq_lens.lo.tolist() == batch.seq_lens.hi.tolist() == [13, 31, 40]


@pytest.mark.rule("Rk")
def test_without_host_lengths_filter_and_merge_keep_bounds() -> None:
    batch = batch_of([10, 20])
    batch.mark_planned(i64(0, 1), step=9, width=4, speculative=True)
    batch.filter_batch(i64(1))
    batch.merge_batch(batch_of([40], first_row=8))
    assert batch.seq_lens.lo.tolist() == [20, 40] and batch.seq_lens.hi.tolist() == [24, 40]
