"""A frozen step: values only, copies of its own; and the batch that is made of it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.engine.forward_batch import ForwardBatch
from shared.engine.lease import StepLease
from shared.engine.plan import Admission, HistorySeed, RowId, ScoreShare, StepPlan
from shared.kernel.attention.attention import rows_alone
from shared.kernel.code.step_layout import Layout
from shared.model.hashlm.model import HashLM
from shared.node.records.core import NodeCore
from shared.sample.interface import SamplingBatch
from tests.support.cores.core_rig import CoreKnobs, assert_streams, draw_jobs, make_core, run_local
from tests.support.cores.steps import plans_of
from tests.support.cores.verify_steps import new_batch

FROZEN = (StepPlan, Admission, HistorySeed, Layout, SamplingBatch, ScoreShare)
VALUES = (int, float, str, bytes, bool, type(None), np.integer)


def walk(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Everything reachable from a plan, with the way to it; anything that is not a value is an error."""
    yield path, value
    if isinstance(value, FROZEN):
        assert value.__dataclass_params__.frozen, path  # type: ignore[union-attr]
        for field in dataclasses.fields(value):
            yield from walk(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple):
        assert type(value) in (tuple, RowId, RequestKey), f"{path} is a {type(value)}"
        for i, item in enumerate(value):
            yield from walk(item, f"{path}[{i}]")
    elif isinstance(value, np.ndarray):
        assert value.dtype != object, f"{path} holds objects"
    else:
        assert isinstance(value, (*VALUES, torch.Tensor)), f"{path} is a {type(value)}: not a value"


@pytest.mark.rule("S8")
@pytest.mark.parametrize("width", [1, 4])
def test_a_plan_holds_values_only(width: int) -> None:
    """Frozen is shallow: a Request in a plan would let a closure read what the scheduler changes meanwhile."""
    core = make_core(CoreKnobs(width=width, num_pages=60))
    plans, rng = plans_of(core), random.Random(width)
    run_local(core, draw_jobs(rng, 20), retract_every=5, rng=rng)
    assert any(plan.num_prefill and plan.num_prefill < plan.batch_size for plan in plans), "no mixed step was seen"
    assert any(plan.history_seeds for plan in plans)
    for plan in plans:
        assert not any(isinstance(value, Request) for _, value in walk(plan, f"plan {plan.step}"))
        per_row = (plan.row_ids, plan.q_lens, plan.emits, plan.sampling, plan.seq_lens_cpu)
        assert len({len(values) for values in per_row}) == 1


def init_new(plan: StepPlan, core: NodeCore) -> ForwardBatch:
    return new_batch(plan, core.future_map)


@pytest.mark.rule("S1", "Rg")
def test_seq_lens_sum_is_computed_here_and_needs_host_lengths() -> None:
    """Regression (g), S1: the sum belongs to the ForwardBatch; with bounds only there is none, and nobody reads it."""
    core = make_core(CoreKnobs(width=4))
    plans = plans_of(core)
    run_local(core, draw_jobs(random.Random(5), 4))
    exact = [plan for plan in plans if not plan.lengths_relayed]
    bounds = [plan for plan in plans if plan.lengths_relayed]
    assert exact and bounds
    for plan in exact:
        assert init_new(plan, core).seq_lens_sum == sum(plan.seq_lens_cpu.tolist())
    assert init_new(bounds[0], core).seq_lens_sum is None


class Counted(np.ndarray):
    """Counts its sums, and those of its parts."""

    num_sums = 0

    def sum(self, *args: object, **more: object) -> np.int64:  # type: ignore[override]
        Counted.num_sums += 1
        return np.asarray(self).sum()  # type: ignore[no-any-return]


