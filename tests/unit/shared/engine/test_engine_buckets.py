"""Which steps have a graph, of which size, and why others have none; and what lies in the graphs' places."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shared.engine.buckets import (
    MANY_ROWS,
    MOST_PROMPTS,
    Buckets,
    PromptShape,
    Shape,
    lengths_up_to,
)
from shared.engine.graphs import Captured, FixedInputs
from shared.kernel.code.step_layout import HostLengths, Layout, equal_bounds
from shared.model.math.interface import ModelInputs
from shared.observe.metric_names import EAGER_REASONS

BUCKETS = Buckets.up_to(10, (1, 4), (100,), prompts=(8, 16, 24))
CPU = torch.device("cpu")


def inputs_of(
    batch: int, width: int = 1, *, num_running: int | None = None, longest: int = 60, **more: Any
) -> ModelInputs:
    """Of rows with `width` tokens each; entry n of each array is n + 1, page numbers begin at 1."""
    bounds = equal_bounds(batch, width)
    host = HostLengths(bounds, None, batch if num_running is None else num_running)
    table = torch.arange(1, 3 * batch + 1, dtype=torch.int32).view(batch, 3)
    layout = Layout(torch.from_numpy(bounds), (table,), width, longest, host=host)
    numbers = torch.arange(1, batch * width + 1)
    return ModelInputs(numbers, numbers.clone(), layout, numbers - 1, **{name: numbers.clone() for name in more})


def prompts_of(*lens: int, outputs: int = 1, longest: int = 60, **more: Any) -> ModelInputs:
    """Of prompts' chunks with so many tokens. Entry n of each array is n + 1, and so are the first `outputs` tokens."""
    inputs = inputs_of(len(lens), num_running=0, longest=longest)
    bounds = np.asarray([0, *lens], np.int32).cumsum(dtype=np.int32)
    layout = replace(inputs.layout, cu_q_lens=torch.from_numpy(bounds), host=HostLengths(bounds, None, 0))
    numbers = torch.arange(1, sum(lens) + 1)
    return ModelInputs(numbers, numbers.clone(), layout, numbers[:outputs], **{name: numbers.clone() for name in more})


@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16), (16, 16)])
def test_a_step_takes_the_next_larger_graph(rows: int, batch: int) -> None:
    assert BUCKETS.shape_of(inputs_of(rows)) == Shape(batch, 1, 100)
    assert BUCKETS.shape_of(inputs_of(rows, 4, adapters=True)) == Shape(batch, 4, 100, True)


def test_many_rows_have_graphs_by_length() -> None:
    """Of few rows only the longest: there, programs without keys cost nothing."""
    buckets = Buckets.up_to(MANY_ROWS, (1,), lengths_up_to(5000), prompts=(8,))
    assert buckets.lengths == (512, 2048, 5000) and lengths_up_to(512) == (512,)
    windows = [shape for shape in buckets.shapes() if isinstance(shape, Shape)]
    assert [shape.length for shape in windows[:4]] == [5000, 2048, 512, 5000] and len(windows) == 7 + 2
    for longest, length in ((1, 512), (512, 512), (513, 2048), (2049, 5000)):
        assert buckets.shape_of(inputs_of(MANY_ROWS, longest=longest)) == Shape(MANY_ROWS, 1, length)
    assert buckets.shape_of(inputs_of(24, longest=9)) == Shape(24, 1, 5000)
    assert buckets.shape_of(prompts_of(3, longest=9)) == PromptShape(8, 5000)
    assert buckets.shape_of(inputs_of(MANY_ROWS, longest=5001)) == "length"


REFUSED: list[tuple[str, ModelInputs]] = [
    ("mixed", inputs_of(3, num_running=2)),
    ("length", inputs_of(2, longest=101)),
    ("length", prompts_of(2, longest=101)),
    ("width", inputs_of(2, 3)),
    ("rows", inputs_of(17)),
    ("rows", inputs_of(0)),
    ("rows", prompts_of(*[1] * (MOST_PROMPTS + 1))),
    ("tokens", prompts_of(20, 5)),
    ("scores", prompts_of(20, outputs=MOST_PROMPTS + 1)),
]


