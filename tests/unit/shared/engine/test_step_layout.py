"""A step's layout: every array of it goes where the step goes."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import torch

from shared.engine.forward_batch import host_lengths
from shared.engine.step_arrays import NOTHING, step_arrays
from shared.kernel.code.step_layout import PER_ROW, HostLengths, Layout, equal_bounds
from tests.support.cores.verify_steps import make_plan

BATCH = 4


def full() -> Layout[np.ndarray]:
    """Two page groups, and no array is missing."""
    tables = tuple(np.arange(BATCH * 2, dtype=np.int32).reshape(BATCH, 2) + first for first in (1, 50))
    own = {name: np.arange(BATCH) + 10 * nth for nth, name in enumerate(PER_ROW, start=1)}
    return Layout(equal_bounds(BATCH, 1), tables, 1, 60, **own)


def test_a_full_layout_has_all_fields() -> None:
    assert all(getattr(full(), one.name) is not None for one in fields(Layout) if one.name != "host")
    assert full().arrays().keys() == {"cu_q_lens", "page_table_0", "page_table_1", *PER_ROW}


def test_every_array_reaches_the_device() -> None:
    plan = replace(make_plan([5] * BATCH, 1, []), layout=full())
    host = step_arrays(plan, NOTHING)
    sent = {name: torch.from_numpy(array.copy()) for name, array in host.named().items()}
    device = host.on_device(sent, host_lengths(plan)).layout
    assert device.host is not None and (device.max_q_len, device.max_seq_len) == (1, 60)
    assert {name: one.tolist() for name, one in device.arrays().items()} == {
        n: a.tolist() for n, a in full().arrays().items()
    }
    assert all(isinstance(one, torch.Tensor) for one in device.arrays().values())


def test_a_part_has_its_rows_of_every_array() -> None:
    host = HostLengths(equal_bounds(2, 3), None, 2)
    part = full().part(slice(1, 3), cu_q_lens=equal_bounds(2, 3), max_q_len=3, host=host)
    assert part.cu_q_lens.tolist() == [0, 3, 6] and (part.max_q_len, part.max_seq_len, part.host) == (3, 60, host)
    for name in part.arrays().keys() - {"cu_q_lens"}:
        assert np.array_equal(part.arrays()[name], full().arrays()[name][1:3])