@pytest.mark.rule("S1")
@pytest.mark.parametrize("resolved", [False, True])
def test_lengths_are_summed_once_and_only_if_attention_asks(resolved: bool) -> None:
    """sgl-project/sglang#25818 asks for this. `resolved`: with drafts, the host has waited for the lengths (S6)."""
    core = make_core(CoreKnobs(width=4 if resolved else 1, needs_cpu_seq_lens=resolved))
    launch, lengths = core.engine.launch, list[np.ndarray]()

    def counted(plan: StepPlan) -> StepLease:
        lengths.append(plan.seq_lens_cpu.view(Counted))
        return launch(dataclasses.replace(plan, seq_lens_cpu=lengths[-1]))

    core.engine.launch = counted  # type: ignore[method-assign]
    Counted.num_sums = 0
    plans = plans_of(core)
    run_local(core, draw_jobs(random.Random(5), 4))
    assert len(lengths) > 3 and not any(plan.lengths_relayed for plan in plans)
    assert not Counted.num_sums, "HashLM's attention asks for no sum"
    plan = dataclasses.replace(plans[-1], seq_lens_cpu=lengths[-1])
    assert plan.num_prefill == 0
    inputs = init_new(plan, core).inputs.for_attention()
    asked = [rows_alone(inputs) for _ in range(3)]
    assert Counted.num_sums == 1 and len(set(asked)) == 1, "once for all layers"
    host = inputs.layout.host
    assert host is not None and host.seq_lens_sum == int(np.asarray(plan.seq_lens_cpu).sum()) > 0


@pytest.mark.rule("S8", "I1")
def test_making_and_running_a_batch_leaves_its_plan_unchanged() -> None:
    """S8, I1: a plan is bit-identical from its freezing to the end. The lengths of what is in flight are not known when
    it is frozen, so a forward that wrote them there would change it: on a CPU its arrays are the forward's tensors."""
    core = make_core(CoreKnobs("simulated", width=4, chunk_size=8, seed=3))
    plans, frozen = plans_of(core), []
    launch = core.engine.launch

    def freeze(plan: StepPlan):  # noqa: ANN202
        frozen.append([(path, _copied(value)) for path, value in walk(plan, "plan")])
        return launch(plan)

    core.engine.launch = freeze  # type: ignore[method-assign]
    run_local(core, draw_jobs(random.Random(8), 6))
    assert len(frozen) == len(plans) > 10
    for plan, before in zip(plans, frozen, strict=True):
        for (path, old), (_, new) in zip(before, walk(plan, "plan"), strict=True):
            same = np.array_equal(old, new) if isinstance(old, np.ndarray | torch.Tensor) else old is new or old == new
            assert same, f"{path} of step {plan.step} changed"


def _copied(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def test_mixed_steps_list_chunks_first_and_name_the_decode_tail() -> None:
    core = make_core(CoreKnobs(chunk_size=8))
    plans = plans_of(core)
    run_local(core, draw_jobs(random.Random(3), 8))
    mixed = [plan for plan in plans if 0 < plan.num_prefill < plan.batch_size]
    assert mixed
    for plan in mixed:
        assert plan.mix_running_indices.tolist() == plan.req_pool_indices[plan.num_prefill :].tolist()
        assert (plan.expect_step[: plan.num_prefill] == -1).all() and (plan.expect_step[plan.num_prefill :] > 0).all()
        assert plan.prefill_input_ids_cpu is not None
        assert plan.prefill_input_ids_cpu.numel() == plan.q_lens[: plan.num_prefill].sum()
        assert int((plan.q_lens + plan.seq_lens_cpu).max()) <= plan.layout.max_seq_len


@pytest.mark.rule("S10")
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_mode_takes_the_same_path(overlap: bool, width: int) -> None:
    """S10: relay, plans and the forward stream are there without overlap and without speculation too."""
    core = make_core(CoreKnobs(overlap=overlap, width=width))
    labels = []
    launch = core.streams.forward.launch
    core.streams.forward.launch = lambda fn, fires=(), label="": (labels.append(label), launch(fn, fires, label))[1]  # type: ignore[method-assign]
    plans = plans_of(core)
    run_local(core, draw_jobs(random.Random(2), 3))
    assert labels == [f"{what}({plan.step})" for plan in plans for what in ("forward", "sample")]
    assert (core.future_map.written_by >= 0).any() and all(plan.emits[plan.num_prefill :].all() for plan in plans)


def test_a_model_s_attention_says_that_it_needs_exact_lengths() -> None:
    """A capability, not a setting: no flag and no file names it."""
    model = HashLM(max_context=512)
    assert not make_core(CoreKnobs(width=4), model=model).settings.needs_cpu_seq_lens
    model.spec = dataclasses.replace(model.spec, needs_cpu_seq_lens=True)
    core = make_core(CoreKnobs("simulated", width=4, chunk_size=16), model=model)
    plans = plans_of(core)
    jobs = draw_jobs(random.Random(3), 4, max_prompt=40)
    assert_streams(jobs, run_local(core, jobs))
    assert plans and not any(plan.lengths_relayed for plan in plans)
