"""Models that the library transformers runs, on the virtual GPU: the CPU's streams, graphs, and no wait."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.core.errors import ConfigError
from shared.device.gpu import MemoryInfo
from shared.engine.graphs import GraphRunner
from shared.kernel.product import experts
from shared.model.formats.opened import LoadOptions
from shared.model.library.attend.layer_places import LayerShape
from shared.model.loading.load import load_model, why_on_cpu
from shared.node.assembly.graph_spec import why_not_captured
from tests.support.cores.core_rig import Outcome, assert_whole, run_local
from tests.support.gpus import cuda_core
from tests.support.gpus.cuda_core import Kind, folder_of, make_core
from tests.support.gpus.cuda_jobs import jobs_for
from tests.support.models.library_families import save
from tests.support.virtual_gpu import operators
from tests.support.virtual_gpu.crossings import Counts
from tests.support.virtual_gpu.device import VirtualGpu, make_device

QUICK = ("gemma2", "qwen3_moe", "glm_moe_dsa")
# Windows in some layers, softcaps, sinks, values of another size than keys, experts, partial rotation,
# indexers, two calls, chunks.
FAMILIES = (
    *(*QUICK, "llama", "qwen3", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "glm4", "phi"),
    *("diffllama", "llama4_text"),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def kind_of(family: str, **more: Any) -> Kind:
    return Kind(family, library=True, **more)


@pytest.fixture
def wide_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has a product of experts in float32, because in bfloat16 random experts are nearly tied."""
    monkeypatch.setattr(experts, "GROUPED_IN", {"float32"})
    monkeypatch.setattr(operators, "GROUPED", {torch.float32})


def run_both(kind: Kind, gpu: VirtualGpu, retract_every: int = 0) -> tuple[Outcome, GraphRunner, Counts]:
    """Assert that the device's streams are the CPU's."""
    asked = jobs_for(kind, (), 4)
    plain = make_core(kind)
    expected = run_local(plain, asked, rng=random.Random(1))
    plain.close()
    core = make_core(kind, gpu, graphs=True)
    with gpu.counting() as counts:
        outcome = run_local(core, asked, retract_every=retract_every, rng=random.Random(1))
    assert_whole(core)
    runner = core.graphs
    core.close()
    assert runner is not None
    assert outcome.streams == expected.streams
    assert all(end.error is None for end in outcome.ends.values())
    print(f"{outcome.num_steps} steps, {runner.graphed} by graphs, eager {dict(runner.eager)}: {counts.told()}")
    return outcome, runner, counts


def assert_silent(outcome: Outcome, runner: GraphRunner, counts: Counts) -> None:
    """Assert that steps without prompts were replays, and that the host waited in none of all steps."""
    assert runner.graphed > 3 and runner.eager.keys() <= {"prompts", "mixed", "scores"}
    assert counts.replays == runner.graphed == outcome.num_steps - runner.eager.total()
    assert (counts.syncs, counts.h2d_pageable) == (0, 0), counts.told()
    assert (counts.h2d_async, counts.d2h_async) == (outcome.num_steps, outcome.num_steps), counts.told()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in FAMILIES]
)
def test_a_family_has_the_cpu_s_streams_and_waits_for_nothing(family: str, wide_experts: None) -> None:
    assert_silent(*run_both(kind_of(family), make_device("eager")))


@pytest.mark.parametrize("spec", ["ngram"])
def test_drafts_wait_for_no_length(spec: str) -> None:
    """The host plans with bounds, unlike on a CPU."""
    assert_silent(*run_both(kind_of("gemma2", spec=spec), make_device("eager")))


def test_streams_are_right_in_any_order_that_the_waits_allow() -> None:
    gpu = make_device("deferring", 17)
    _, runner, counts = run_both(kind_of("gemma3_text"), gpu, retract_every=9)
    assert runner.graphed > 3 and not counts.syncs and not gpu.races


# Experts


