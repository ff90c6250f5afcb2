"""How a decode step begins, by one kernel, interpreted: as the engine begins it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.engine.forward_batch import ForwardBatch, resolve_forward_inputs
from shared.engine.future_map import FutureMap
from shared.engine.prepare import Prepared, prepare_by_torch, prepare_windows
from shared.kernel.product import libraries
from tests.support.cores.verify_steps import make_plan, new_batch

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
prepare = interpreter.kernels("prepare")

NUM_ROWS = 300
POISON = -(2**62)


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "runs_triton", lambda device: True)


def filled_relay(seed: int) -> FutureMap:
    rng = np.random.default_rng(seed)
    relay = FutureMap(NUM_ROWS, 8)
    relay.output_tokens_buf[:] = torch.from_numpy(rng.integers(0, 2**31, NUM_ROWS))
    relay.new_seq_lens_buf[:] = torch.from_numpy(rng.integers(1, 2**31, NUM_ROWS))
    relay.written_by[:] = torch.from_numpy(rng.integers(0, 3, NUM_ROWS))
    return relay


def framed(values: torch.Tensor) -> torch.Tensor:
    """The values with poison before and behind them."""
    wide = torch.full((len(values) + 8,), POISON).to(values.dtype)
    wide[4:-4] = values
    return wide[4:-4]


def in_any_order(*given: object) -> Prepared:
    """The same bits twice."""
    found = []
    for seed in (1, 2):
        with interpreter.shuffled(seed):
            found.append(prepare_windows(*given))  # type: ignore[arg-type]
    assert_same(*found)
    return found[0]


def assert_same(ours: Prepared, others: Prepared) -> None:
    for name in Prepared.__slots__:
        assert torch.equal(getattr(ours, name), getattr(others, name)), name


def begun_by_engine(rows: list[int], lengths: list[int], expected: list[int], width: int, relay: FutureMap) -> Prepared:
    """What an eager step makes of the same rows. Negative lengths are relayed."""
    plan = replace(
        make_plan([max(1, length) for length in lengths], width, []),
        req_pool_indices=np.asarray(rows),
        lengths_relayed=lengths[0] < 0,
        expect_step=np.asarray(expected),
    )
    fb: ForwardBatch = new_batch(plan, relay)
    resolve_forward_inputs(fb, relay)
    return Prepared(fb.committed, fb.tag_ok, fb.inputs.positions, fb.inputs.input_ids)


@pytest.mark.rule("S9")
@pytest.mark.parametrize("relayed", [False, True])
@pytest.mark.parametrize(("num", "width"), [(1, 1), (5, 1), (3, 4), (2, 7), (131, 2)])
def test_a_step_begins_as_the_engine_has_it(num: int, width: int, relayed: bool) -> None:
    rng, relay = np.random.default_rng(num + width), filled_relay(width)
    rows = rng.permutation(np.arange(1, NUM_ROWS))[:num]
    lengths = np.full(num, -1) if relayed else rng.integers(1, 90, num)
    expected = rng.integers(0, 3, num)
    given = [framed(torch.from_numpy(array)) for array in (rows, lengths, expected)]
    ours = in_any_order(*given, width, relay)
    wanted = begun_by_engine(rows.tolist(), lengths.tolist(), expected.tolist(), width, relay)
    is_first = torch.arange(num * width) % width == 0
    wanted.input_ids[~is_first] = 0  # drafts come later
    assert_same(ours, wanted)
    assert_same(prepare_by_torch(*given, width, relay), wanted)
