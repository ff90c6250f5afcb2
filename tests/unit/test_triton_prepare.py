"""The step's inputs by one kernel, interpreted: what the engine makes of the same plan, and nothing of padded rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.engine.boundary import SameMemory
from shared.engine.forward_batch import ForwardBatch, resolve_forward_inputs
from shared.engine.future_map import FutureMap
from shared.engine.plan import StepPlan
from shared.sample.knobs import knobs_of
from tests.support.verify_steps import make_plan

interpreter = pytest.importorskip("tests.support.interpreter", exc_type=ImportError)
prepare = interpreter.kernels("prepare")

NUM_ROWS = 12
POISON = -(2**62)


class Tokens:
    """A lease with prompt tokens."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def take_staging(self) -> torch.Tensor:
        return self.ids

    def hold(self, give_back: Callable[[], None]) -> None:
        give_back()


def filled_relay(seed: int) -> FutureMap:
    rng = np.random.default_rng(seed)
    relay = FutureMap(NUM_ROWS, 8)
    relay.output_tokens_buf[:] = torch.from_numpy(rng.integers(0, 2**31, NUM_ROWS))
    relay.new_seq_lens_buf[:] = torch.from_numpy(rng.integers(1, 2**31, NUM_ROWS))
    relay.written_by[:] = torch.from_numpy(rng.integers(0, 3, NUM_ROWS))
    return relay


def batch_of(plan: StepPlan, relay: FutureMap, ids: torch.Tensor) -> ForwardBatch:
    fb = ForwardBatch.init_new(plan, Tokens(ids), relay, SameMemory(), lambda batch: knobs_of(batch, 100))
    resolve_forward_inputs(fb, relay)
    return fb


def framed(values: torch.Tensor) -> torch.Tensor:
    """The values with poison before and behind them."""
    wide = torch.full((len(values) + 8,), POISON).to(values.dtype)
    wide[4:-4] = values
    return wide[4:-4]


@pytest.mark.rule("S9")
@pytest.mark.parametrize("relayed", [False, True])
@pytest.mark.parametrize(("decoding", "width", "chunks"), [(5, 1, []), (3, 4, []), (2, 3, [300, 1, 257]), (0, 1, [5])])
def test_a_step_begins_as_the_engine_has_it(decoding: int, width: int, chunks: list[int], relayed: bool) -> None:
    rng = np.random.default_rng(decoding + width)
    plan = make_plan(rng.integers(1, 90, decoding).tolist(), width, chunks)
    ids = torch.from_numpy(rng.integers(0, 2**31, sum(chunks)))
    num = plan.batch_size
    plan = replace(
        plan,
        req_pool_indices=rng.permutation(np.arange(1, NUM_ROWS))[:num],
        lengths_relayed=relayed,
        expect_step=np.where(np.arange(num) < len(chunks), -1, rng.integers(0, 3, num)),
        prefill_input_ids_cpu=ids if chunks else None,
    )
    relay = filled_relay(width)
    fb = batch_of(plan, relay, ids)
    arrays = fb.arrays
    given = [framed(one) for one in (arrays.rows, arrays.seq_lens, arrays.expect_step, arrays.cu_q_lens, ids)]
    held = prepare.Relay(relay.output_tokens_buf, relay.new_seq_lens_buf, relay.written_by)
    with interpreter.shuffled(num):
        ours = prepare.prepare_step(
            *given, held, len(fb.inputs.input_ids), fb.inputs.max_q_len, plan.num_prefill, relayed
        )
    assert torch.equal(ours.committed, fb.committed)
    assert torch.equal(ours.tag_ok, fb.tag_ok)
    assert torch.equal(ours.positions, fb.inputs.positions)
    is_known = torch.arange(len(fb.inputs.input_ids)) < sum(chunks)
    is_known[sum(chunks) :: width] = True
    assert torch.equal(ours.input_ids[is_known], fb.inputs.input_ids[is_known])
    assert (ours.input_ids[~is_known] == 0).all(), "drafts come later"


@pytest.mark.parametrize("relayed", [False, True])
def test_padded_rows_are_empty_whatever_the_relay_holds(relayed: bool) -> None:
    """Pool row 0 is everybody's padding, and steps before may have left anything there."""
    relay = filled_relay(3)
    rows = torch.tensor([4, 0, 0])
    held = prepare.Relay(relay.output_tokens_buf, relay.new_seq_lens_buf, relay.written_by)
    cu_q_lens = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    lengths, expected = torch.tensor([9, POISON, POISON]), relay.written_by[4].repeat(3) + torch.tensor([0, 9, 9])
    ours = prepare.prepare_step(rows, lengths, expected, cu_q_lens, rows[:0], held, 6, 2, 0, relayed)
    first = int(relay.new_seq_lens_buf[4]) if relayed else 9
    assert ours.committed.tolist() == [first, 0, 0]
    assert ours.tag_ok.tolist() == [True, True, True]
    assert ours.positions.tolist() == [first, first + 1, 0, 1, 0, 1]
    assert ours.input_ids.tolist() == [int(relay.output_tokens_buf[4]), 0, 0, 0, 0, 0]
