"""Plans and batches of verify steps, as the scheduler would freeze them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from shared.core.keys import RequestKey
from shared.core.sampling_params import SamplingParams
from shared.engine.boundary import SameMemory
from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.engine.plan import RowId, StepPlan
from shared.kernel.code.step_layout import Layout
from shared.sample.interface import SamplingBatch

PLAIN = SamplingParams(9)


def make_plan(
    committed: list[int],
    width: int,
    chunks: list[int],
    page_size: int = 16,
    sampling: SamplingParams = PLAIN,
) -> StepPlan:
    """Rows of chunks (the last of which ends its prompt), then decode rows."""
    num, first = len(chunks) + len(committed), len(chunks)
    lengths = np.asarray([3] * first + committed, np.int64)
    most = int(lengths.max()) + max([width, *chunks])
    per_row = -(-most // page_size)
    q_lens = np.asarray(chunks + [width] * len(committed), np.int32)
    bounds = np.concatenate([[0], q_lens.cumsum()]).astype(np.int32)
    table = 1 + np.random.default_rng(num).permutation(num * per_row).astype(np.int32).reshape(num, per_row)
    return StepPlan(
        step=1,
        row_ids=tuple(RowId(RequestKey("r", 1, str(i), 0, 0), 0) for i in range(num)),
        req_pool_indices=np.arange(1, num + 1),
        seq_lens_cpu=lengths,
        lengths_relayed=False,
        q_lens=q_lens,
        num_prefill=first,
        layout=Layout(bounds, (table,), int(q_lens.max()), most),
        prefill_input_ids_cpu=None,
        next_prompt_ids=np.asarray([7] * (first - 1) + [-1] * (first > 0), np.int64),
        emits=np.asarray([False] * (first - 1) + [True] * (first > 0) + [True] * len(committed)),
        expect_step=np.full(num, -1),
        sampling=SamplingBatch.build([sampling] * num, list(range(num)), [1] * num),
        history_rows=np.ones(num, np.bool_),
        history_seeds=(),
        width=width,
        adapters=np.zeros(num, np.int64),
    )


class NoLease:
    """Has no prompt tokens and no slots."""

    def take_staging(self) -> torch.Tensor:
        return torch.zeros(0, dtype=torch.int64)

    def hold(self, give_back: Callable[[], None]) -> None:
        give_back()


def new_batch(plan: StepPlan, future_map: FutureMap, vocab_size: int = 1000) -> ForwardBatch:
    """The plan on the CPU, with room for its tokens."""
    fb = ForwardBatch.init_new(plan, NoLease(), future_map, SameMemory(), vocab_size)
    fb.inputs.input_ids = torch.zeros(len(fb.host.token_rows), dtype=torch.int64)
    return fb


def make_batch(plan: StepPlan) -> ForwardBatch:
    fb = new_batch(plan, FutureMap(plan.batch_size + 1, 200))
    fb.inputs.input_ids = torch.arange(1000, 1000 + len(fb.inputs.input_ids))
    return fb
