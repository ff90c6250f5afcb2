"""A step's rows shared out among ranks: the streams of one rank, also while some ranks have no rows at all."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.kernel.code.step_layout import HostLengths, Layout
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.hashlm.model import HashLM
from shared.model.loading.load import load_model
from shared.model.math.interface import AdapterSpec, LayerMarks, Model, ModelInputs, ModelOutput
from shared.ranks.dp import deal
from shared.ranks.tp import inputs_of, order_of
from tests.support.cores.core_rig import (
    MAX_CONTEXT,
    CoreKnobs,
    assert_streams,
    assert_whole,
    draw_jobs,
    make_core,
    run_local,
    some_follow_grammars,
)
from tests.support.cores.tp_rig import Team, followers
from tests.support.models.tiny_llama import write_tiny_llama

KNOBS = {
    "plain": CoreKnobs(chunk_size=16, num_pages=60),
    "threads": CoreKnobs(chunk_size=16, num_pages=60, backend="cpu"),
    "n-gram": CoreKnobs(chunk_size=16, num_pages=60, spec="ngram", width=4),
    "adapters": CoreKnobs(chunk_size=16, num_pages=60, adapters=("blue", "green")),
    "tree": CoreKnobs(chunk_size=16, num_pages=60, width=7, topk=2, steps=2),
}


class Counting(HashLM):
    """Counts the forwards of one rank, and all that have no tokens."""

    def __init__(self, name: int, counts: Counter, adapters: tuple[str, ...] = ()) -> None:
        own = tuple(AdapterSpec(adapter, adapter) for adapter in adapters)
        super().__init__(max_context=MAX_CONTEXT, adapters=own)
        self._name, self._counts = name, counts

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        self._counts[self._name] += 1
        self._counts["empty"] += not len(inputs.input_ids)
        return super().forward(inputs, kv)


def run(team: Team, knobs: CoreKnobs, num_jobs: int, size: int) -> None:
    rng = random.Random(size)
    jobs = some_follow_grammars(draw_jobs(rng, num_jobs, max_prompt=60))
    jobs = [replace(job, adapter=rng.choice(["", *knobs.adapters])) for job in jobs]
    core = make_core(knobs, model=team.model, ranks=team.ranks)  # type: ignore[arg-type]
    team.share(core.pool)
    try:
        outcome = run_local(core, jobs, retract_every=9, rng=rng)
        assert_streams(jobs, outcome)
        assert_whole(core)
    finally:
        core.close()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
def test_hashlm_streams_are_the_oracles(size: int, knobs: CoreKnobs) -> None:
    counts: Counter = Counter()
    with followers(size, lambda group: Counting(group.rank, counts, knobs.adapters), by_rows=True) as team:
        run(team, knobs, 16, size)  # prompts wait for common prefixes: few rows at a time
    assert all(counts[rank] > 10 for rank in range(size)) and not counts["empty"], counts


@pytest.mark.rule("H28")
def test_a_rank_without_rows_is_idle_and_in_step() -> None:
    """One request at a time: whoever comes first has it, the others are told of every step and run none."""
    counts: Counter = Counter()
    with followers(3, lambda group: Counting(group.rank, counts), by_rows=True) as team:
        run(team, replace(KNOBS["plain"], max_running=1), 3, 1)
    assert counts[0] > 10 and counts[1] == counts[2] == 0


def step_of(q_lens: list[int], wanted: list[int]) -> ModelInputs:
    bounds = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    total = int(bounds[-1])
    return ModelInputs(
        input_ids=torch.arange(total),
        positions=torch.arange(total) + 100,
        layout=Layout(
            cu_q_lens=torch.from_numpy(bounds),
            page_tables=(torch.arange(len(q_lens) * 2, dtype=torch.int32).view(-1, 2),),
            max_q_len=max(q_lens),
            max_seq_len=200,
            encoder_lens=torch.arange(len(q_lens)) + 500,
        ),
        logits_idx=torch.tensor(wanted, dtype=torch.int64),
        slots=torch.arange(total) + 300,
        visible=torch.arange(total) + 400,
        adapters=torch.arange(total) % 3,
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("q_lens", [[1], [7, 1, 1, 1], [1, 1, 1, 1], [3, 9], [1] * 9])
def test_every_row_and_output_is_dealt_once_and_in_order(size: int, q_lens: list[int]) -> None:
    wanted = [*range(1, sum(q_lens), 2)]
    inputs = step_of(q_lens, wanted)
    parts = deal(inputs, size)
    assert len(parts) == size and len(parts[0].input_ids) > 0
    assert {*inputs.per_token()} == {"input_ids", "positions", "slots", "visible", "adapters"}
    for name, whole in inputs.per_token().items():
        assert torch.equal(torch.cat([part.per_token()[name] for part in parts]), whole)
    for name, whole in (inputs.layout.per_row() | {"page_table_0": inputs.layout.page_table}).items():
        assert torch.equal(torch.cat([part.layout.arrays()[name] for part in parts]), whole)
    starts = np.cumsum([0, *(len(part.input_ids) for part in parts)])
    moved = [int(i) + start for part, start in zip(parts, starts[:-1], strict=True) for i in part.logits_idx]
    assert moved == wanted
    for part in parts:
        bounds = part.layout.cu_q_lens
        assert bounds[0] == 0 and bounds[-1] == len(part.input_ids)
        assert len(bounds) == len(part.layout.page_table) + 1
    if q_lens == [1] * 9 and size == 3:
        assert [len(part.input_ids) for part in parts] == [3, 3, 3]


def test_llama_streams_are_those_of_one_rank(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "llama")
    torch.set_num_threads(1)

    def load(_: object = None) -> Model:
        return load_model(str(folder), LoadOptions("float32", max_context=MAX_CONTEXT))

    def streams(model: Model, team: Team | None) -> dict[str, list[int]]:
        jobs = draw_jobs(random.Random(5), 8, None, 40)
        core = make_core(KNOBS["threads"], model=model, ranks=team.ranks if team else None)  # type: ignore[arg-type]
        if team is not None:
            team.share(core.pool)
        try:
            return dict(run_local(core, jobs, retract_every=7, rng=random.Random(3)).streams)
        finally:
            core.close()

    expected = streams(load(), None)
    with followers(2, load, by_rows=True) as team:
        assert streams(team.model, team) == expected


def same(ours: object, theirs: object) -> bool:
    if isinstance(ours, Layout) and isinstance(theirs, Layout):
        return all(same(getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(Layout))
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return all(same(*pair) for pair in zip(ours, theirs, strict=True))
    if isinstance(ours, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return ours == theirs


def test_every_field_of_a_forward_s_inputs_is_sent() -> None:
    """A new one that was forgotten would be missing on all ranks but the first, and nobody would be told."""
    inputs = step_of([3, 1, 1], [2, 3, 4])
    known = replace(inputs.layout, host=HostLengths(np.zeros(1, np.int32), None, 1))
    whole = replace(inputs, layers=LayerMarks([1]), layout=known)
    got = inputs_of(order_of(whole))  # without marks, which tell who waits on the first rank, and what that host knows
    assert [f.name for f in fields(ModelInputs) if not same(getattr(got, f.name), getattr(inputs, f.name))] == []
    bare = inputs_of(order_of(replace(inputs, slots=None, visible=None, adapters=None)))
    assert bare.slots is None and bare.visible is None and bare.adapters is None


def test_one_part_is_all_of_every_field() -> None:
    inputs = step_of([3, 1, 1], [2, 3, 4])
    (part,) = deal(inputs, 1)
    assert [f.name for f in fields(ModelInputs) if not same(getattr(part, f.name), getattr(inputs, f.name))] == []