def test_experts_without_a_product_are_refused_graphs_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """In float32 torch multiplies them one by one, as many as the host reads."""
    with caplog.at_level("WARNING"):
        _, runner, counts = run_both(kind_of("qwen3_moe"), make_device("eager"))
    (said,) = [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]
    assert said.startswith("no CUDA graphs: torch multiplies float32 experts on a GPU of compute capability 9.0 one by")
    assert not runner.graphed and runner.eager.keys() <= {"prompts", "mixed", "scores", "waits"} and counts.syncs
    assert runner.totals()["eager.waits"] == runner.eager["waits"] > 3


def test_graphs_of_experts_give_the_eager_steps_streams() -> None:
    """In bfloat16, on the device both times."""
    kind = replace(kind_of("qwen3_moe"), dtype="bfloat16")
    streams = []
    for graphs in (False, True):
        core = make_core(kind, make_device("eager"), graphs=graphs)
        streams.append(run_local(core, jobs_for(kind, (), 4), rng=random.Random(1)).streams)
        assert core.graphs is None or core.graphs.graphed > 3
        core.close()
    assert streams[0] == streams[1]


class Chip:
    def __init__(self, *capability: int) -> None:
        self.capability = capability

    def current_device(self) -> None:
        """Say nothing."""

    def describe(self, device: None) -> Any:
        return self


def test_graphs_of_experts_depend_on_chip_and_dtype() -> None:
    spec = load_model("hashlm").spec
    experts = replace(spec, has_grouped_experts=True, dtype="bfloat16")
    for chip, is_captured in ((8, 6), False), ((9, 0), True), ((10, 3), True), ((12, 0), False):
        assert (why_not_captured(experts, Chip(*chip)) == "") is is_captured  # type: ignore[arg-type]
    assert why_not_captured(replace(experts, dtype="float32"), Chip(9, 0))  # type: ignore[arg-type]
    assert not why_not_captured(spec, Chip(8, 6))  # type: ignore[arg-type]


# Loading


def on_virtual_gpu(folder: Path, **options: Any) -> Any:
    options = {"kernels": "torch", "library": "transformers"} | options
    return load_model(str(folder), LoadOptions("float32", **options), str(make_device("eager").device))


ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4,
            },
            "original_max_position_embeddings": 36,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_are_not_asked_for_the_longest_position(
    rope: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = ROPES[rope]
    save(family, tmp_path, **changes)
    monkeypatch.setattr(cuda_core, "folder_of", lambda *_: tmp_path)
    assert_silent(*run_both(kind_of(family), make_device("eager")))


def test_the_check_runs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that reads one token more, there alone."""
    from shared.model.library.attend.device_attention import DeviceAttention

    find = DeviceAttention._find_keys

    def wider(own: Any, rows: Any, layer: LayerShape, *more: Any) -> Any:
        return find(own, rows, replace(layer, window=layer.window + bool(layer.window)), *more)

    monkeypatch.setattr(DeviceAttention, "_find_keys", wider)
    folder = folder_of("gemma2", True)
    with pytest.raises(ConfigError, match="its logits differ"):
        on_virtual_gpu(folder)
    load_model(str(folder), LoadOptions("float32", library="transformers"))


def test_weights_that_do_not_fit_the_gpu_are_refused_unread() -> None:
    with pytest.raises(ConfigError, match="the weights need .*, and 0.00 MiB of 1.00 GiB are free"):
        on_virtual_gpu(folder_of("gemma2", True), memory=MemoryInfo(1000, 1 << 30))
    device = make_device("eager", memory_bytes=1 << 16).device
    with pytest.raises(torch.OutOfMemoryError):
        load_model(str(folder_of("gemma2", True)), LoadOptions("float32", library="transformers"), str(device))


def test_nothing_but_bounds_of_lengths_is_asked_of_the_host() -> None:
    folder = folder_of("gemma2", True)
    assert why_on_cpu(str(folder), LoadOptions(library="transformers")) == ""
    by_torch = LoadOptions("float32", library="transformers", kernels="torch")
    assert load_model(str(folder), by_torch).spec.needs_cpu_seq_lens
    model = on_virtual_gpu(folder)
    assert not model.spec.needs_cpu_seq_lens and model.gathers and model.spec.stored.mapped_bytes == 0
