"""Forwards as graphs, on the virtual GPU: the streams are the CPU's, whatever order the waits allow."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from shared.config.load import load
from shared.config.processes import NodeProcessConfig
from shared.engine import buckets
from shared.engine.buckets import PROMPT_TOKENS
from shared.engine.graphs import FixedInputs, FixedOutputs, GraphRunner
from shared.kernel.attention.attention import TorchAttention
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.interface import ModelInputs
from shared.node.assembly.graph_spec import GRAPH_TOKENS, GraphSpec, graphs_of
from shared.node.records.core import NodeCore
from tests.support.cores.core_rig import Job, Outcome, assert_whole, run_local
from tests.support.gpus.cuda_core import KINDS, Kind, adapters_of, folder_of, make_core
from tests.support.gpus.cuda_jobs import jobs_for
from tests.support.virtual_gpu.blocks import Block
from tests.support.virtual_gpu.crossings import Counts
from tests.support.virtual_gpu.device import VirtualGpu, make_device

RETRACT_EVERY = 9
FREE_BYTES = 900_000  # less than the scores of 24 tokens in 9 rows


def runner_of(core: NodeCore) -> GraphRunner:
    assert core.graphs is not None
    return core.graphs


def run_graphs(
    gpu: VirtualGpu, kind: Kind, asked: list[Job], retract_every: int = 0
) -> tuple[Outcome, GraphRunner, Counts]:
    """The CPU's streams. No step is eager but those that have prompts beside running rows, or score many tokens."""
    plain = make_core(kind)
    expected = run_local(plain, asked, rng=random.Random(1))
    plain.close()
    core = make_core(kind, gpu, graphs=True)
    with gpu.counting() as counts:
        outcome = run_local(core, asked, retract_every=retract_every, rng=random.Random(1))
    assert_whole(core)
    core.close()
    assert outcome.streams == expected.streams
    assert all(end.error is None for end in outcome.ends.values())
    runner = runner_of(core)
    told = f"{outcome.num_steps} steps, {runner.graphed} by graphs, eager {dict(runner.eager)}: {counts.told()}"
    print(told)
    assert runner.graphed - runner.graphed_prompts > 3 and runner.graphed_prompts, told
    assert set(runner.eager) <= {"mixed", "scores"}, told
    assert counts.replays == runner.graphed == outcome.num_steps - runner.eager.total(), told
    return outcome, runner, counts


def asked_of(core_kind: Kind, num_jobs: int) -> list[Job]:
    """Each way to sample: penalties, log-probabilities, bias, bad words, early stops, filters."""
    digests = adapter_digests(core_kind)
    return jobs_for(core_kind, digests, num_jobs)


def adapter_digests(kind: Kind) -> tuple[str, ...]:
    if not kind.adapters:
        return ()
    core = make_core(kind)
    try:
        return tuple(core.settings.adapters.digests)
    finally:
        core.close()


@pytest.mark.parametrize("name", ["plain", "n-gram", "chain", "tree"])
def test_streams_are_the_cpu_s(name: str) -> None:
    """One replay a step, one copy up and one down; the host waits for nothing."""
    kind = KINDS[name]
    outcome, _, counts = run_graphs(make_device("eager"), kind, asked_of(kind, 5))
    assert (counts.syncs, counts.h2d_pageable) == (0, 0), counts.told()
    assert (counts.h2d_async, counts.d2h_async) == (outcome.num_steps, outcome.num_steps), counts.told()


@pytest.mark.parametrize("name", ["adapters", "grammars, n-gram", "exact lengths", "int8 KV"])
def test_other_kinds_are_the_cpu_s(name: str) -> None:
    """Adapters and grammars too: a graph ends at the logits, and knows nothing of what is sampled from them."""
    run_graphs(make_device("eager"), KINDS[name], asked_of(KINDS[name], 4))


@pytest.mark.parametrize(
    "name", ["plain", "n-gram", *(pytest.param(name, marks=pytest.mark.long) for name in ("chain", "tree"))]
)
def test_streams_are_the_cpu_s_in_any_order_that_the_waits_allow(name: str) -> None:
    """Retractions too. The host is steps ahead, and memory of graphs is overwritten as soon as it is free."""
    kind = KINDS[name]
    gpu = make_device("deferring", 11 + list(KINDS).index(name))
    run_graphs(gpu, kind, asked_of(kind, 3), RETRACT_EVERY)
    assert not gpu.races


def test_rows_that_grow_over_a_graph_s_length_take_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads no key behind its length: rows would lose what lies there."""
    monkeypatch.setattr(buckets, "MANY_ROWS", 1)
    monkeypatch.setattr(buckets, "SHORT_LENGTHS", (12, 37))
    kind, taken = KINDS["plain"], set()
    fill = FixedInputs.fill

    def look(self: FixedInputs, inputs: ModelInputs, read: ModelInputs) -> None:
        taken.add(read.layout.max_seq_len)
        fill(self, inputs, read)

    monkeypatch.setattr(FixedInputs, "fill", look)
    run_graphs(make_device("eager"), kind, asked_of(kind, 5))
    assert taken == {12, 37, 131}, taken


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5])
def test_padded_rows_change_nothing_of_the_others(num_rows: int) -> None:
    """3 rows in a graph of 4, 5 in one of 8: page 0, row 0 and what the pool holds of nobody may be anything."""
    kind = KINDS["chain"]
    gpu = make_device("eager")
    core, plain = make_core(kind, gpu, graphs=True), make_core(kind)
    with torch.inference_mode():
        core.pool.pages_bytes.fill_(0x7F)  # a NaN in every format
        for buffer in core.future_map.extras.values():
            buffer.fill_(float("nan") if buffer.is_floating_point() else 0)
    asked = asked_of(kind, num_rows)
    expected = run_local(plain, asked, rng=random.Random(1)).streams
    assert run_local(core, asked, rng=random.Random(1)).streams == expected
    assert runner_of(core).graphed
    for one in (core, plain):
        one.close()


def test_results_travel_while_the_next_graph_runs() -> None:
    """A device that moves only where somebody waits: in some order the next step's graph runs before the copy of the
    results. All streams are right, and torch's detector has nothing to say."""
    kind = KINDS["plain"]
    for seed in range(4):
        gpu = make_device("deferring", seed, laziness=1.0)
        run_graphs(gpu, kind, asked_of(kind, 1))
        assert not gpu.races


