"""Which steps have a graph, of which size, and why others have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shared.core.sampling_params import SamplingParams
from shared.engine.boundary import PinnedCopies, Place
from shared.engine.buckets import BATCHES, Buckets, Shape, frame_of, row_arrays, some_widths
from shared.engine.plan import HistorySeed, StepPlan
from shared.engine.step_arrays import NOTHING, step_arrays
from shared.kernel.step_layout import Layout, equal_bounds
from shared.observe.metric_names import EAGER_REASONS
from shared.sample.interface import SamplingBatch
from shared.sample.params import params_of

VOCAB = 50
BUCKETS = Buckets.up_to(10, (1, 4), 100)


def up_to(max_seq_len: int, batch: int = 2, width: int = 1) -> Layout[np.ndarray]:
    return Layout(equal_bounds(batch, width), (np.ones((batch, 1), np.int32),), width, max_seq_len)


def plan_of(batch: int, width: int = 1, *sampling: SamplingParams, **changes: Any) -> StepPlan:
    """Of rows that decode; the first ones sample as `sampling` says, the others greedily."""
    params = [*sampling, *[SamplingParams(9, temperature=0.0)] * (batch - len(sampling))]
    own = {
        "req_pool_indices": np.arange(1, batch + 1),
        "seq_lens_cpu": np.arange(batch) + 7,
        "lengths_relayed": False,
        "expect_step": np.arange(batch) + 3,
        "sampling": SamplingBatch.build(params, range(batch), [5] * batch),
        "layout": up_to(60, batch, width),
    }
    frame = frame_of(Shape(batch, width, False), 1, keeps_history=False)
    return replace(frame, **own | changes)


def shape_of(plan: StepPlan) -> Shape | str:
    return BUCKETS.shape_of(plan, params_of(plan.sampling, VOCAB))


def test_batches_end_at_what_may_run() -> None:
    assert BUCKETS.batches == (1, 2, 4, 8, 16)
    assert Buckets.up_to(1, (1,), 9).batches == (1,) and Buckets.up_to(8, (1,), 9).batches == (1, 2, 4, 8)
    assert Buckets.up_to(256, (1,), 9).batches == Buckets.up_to(1000, (1,), 9).batches == BATCHES and len(BATCHES) == 14


def test_the_largest_is_captured_first() -> None:
    shapes = BUCKETS.shapes()
    assert shapes[0] == Shape(16, 4, True) and shapes[-1] == Shape(1, 1, False) and len(shapes) == 5 * 2 * 2
    assert [shape.batch * shape.width for shape in shapes] == sorted((s.batch * s.width for s in shapes), reverse=True)


@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16), (16, 16)])
def test_a_step_takes_the_next_larger_graph(rows: int, batch: int) -> None:
    assert shape_of(plan_of(rows)) == Shape(batch, 1, False)
    assert shape_of(plan_of(rows, 4, SamplingParams(9, top_k=3))) == Shape(batch, 4, True)


def test_rows_that_draw_among_all_need_no_filter() -> None:
    assert shape_of(plan_of(2, 1, SamplingParams(9, temperature=0.7))) == Shape(2, 1, False)


def sampled(**how: Any) -> dict[str, Any]:
    return {"sampling": SamplingBatch.build([SamplingParams(9), SamplingParams(9, **how)], [0, 1], [5, 5])}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("prompts", {"num_prefill": 1}),
    ("prompts", {"history_seeds": (HistorySeed(1, np.arange(3)),)}),
    ("prompts", {"layer_ends": (1,)}),
    ("grammars", {"constrained": (False, True)}),
    ("edits", sampled(repetition_penalty=1.2)),
    ("edits", sampled(presence_penalty=0.1)),
    ("edits", sampled(frequency_penalty=0.1)),
    ("edits", sampled(logit_bias=((3, 1.0),))),
    ("edits", sampled(bad_words=((3,),))),
    ("edits", sampled(bad_words=((3, 4),))),
    ("edits", sampled(allowed_token_ids=(3, 4))),
    ("edits", sampled(allowed_token_ids=(VOCAB + 1,))),
    ("edits", sampled(min_tokens=3, stop_token_ids=(4,))),
    ("logprobs", sampled(num_logprobs=0)),
    ("adapters", {"adapters": np.asarray([0, 1])}),
    ("length", {"layout": up_to(101)}),
    ("width", {"width": 3}),
]


@pytest.mark.parametrize(("why", "changes"), REFUSED)
def test_what_no_graph_holds(why: str, changes: dict[str, Any]) -> None:
    assert shape_of(plan_of(2, **changes)) == why and why in EAGER_REASONS


def test_too_many_rows() -> None:
    assert shape_of(plan_of(17)) == "rows" and shape_of(replace(plan_of(1), row_ids=())) == "rows"


def test_up_to_three_widths_get_graphs() -> None:
    assert some_widths([1]) == (1,) and some_widths([1, 6]) == (1, 6) and some_widths([1, 2, 3, 4, 6, 8]) == (1, 4, 8)


def test_a_frame_has_what_every_step_of_its_shape_has() -> None:
    """Indices of the shape are those of any such plan; all that differs comes with the step."""
    frame = step_arrays(frame_of(Shape(4, 3, False), 100, keeps_history=False), NOTHING).named()
    own = step_arrays(plan_of(4, 3, emits=np.ones(4, np.bool_)), NOTHING).named()
    sent = {"rows", "seq_lens", "expect_step", "emits", "page_table_0"}
    assert frame.keys() == own.keys() and sent < frame.keys()
    assert all(np.array_equal(frame[name], own[name]) for name in frame.keys() - sent)


def test_relayed_lengths_are_sent_as_minus_one() -> None:
    plan = plan_of(2)
    params = params_of(plan.sampling, VOCAB)
    assert row_arrays(plan, params)["seq_lens"].tolist() == [7, 8]
    assert row_arrays(replace(plan, lengths_relayed=True), params)["seq_lens"].tolist() == [-1, -1]


class Held:
    def hold(self, give_back: Any) -> None:
        """Never given back."""


def test_a_block_is_refilled_with_zeros_behind_each_array() -> None:
    """And nothing behind the last place."""
    boundary = PinnedCopies(torch.device("cpu"), lambda size: torch.full((size,), 9, dtype=torch.uint8))
    block = torch.full((32,), 5, dtype=torch.uint8)
    places = {"a": Place(0, 8, (2,), torch.int32), "b": Place(16, 24, (2, 2), torch.int16)}
    boundary.refill(block, places, {"a": np.asarray([7], np.int32), "b": np.asarray([[3], [4]], np.int16)}, Held())
    assert places["a"].of(block).tolist() == [7, 0] and places["b"].of(block).tolist() == [[3, 0], [4, 0]]
    assert block[24:].tolist() == [5] * 8
    first = Place(4, 28, (3, 2), torch.int32).first(2)
    assert first == Place(4, 20, (2, 2), torch.int32)
