"""The relay between steps: keyed by pool row, written with a tag, read back as it was left."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.core.errors import IntegrityError
from shared.device.events import Event
from shared.engine.future_map import FutureIndices, FutureMap, RelaySpec
from shared.engine.lease import Carry, StepLease
from shared.engine.plan import Admission
from shared.model.math.interface import ModelOutput
from tests.support.cores.simulated_streams import World
from tests.support.cores.verify_steps import make_batch, make_plan

HIDDEN = RelaySpec("hidden_states", (3,), torch.float32)


def rows(*values: int) -> FutureIndices:
    return FutureIndices(torch.tensor(values, dtype=torch.int64))


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.rule("I2")
def test_the_tag_tells_a_value_of_another_step() -> None:
    future_map = FutureMap(6, 32)
    future_map.stash(rows(4, 2), tensor(40, 20), step=7)
    future_map.stash(rows(2), tensor(21), step=8)
    assert future_map.gather(rows(4, 2), tensor(7, 7))[1].tolist() == [True, False]
    assert future_map.gather(rows(1), tensor(7))[1].tolist() == [False], "never written"


@pytest.mark.rule("S2", "Ra")
@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 95)), max_size=40))
def test_rows_are_the_pool_rows_and_never_wrap(writes: list[tuple[int, int]]) -> None:
    """Regression (a): the same row means the same request for ever, however many steps are in flight."""
    future_map, model = FutureMap(8, 4), {}
    for step, (row, token) in enumerate(writes):
        future_map.stash(rows(row), tensor(token), step)
        model[row] = (token, step)
    for row, (token, step) in model.items():
        tokens, tag_ok = future_map.gather(rows(row), tensor(step))
        assert tokens.tolist() == [token] and tag_ok.all()
    assert future_map.output_tokens_buf.shape == (8,) == future_map.written_by.shape


@pytest.mark.rule("S3", "Rh", "H28")
def test_an_empty_index_neither_writes_nor_records() -> None:
    """Regression (h): an idle rank has no rows; its publish must not tell anybody that lengths are ready."""
    future_map, ready = FutureMap(6, 32, (HIDDEN,)), Event("publish_ready")
    before = [t.clone() for t in (future_map.new_seq_lens_buf, future_map.output_tokens_buf, future_map.written_by)]
    future_map.publish(rows(), torch.zeros(0, dtype=torch.int64), ready)
    future_map.stash(rows(), tensor(5), step=3)
    assert not ready.fired
    after = [future_map.new_seq_lens_buf, future_map.output_tokens_buf, future_map.written_by]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.rule("S3", "Ri")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2)])
def test_token_ids_of_any_integer_shape_are_stored_flat(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Regression (i): a sampler may give (bs, 1) int32."""
    future_map = FutureMap(6, 32)
    try:
        future_map.stash(rows(3, 5), torch.tensor([70, 71], dtype=dtype).reshape(shape), step=1)
    except RuntimeError as error:
        raise AssertionError(f"{dtype} of shape {shape} was not taken: {error}") from error
    tokens, _ = future_map.gather(rows(3, 5), tensor(1, 1))
    assert tokens.dtype == torch.int64 and tokens.tolist() == [70, 71]


@pytest.mark.rule("S5", "Rj")
def test_extras_exist_from_the_start_and_a_payload_may_lack_them() -> None:
    """Regression (j): no buffer is made by looking at the first payload, so a later one may be the first with it."""
    future_map = FutureMap(6, 32, (HIDDEN,))
    assert set(future_map.extras) == {"hidden_states"}
    assert future_map.extras["hidden_states"].shape == (6, 3)
    future_map.stash(rows(2), tensor(20), step=1)
    assert future_map.extras["hidden_states"].any() == torch.tensor(False)
    future_map.stash(rows(2), tensor(21), step=2, hidden_states=torch.ones(1, 3))
    future_map.stash(rows(4), tensor(41), step=3)
    assert future_map.extras["hidden_states"][2].tolist() == [1.0, 1.0, 1.0]
    assert FutureMap(6, 32).extras == {}, "nobody declared one, nobody pays for one"


@pytest.mark.rule("S4")
def test_publish_writes_before_it_fires() -> None:
    future_map, ready, seen = FutureMap(6, 32), Event("publish_ready"), []
    ready.add_callback(lambda _: seen.append(future_map.new_seq_lens_buf[3].item()))
    future_map.publish(rows(3), tensor(17), ready)
    assert seen == [17]


@pytest.mark.rule("S6", "I3")
def test_resolve_waits_for_publish_and_for_nothing_behind_it() -> None:
    """I3: the host reads lengths as soon as they are published; draft-extend may still run."""
    world, future_map, ready = World.script(), FutureMap(6, 32), Event("publish_ready")

    def step():  # noqa: ANN202
        yield  # forward and verify
        future_map.publish(rows(2, 4), tensor(12, 33), ready)
        yield  # draft-extend: still to come when the host goes on
        raise AssertionError("the host ran the step to its end")

    ticket = world.stream("forward").launch(step, fires=[ready])
    lengths = future_map.resolve_seq_lens_cpu(np.asarray([4, 2]), ready)
    assert lengths.tolist() == [33, 12] and not ticket.done.peek()


def lease_of(staging: torch.Tensor | None) -> StepLease:
    nobody = np.zeros(0, np.int64)
    return StepLease(5, Admission(5, (), nobody, nobody, nobody, None, ()), None, staging)


def test_staging_is_consumed_once() -> None:
    """Regression of #25945: what was consumed must not be there for a second taker."""
    lease = lease_of(tensor(1, 2, 3))
    assert lease.take_staging().tolist() == [1, 2, 3]
    with pytest.raises(IntegrityError, match="step 5: prompt staging was consumed twice"):
        lease.take_staging()
    with pytest.raises(IntegrityError):
        lease_of(None).take_staging()


def carry_logits(lease: StepLease) -> weakref.ref[torch.Tensor]:
    """Leave the lease what a forward leaves it, and nobody else."""
    logits = torch.zeros(1, 8)
    lease.carry = Carry(make_batch(make_plan([5], 1, [])), ModelOutput(logits, torch.zeros(1, 4)), None)
    return weakref.ref(logits)


@pytest.mark.rule("H7", "H10")
def test_closing_a_lease_drops_all_it_held() -> None:
    world, lease = World.script(), lease_of(tensor(1))
    logits = carry_logits(lease)
    lease.result = world.stream("copy").launch(lambda: None)
    world.run_until_idle()
    assert lease.done.peek() and lease.close() is None
    assert lease.closed and lease.carry is None and logits() is None and lease.staging is None


def test_closing_a_failed_lease_drops_references_before_raising() -> None:
    def boom() -> None:
        raise ValueError("boom")

    world, lease = World.script(), lease_of(tensor(1))
    logits = carry_logits(lease)
    lease.result = world.stream("copy").launch(boom)
    world.run_until_idle()
    with pytest.raises(ValueError, match="boom"):
        lease.close()
    assert lease.closed and lease.carry is None and logits() is None and lease.staging is None
