"""A node's memory on a GPU: weights, the largest step and the KV pool share what the settings give it, and what does
not fit is said before anybody is served. On the virtual GPU; never run on a real one."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config.device_defaults import CPU, GPU, with_device_defaults
from shared.config.processes import NodeParts
from shared.config.settings.settings import MemoryConfig, ModelConfig, SchedConfig
from shared.core.errors import ConfigError
from shared.device.gpu import GIB, MIB, Gpu
from shared.engine.engine import Engine
from shared.engine.future_map import FutureMap
from shared.engine.plan import StepPlan
from shared.model.formats.opened import OpenedModel
from shared.node.assembly import build_memory, gpu_memory
from shared.node.assembly.gpu_memory import GpuUse
from shared.node.assembly.memory_plan import MemoryPlan, plan_memory
from shared.node.records.core import NodeCore
from tests.support.cores.core_rig import assert_whole, run_local
from tests.support.gpus.cuda_core import folder_of
from tests.support.gpus.cuda_jobs import jobs
from tests.support.gpus.cuda_node import on_virtual_gpu, parts_of
from tests.support.models.tiny_adapters import adapter
from tests.support.virtual_gpu.device import VirtualGpu, make_device

WHOLE = 24 * MIB
ROWS = {"max_running": 10}


@pytest.fixture
def gpu() -> VirtualGpu:
    return make_device("eager", memory_bytes=WHOLE)


def use(**changes: int) -> GpuUse:
    """Of a GPU of 100 GiB, with 30 GiB of weights and a step of 8."""
    return replace(GpuUse(100 * GIB, 70 * GIB, 30 * GIB, 8 * GIB), **changes)


def planned(use: GpuUse | None, context: int = 4096, asked: int = 0, **memory: Any) -> MemoryPlan:
    """With pages of a MiB."""
    parts = NodeParts(model=ModelConfig(max_context=asked), memory=MemoryConfig(**({"max_running": 999} | memory)))
    return plan_memory(parts, context, MIB, 1, "cuda" if use else "cpu", 1 << 30, use)


@pytest.mark.parametrize("spec", ["none", *(pytest.param(spec, marks=pytest.mark.long) for spec in ("ngram", "eagle"))])
def test_the_pool_takes_what_weights_and_the_largest_step_leave(
    gpu: VirtualGpu, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest steps of real requests fit beside it then."""
    built = on_virtual_gpu(gpu, monkeypatch)
    core = built.core(parts_of(spec=spec, memory=ROWS | {"gpu_mem_fraction": 0.5}))
    assert core.pool.num_pages * core.pool.page_bytes > WHOLE / 16
    gpu.forget_peak(gpu.device)
    outcome = run_local(core, jobs(4), rng=random.Random(1))
    assert not [end for end in outcome.ends.values() if end.error]
    assert gpu.memory_use(gpu.device).peak_bytes <= 0.5 * WHOLE
    assert_whole(core)
    core.close()
    line = next(line for line in built.said.getvalue().splitlines() if "GPU memory" in line)
    for word in ("weights=", "largest_step=", "reserve=", "kv=", "total="):
        assert word in line


