"""What a decode step on a GPU launches and moves, counted for the shape of an 8B model."""

from __future__ import annotations

import pytest

pytest.importorskip("tests.support.interpreter", exc_type=ImportError)
from tests.support.gpu_counts import StepCount, count_step, llama  # noqa: E402

MOST_LAUNCHES, MOST_MOVED = 9, 1.15
SHORT, LONG = 128, 2048  # the latter's keys are split


def a_layer(context: int) -> StepCount:
    """What one layer more adds."""
    two, three = (count_step(llama(layers), 64, context) for layers in (2, 3))
    return StepCount(three.launches - two.launches, three.bytes - two.bytes, three.ideal - two.ideal)


def test_a_layer_has_nine_launches() -> None:
    launches = a_layer(SHORT).launches
    print(dict(launches))
    assert launches["linear"] == 4 and launches.total() <= MOST_LAUNCHES


def test_keys_that_are_split_cost_one_launch_more() -> None:
    launches = a_layer(LONG).launches
    assert launches["merge_kernel"] == 1 and launches.total() <= MOST_LAUNCHES + 1


@pytest.mark.parametrize(("batch", "context"), [(1, 2048), (64, 2048), (256, 512)])
def test_a_step_moves_little_but_weights_and_kv(batch: int, context: int) -> None:
    count = count_step(llama(32), batch, context)
    print(f"batch {batch} behind {context}: {count.bytes / 1e9:.2f} GB, ideally {count.ideal / 1e9:.2f}")
    assert 1 <= count.bytes / count.ideal <= MOST_MOVED
