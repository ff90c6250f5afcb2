"""FlashInfer's attention on the virtual GPU, by a fake with its signatures: plans, streams, and who takes it."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config.load import load
from shared.config.processes import NodeParts, NodeProcessConfig
from shared.core.errors import ConfigError
from shared.device.passed_checks import remember
from shared.kernel.attention import flash_check
from shared.kernel.attention.attention import AttentionShape
from shared.kernel.attention.flash_check import MOST_DIFFERENCE, compare_attention
from shared.kernel.attention.flash_infer import LibraryAttention
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.node.assembly.attention_choice import library_attention
from shared.node.assembly.fingerprint import difference, make_fingerprint
from shared.node.records.core import NodeCore
from tests.support.cores.core_rig import Job, assert_whole, run_local
from tests.support.gpus import fake_flashinfer
from tests.support.gpus.cuda_core import KINDS, Kind, folder_of, make_core
from tests.support.gpus.cuda_jobs import jobs_for
from tests.support.gpus.fake_flashinfer import VERSION, library_on
from tests.support.virtual_gpu.crossings import Counts
from tests.support.virtual_gpu.device import make_device

RETRACT_EVERY, TOKENS = 9, 5


def kind_of(name: str) -> Kind:
    return replace(KINDS[name], flashinfer=True)


def asked_of(kind: Kind, num_jobs: int) -> list[Job]:
    """Short answers: chunks, mixed steps and decode steps are all there."""
    asked = jobs_for(kind, (), num_jobs)
    return [replace(job, sampling=replace(job.sampling, max_tokens=TOKENS, min_tokens=0)) for job in asked]


@cache
def reference(kind: Kind, num_jobs: int) -> dict[str, list[int]]:
    """The streams of our own attention. Makes a device."""
    core = make_core(kind, make_device("eager"))
    streams: dict[str, list[int]] = run_local(core, asked_of(kind, num_jobs), rng=random.Random(1)).streams
    core.close()
    return streams


def run_on(mode: str, kind: Kind, *, graphs: bool, num_jobs: int = 2, seed: int = 3) -> tuple[Any, NodeCore, Counts]:
    """Streams are those of our own attention, with retractions, and no step failed. Return the library, too."""
    expected = reference(replace(kind, flashinfer=False), num_jobs)
    gpu = make_device(mode, seed, laziness=1.0)
    with library_on(gpu) as library:
        core = make_core(kind, gpu, graphs=graphs, max_running=2)
        with gpu.counting() as counts:
            outcome = run_local(core, asked_of(kind, num_jobs), retract_every=RETRACT_EVERY, rng=random.Random(1))
        assert library.wrong == []
        assert_whole(core)
        core.close()
    assert outcome.streams == expected
    assert core.loop.num_failed_steps == 0 and not gpu.races
    assert all(end.error is None for end in outcome.ends.values())
    return library, core, counts


@pytest.mark.parametrize(
    ("name", "graphs"),
    [("plain", True), ("chain", True), ("plain", False), pytest.param("n-gram", False, marks=pytest.mark.long)],
)
def test_streams_are_our_own_in_any_order_that_waits_allow(name: str, graphs: bool) -> None:
    """Copies read pinned memory late: the schedule of another plan would be seen. Drafts need exact lengths."""
    library, core, _ = run_on("deferring", kind_of(name), graphs=graphs)
    assert core.settings.needs_cpu_seq_lens
    kinds = {(type(one).__name__[:11], one.is_graph) for one in library.made if one.num_plans > 1}
    assert ("BatchPrefil", False) in kinds
    assert ("BatchDecode" if core.settings.width == 1 else "BatchPrefil", graphs) in kinds
    if graphs:
        assert core.graphs is not None and core.graphs.graphed > 3 and core.graphs.eager.keys() <= {"prompts", "mixed"}


def test_the_host_waits_for_copies_of_plans_alone() -> None:
    _, _, counts = run_on("eager", kind_of("plain"), graphs=True)
    assert counts.syncs == 0 and counts.h2d_pageable == 0, counts.told()
    waits = {place.split(":")[0].removeprefix("waits ") for place in counts.by_place if place.startswith("waits")}
    plans = "shared/kernel/attention/flash_infer.py"
    assert plans in waits and waits <= {plans, "shared/device/cuda.py", "shared/engine/graphs.py"}, waits


def test_trees_are_attended_by_our_own_kernels() -> None:
    library, _, _ = run_on("eager", kind_of("tree"), graphs=True)
    assert [one for one in library.made if one.num_plans] and not any(one.is_graph for one in library.made)


# Plans


def test_a_plan_has_the_library_s_arrays() -> None:
    """Full pages have a last page of 16 tokens, not of 0. A graph's padding rows have their window in page 0."""
    gpu = make_device()
    shape = AttentionShape(4, 2, 64, 1e-5)
    rows = flash_check.TrialRows((20, 15, 31), (13, 1, 1), 2)
    with library_on(gpu) as library, torch.inference_mode():
        trial = flash_check.AttentionTrial(gpu, gpu.device, shape, torch.float32)
        assert trial.difference(rows, trial.inputs(rows)) < 1e-6
        chunks, decode = library.made
        assert on(chunks.buffers) == {"qo": [0, 13], "indptr": [0, 3], "last": [1], "indices": pages(trial, 3)}
        both = pages(trial, 0, 1, 2)
        assert on(decode.buffers) == {"indptr": [0, 1, 3], "last": [16, 16], "indices": both}
        assert not decode.use_tensor_cores and chunks.ints is not decode.ints and chunks.floats is decode.floats
        with gpu.use_stream(gpu.new_stream(gpu.device)):
            list(trial.replayed(4))
        graph = library.made[-1]
        fixed = on(graph.buffers)
        assert (fixed["qo"], fixed["indptr"], fixed["last"]) == ([0, 4, 8, 12, 16], [0, 3, 4, 5, 6], [3, 4, 4, 4])
        assert fixed["indices"][3:6] == [0, 0, 0] and graph.is_graph