def test_what_is_measured_is_what_is_there(gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the core that was measured nothing stays but slots, and the relay is in the sum."""
    uses: list[GpuUse] = []
    relays: list[weakref.ref[FutureMap]] = []

    def measured(gpu: Gpu, device: torch.device, make_core: Callable[[], NodeCore], *sizes: Any) -> GpuUse:
        def made() -> NodeCore:
            core = make_core()
            relays.append(weakref.ref(core.future_map))
            return core

        uses.append(gpu_memory.measure_use(gpu, device, made, *sizes))
        return uses[-1]

    monkeypatch.setattr(build_memory, "measure_use", measured)
    gc.disable()  # what goes is let go of on purpose
    try:
        core = on_virtual_gpu(gpu, monkeypatch).core(parts_of(memory=ROWS))
    finally:
        gc.enable()
    (found,), (relay,) = uses, relays
    assert relay() is None
    slots = WHOLE - found.free - found.weights
    assert 0 < slots < MIB and found.largest_step > slots + core.future_map.history.numel() * 4
    core.close()


@pytest.mark.parametrize("spec", ["none", "ngram"])
def test_the_largest_steps_are_as_large_as_the_settings_allow(
    gpu: VirtualGpu, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[StepPlan] = []
    launch = Engine.launch
    monkeypatch.setattr(Engine, "launch", lambda engine, plan: plans.append(plan) or launch(engine, plan))
    core = on_virtual_gpu(gpu, monkeypatch).core(parts_of(spec=spec, memory=ROWS, chunk_size=200))
    mixed, chunks = plans
    assert chunks.q_lens.tolist() == [128, 72] and chunks.num_prefill == 2 and chunks.emits.all()
    assert chunks.layout.max_seq_len == 128 and chunks.seq_lens_cpu.tolist() == [0, 56]
    width = core.settings.width
    assert mixed.q_lens.tolist() == [32] + 9 * [width] and mixed.num_prefill == 1 and mixed.width == width
    assert mixed.layout.max_seq_len == 128 and not mixed.layout.page_table.any() and mixed.history_rows.all()
    assert len(plans) == 2 and not core.engine.leases
    core.close()


def test_all_start_up_work_is_done_before_the_streams_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, adapters, draft head, pool and relay are made on the default stream, which nothing orders with those of
    the steps. The largest steps run before the pool of the node is made: nothing else waits for it."""
    gpu = make_device("deferring", 1, laziness=1.0)
    blue = adapter(folder_of("draft target"), tmp_path / "blue", seed=1)
    built = on_virtual_gpu(gpu, monkeypatch)
    core = built.core(parts_of(spec="eagle", memory={"max_running": 2}, lora=(f"blue={blue}",), chunk_size=16))
    assert not gpu.current_stream().queue.items and not gpu.races
    core.close()


def test_the_sum() -> None:
    """2 GiB are the reserve."""
    assert use().left_for_kv(0.9) == 50 * GIB
    assert use(free=60 * GIB).left_for_kv(0.9) == 50 * GIB
    assert use(free=20 * GIB).left_for_kv(0.9) == 10 * GIB, "another process has the rest"
    assert planned(use(), 1 << 20).num_pages == 50 * 1024 + 1
    assert planned(use(), 1 << 20, gpu_mem_fraction=0.5).num_pages == 10 * 1024 + 1
    assert planned(use(), 1 << 20, kv_bytes=GIB).num_pages == 1024 + 1, "--kv-bytes is the pool's, as on a CPU"


@pytest.mark.parametrize(
    ("found", "memory", "told"),
    [
        (use(weights=95 * GIB, free=5 * GIB), {}, r"15.00 GiB of the GPU's memory are missing.*weights take 95.00 GiB"),
        (use(free=9 * GIB), {}, r"1.00 GiB .* are missing.*step 8.00 GiB .*reserve 2.00 GiB of 100.00 GiB, of which 9"),
        (use(), {"gpu_mem_fraction": 0.3}, r"10.00 GiB .*may use 30.00 GiB \(--gpu-mem-fraction 0.3\).*--chunk-size"),
        (use(), {"kv_bytes": 60 * GIB}, r"10.00 GiB .* are missing.* --kv-bytes is 60.00 GiB"),
    ],
)
def test_a_model_that_does_not_fit_says_how_much_is_missing(found: GpuUse, memory: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        planned(found, **memory)


@pytest.mark.parametrize("found", [None, use(free=12 * GIB)])
def test_a_context_that_was_asked_for_is_not_cut_short(found: GpuUse | None) -> None:
    """One that is the model's is: what fits is served."""
    most = {"kv_bytes": GIB}
    assert planned(found, 1 << 16, **most).max_context == 1024 * 16 - 3
    with pytest.raises(ConfigError, match=r"KV of one request of 65536 tokens needs 4.00 GiB, .* has 1.00 GiB"):
        planned(found, 1 << 16, asked=1 << 16, **most)


@pytest.mark.parametrize(("share", "told"), [(0.02, "free.*weights"), (0.08, "free.*the largest step")])
def test_memory_that_runs_out_is_a_fault_of_the_settings(
    share: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While weights are loaded and while the largest step runs."""
    gpu = make_device("eager", memory_bytes=int(share * WHOLE))
    monkeypatch.setattr(OpenedModel, "check_memory", lambda *_: None)
    with pytest.raises(ConfigError, match=told):
        on_virtual_gpu(gpu, monkeypatch).core(parts_of(memory=ROWS))


def test_a_pool_with_less_memory_than_measured_blames_settings(
    gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have come meanwhile."""

    def too_much(*args: Any) -> MemoryPlan:
        plan = plan_memory(*args)
        return replace(plan, num_pages=2 * WHOLE // args[2])

    monkeypatch.setattr(build_memory, "plan_memory", too_much)
    told = r"free on .* too little for the KV pool.*--gpu-mem-fraction or --kv-bytes"
    with pytest.raises((ConfigError, torch.OutOfMemoryError), match=told):
        on_virtual_gpu(gpu, monkeypatch).core(parts_of(memory=ROWS))


def test_weights_that_can_not_fit_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = make_device("eager", memory_bytes=MIB // 4)
    with pytest.raises(ConfigError, match=r"weights need 0.\d\d MiB, and 0.25 MiB of 0.25 MiB are free"):
        on_virtual_gpu(gpu, monkeypatch).core(parts_of(memory=ROWS))
    assert not gpu.memory_use(gpu.device).peak_bytes


def test_what_is_left_open_goes_by_the_device() -> None:
    set_by_hand = NodeParts(sched=SchedConfig(chunk_size=99), memory=MemoryConfig(max_running=7))
    for device, own in (("cpu", CPU), ("cuda", GPU)):
        made, kept = with_device_defaults(NodeParts(), device), with_device_defaults(set_by_hand, device)
        found = made.sched.chunk_size, made.sched.mixed_chunk_size, made.memory.max_running
        assert found == (own.chunk_size, own.mixed_chunk_size, own.max_running)
        assert (kept.sched.chunk_size, kept.memory.max_running) == (99, 7)
        assert kept.sched.mixed_chunk_size == own.mixed_chunk_size
    assert (GPU.chunk_size, GPU.mixed_chunk_size) == (8192, 1024) and GPU.max_running > CPU.max_running