def num_places() -> int:
    gc.collect()
    return sum(type(one) in (FixedInputs, FixedOutputs) for one in gc.get_objects())


def test_where_no_capture_works_steps_run_eagerly(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator makes the host wait: that is said at start, and steps run eagerly and are counted. Places that no
    graph reads are free again."""
    kind, attend, before = KINDS["plain"], TorchAttention.attend, num_places()

    def waits(self: TorchAttention, layer: int, qkv: torch.Tensor, *norms: object) -> torch.Tensor:
        qkv[:1, :1].cpu()
        return attend(self, layer, qkv, *norms)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchAttention, "attend", waits)
    with caplog.at_level("WARNING"):
        core = make_core(kind, make_device("eager"), graphs=True)
    assert num_places() == before
    largest = "24 prompt tokens, 8 prompt tokens, 8 rows of 1 up to 131 tokens, 4 rows of 1 up to"
    assert f"no CUDA graphs for steps of {largest}" in caplog.text
    assert "tests/unit/shared/device/test_cuda_graphs.py:" in caplog.text
    runner = runner_of(core)
    run_local(core, asked_of(kind, 2), rng=random.Random(1))
    core.close()
    assert not runner.graphed and runner.eager["uncaptured"] > 3
    assert runner.totals()["eager.uncaptured"] == runner.eager["uncaptured"]


def test_where_memory_is_short_the_smaller_graphs_stay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest does not fit, and nothing of it is left. All others are captured; steps of its size run eagerly."""
    kind, new_block = KINDS["plain"], VirtualGpu.new_block

    def short(self: VirtualGpu, num_bytes: int) -> Block:
        """Capturing needs memory beside what lies in the cache."""
        cached = sum(block.num_bytes for blocks in self._free.values() for block in blocks)
        if self.captures.current is not None and cached + num_bytes > FREE_BYTES:
            raise torch.OutOfMemoryError("CUDA out of memory, as the test says")
        return new_block(self, num_bytes)

    plain = make_core(kind)
    small, _, large = asked_of(kind, 3)
    expected = [run_local(plain, [job]).streams for job in (small, large)]
    plain.close()
    monkeypatch.setattr(VirtualGpu, "new_block", short)
    with caplog.at_level("WARNING"):
        core = make_core(kind, make_device("eager"), graphs=True)
    assert "no CUDA graphs for steps of 24 prompt tokens: CUDA out of memory" in caplog.text
    assert [run_local(core, [job]).streams for job in (small, large)] == expected
    core.close()
    runner = runner_of(core)
    assert (runner.graphed_prompts, dict(runner.eager)) == (1, {"uncaptured": 1}) and runner.graphed > 3


def test_the_flag_says_what_is_captured() -> None:
    """On a GPU, of nodes that decode, unless it is off; of adaptive windows three widths."""
    gpu, model = make_device("eager"), load_model("hashlm")

    def asked(role: str = "decode", flag: str = "auto", **spec: object) -> GraphSpec | None:
        given = {"model": {"model": "hashlm"}, "sched": {"cuda_graphs": flag}, "spec": spec}
        return graphs_of(load(NodeProcessConfig, given, fixed={"node": {"role": role}}).parts, gpu, model)

    assert asked() == GraphSpec(gpu, (1,), GRAPH_TOKENS)
    assert asked(spec="ngram", spec_width=8, spec_adaptive=True) == GraphSpec(gpu, (1, 4, 8), GRAPH_TOKENS)
    assert asked(role="prefill") is None and asked(flag="off") is None
    assert graphs_of(load(NodeProcessConfig, {}, fixed={"node": {"role": "decode"}}).parts, None, model) is None


def test_graphs_read_whole_texts_if_attention_has_device_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only then prompts have graphs. A prefill node has no others."""
    gpu, parts = make_device("eager"), load(NodeProcessConfig, {}, fixed={"node": {"role": "decode"}}).parts
    folder = str(folder_of("draft target"))
    model = load_model(folder, LoadOptions("float32", kernels="torch"))
    prefill = load(NodeProcessConfig, {}, fixed={"node": {"role": "prefill"}}).parts
    assert graphs_of(parts, gpu, model) == GraphSpec(gpu, (1,), GRAPH_TOKENS)
    assert graphs_of(prefill, gpu, model) is None
    monkeypatch.setattr(TorchAttention, "gathers", False)
    adapted = load_model(folder, LoadOptions("float32", kernels="torch", adapters=adapters_of("draft target")))
    for one in (model, adapted):
        assert graphs_of(parts, gpu, one) == GraphSpec(gpu, (1,), one.spec.max_context, prompts=PROMPT_TOKENS)
        assert graphs_of(prefill, gpu, one) == GraphSpec(gpu, (), one.spec.max_context, prompts=PROMPT_TOKENS)