def on(buffers: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: buffer.cpu().tolist() for name, buffer in buffers.items()}


def pages(trial: Any, *counts: int) -> list[int]:
    """The first pages of the trial's rows, so many of each."""
    table = trial._order.view(flash_check.GRAPH_ROWS, -1).tolist()
    return [page for row, num in zip(table, counts, strict=False) for page in row[:num]]


def test_the_comparison_sees_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = make_device()
    with library_on(gpu):
        assert compare_attention(gpu, gpu.device) <= MOST_DIFFERENCE
        real = fake_flashinfer.causal
        monkeypatch.setattr(fake_flashinfer, "causal", lambda q, k, v, scale: real(q, k, v, scale * 1.2))
        assert compare_attention(gpu, gpu.device) > MOST_DIFFERENCE


# Who takes it


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield


def parts_of(attention: str, **changes: Any) -> NodeParts:
    changes["sched"] = {"attention": attention} | changes.get("sched", {})
    given = {"model": {"model": "hashlm"}, **changes}
    return load(NodeProcessConfig, given, fixed={"node": {"role": "decode"}}).parts


@pytest.mark.usefixtures("own_cache")
def test_auto_takes_it_once_its_check_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = make_device()
    assert library_attention(parts_of("baton"), gpu) is None and library_attention(parts_of("auto"), None) is None
    with monkeypatch.context() as missing:
        missing.setattr(importlib.util, "find_spec", lambda name: None)
        found = library_attention(parts_of("auto"), gpu)
        assert found is not None and found.refused.startswith("FlashInfer's, which may be faster, needs the package")
        assert "to install it, type: " in found.refused and "[gpu]" in found.refused
        with pytest.raises(ConfigError, match="--attention flashinfer needs the package flashinfer; to install it"):
            library_attention(parts_of("flashinfer"), gpu)
    with library_on(gpu):
        found = library_attention(parts_of("auto"), gpu)
        assert found is not None and "baton doctor --gpu" in found.refused
        asked = library_attention(parts_of("flashinfer"), gpu)
        assert asked == LibraryAttention(VERSION, gpu, is_asked=True)
        remember("flashinfer 0.6.0", gpu, True)
        assert (found := library_attention(parts_of("auto"), gpu)) is not None and found.refused
        remember(f"flashinfer {VERSION}", gpu, True)
        assert library_attention(parts_of("auto"), gpu) == LibraryAttention(VERSION, gpu)


def test_with_deterministic_steps_no_node_takes_it() -> None:
    gpu, changes = make_device(), {"sched": {"deterministic": True}}
    found = library_attention(parts_of("auto", **changes), gpu)
    assert found is not None and "--deterministic" in found.refused
    with pytest.raises(ConfigError, match="--deterministic"):
        library_attention(parts_of("flashinfer", **changes), gpu)


def test_a_node_with_draft_trees_takes_it_as_its_peers_do() -> None:
    """Its prompts and plain steps have the library's attention. Otherwise it would not fit a prefill node."""
    gpu, changes = make_device(), {"spec": {"spec": "eagle", "spec_topk": 2}}
    assert library_attention(parts_of("auto", **changes), gpu) == library_attention(parts_of("auto"), gpu)


def test_on_a_cpu_it_can_t_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="this node computes on the CPU"):
        library_attention(parts_of("flashinfer"), None)


def test_models_that_it_does_not_suit_keep_our_own(caplog: pytest.LogCaptureFixture) -> None:
    """Nodes that attend differently don't pair."""
    gpu, folder = make_device(), str(folder_of("draft target"))
    allowed, by_name = LibraryAttention(VERSION, gpu), LibraryAttention(VERSION, gpu, is_asked=True)
    options = LoadOptions("float32", kernels="torch", attention=allowed)
    with caplog.at_level("INFO"):
        ours = load_model(folder, options, str(gpu.device))
    assert "attention is Baton's own: FlashInfer has no kernels for torch.float32" in caplog.text
    with pytest.raises(ConfigError, match="--attention flashinfer: FlashInfer has no kernels"):
        load_model(folder, replace(options, attention=by_name), str(gpu.device))
    with library_on(gpu):
        windowed = str(folder_of("gemma3"))
        with pytest.raises(ConfigError, match="a plan for every window"):
            load_model(windowed, replace(options, attention=by_name), str(gpu.device))
        refused = replace(options, attention=replace(allowed, refused="not checked"))
        assert load_model(folder, refused, str(gpu.device)).spec == ours.spec
        theirs = load_model(folder, options, str(gpu.device))
        newer = load_model(folder, replace(options, attention=replace(allowed, version="9")), str(gpu.device))
    prints = [make_fingerprint(model.spec, model.kv_planes(16), 16, None, "") for model in (ours, theirs, newer)]
    assert f"attention of flashinfer {VERSION}" in difference(prints[0], prints[1])
    assert difference(prints[1], prints[2]) and theirs.spec.needs_cpu_seq_lens and not ours.spec.needs_cpu_seq_lens