@pytest.mark.parametrize(("why", "inputs"), REFUSED)
def test_what_no_graph_holds(why: str, inputs: ModelInputs) -> None:
    assert BUCKETS.shape_of(inputs) == why and why in EAGER_REASONS


def test_places_hold_the_step_s_arrays_and_behind_them_padding() -> None:
    """Whatever a larger step left there: padding at another position would write to pages of others."""
    names = ("input_ids", "positions", "slots", "visible", "adapters")
    fixed = FixedInputs([Shape(4, 2, 100)], 5, names, CPU)
    every = dict.fromkeys(names[2:], True)
    for step in (inputs_of(4, 2, **every), inputs_of(4, 1), inputs_of(3, 2, **every), inputs_of(1, 2, **every)):
        read = fixed.of(Shape(4, 2, 100, "adapters" in step.per_token()))
        fixed.fill(step, read)
        num, num_rows = len(step.positions), len(step.layout.page_table)
        for name, own in step.per_token().items():
            padding = [-1 if name == "visible" else 0] * (8 - num)
            assert getattr(read, name).tolist() == own.tolist() + padding, name
        table = read.layout.page_table
        assert torch.equal(table[:num_rows, :3], step.layout.page_table) and not table[num_rows:, 0].any()


def test_the_row_behind_a_step_s_prompts_owns_the_padding() -> None:
    """It is on page 0, whatever larger steps left; and no row of a request owns a token that is not its own."""
    fixed = FixedInputs([Shape(12, 1, 100), PromptShape(24, 100)], 5, ("input_ids", "positions"), CPU)
    reads = {num: fixed.of(PromptShape(num, 100)) for num in (16, 24)}
    for lens in ((3, 1, 2, 9), (1,) * 8, (4,), (1, 2), (20, 4), (5, 3, 1)):
        fixed.fill(inputs_of(12), fixed.of(Shape(12, 1, 100)))
        num, step = 24 if sum(lens) > 16 else 16, prompts_of(*lens, outputs=len(lens))
        read, bounds = reads[num], [0, *itertools.accumulate(lens)]
        fixed.fill(step, read)
        layout, num_rows = read.layout, len(lens)
        assert layout.cu_q_lens.tolist() == bounds + [num] * (MOST_PROMPTS + 1 - num_rows)
        assert torch.equal(layout.page_table[:num_rows, :3], step.layout.page_table)
        assert len(layout.page_table) == MOST_PROMPTS + 1 and not layout.page_table[num_rows:, 0].any()
        assert read.positions.tolist() == step.positions.tolist() + [0] * (num - sum(lens))
        assert read.logits_idx[:num_rows].tolist() == step.logits_idx.tolist()
        assert len(read.logits_idx) == MOST_PROMPTS and int(read.logits_idx.max()) < num, "another graph's tokens"
        assert layout.host is not None and (layout.host.num_running, layout.host.varies) == (0, True)


def test_a_graph_runs_steps_with_just_its_arrays() -> None:
    """An array that a graph does not know would be lost without a word."""
    fixed = FixedInputs([Shape(4, 2, 100)], 5, ("input_ids", "positions", "slots", "visible", "adapters"), CPU)
    trees = Captured(None, fixed.of(Shape(4, 2, 100)))  # type: ignore[arg-type]
    fitting = inputs_of(3, 2, slots=True, visible=True)
    assert trees.fits(fitting)
    assert not trees.fits(inputs_of(3, 2)) and not trees.fits(replace(fitting, adapters=fitting.slots))
    layout = replace(fitting.layout, encoder_lens=torch.zeros(3, dtype=torch.int64))
    assert not trees.fits(replace(fitting, layout=layout))
