"""Build a node's core from its configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from shared.config import core_plan
from shared.config.device_defaults import with_device_defaults
from shared.config.processes import NodeProcessConfig
from shared.core.overshoot import loop_depth
from shared.device.streams import make_streams
from shared.device.torch_cuda import TorchCuda
from shared.grammar.grammars import NO_GRAMMARS, Grammars, NoGrammars
from shared.node.assembly.assemble import assemble_core, boundary_of
from shared.node.assembly.build_memory import core_sizes, measured_plan, sched_settings
from shared.node.assembly.build_model import devices, gpu_of, load, make_grammars
from shared.node.assembly.deterministic import check_deterministic
from shared.node.assembly.gpu_memory import KV_POOL, explained
from shared.node.assembly.graph_spec import GraphSpec, graphs_of
from shared.node.assembly.memory_plan import MemoryPlan, least_plan
from shared.node.loop.adapters import check_lora_dir
from shared.node.machine.cores import NodeCores
from shared.node.records.core import NodeCore
from shared.observe.log import Logger
from shared.ranks.leader import RankProcesses
from shared.sched.steps.draft_length import make_width_choice
from shared.sched.steps.mixed_chunk import make_mixed_chunk


def build_core(
    config: NodeProcessConfig, log: Logger, notify: Callable[[], None], others: RankProcesses, cores: NodeCores
) -> NodeCore:
    size, num_stages = config.parts.parallel.num_ranks, config.parts.parallel.pp
    torch.set_num_threads(cores.threads)
    device, streams = devices(config.parts, TorchCuda(), log)
    parts, gpu = with_device_defaults(config.parts, device), gpu_of(streams)
    check_lora_dir(parts, device)
    check_deterministic(parts, on_gpu=gpu is not None)
    others.start(device)
    if num_stages > core_plan.num_threads(config.cores):
        log.warning("this node has fewer threads than stages, so its stages take turns", stages=num_stages)
    started = time.monotonic()
    cores.take_cores(device, log)
    loaded = load(parts, device, cores, others.model_group, gpu)
    seconds = round(time.monotonic() - started, 2)
    spec = loaded.model.spec
    formats: dict[str, object] = {"model": spec.name, "dtype": spec.dtype, "weights": spec.weight_dtype}
    formats["kv"] = spec.kv_dtype
    if (stored := spec.stored) is not None:
        formats["stored"] = stored.format
        formats |= {"file_mib": stored.file_bytes >> 20, "memory_mib": stored.memory_bytes >> 20}
    parted = {"ranks": size, "stages": num_stages, "mapped_mib": loaded.mapped_bytes >> 20}
    log.info("model loaded", **formats, **parted, seconds=seconds)
    overlap = parts.sched.overlap and streams != "inline"
    on_start = partial(torch.set_num_threads, cores.threads)
    made = make_streams(streams, on_thread_start=on_start, notify=notify, gpu=gpu, num_stages=num_stages)
    boundary = boundary_of(device, gpu)

    def assemble(
        plan: MemoryPlan, grammars: Grammars | NoGrammars = NO_GRAMMARS, graphs: GraphSpec | None = None
    ) -> NodeCore:
        return assemble_core(
            loaded.model,
            made,
            sched_settings(parts, loaded.model, device, plan),
            core_sizes(parts, device, plan),
            drafter=loaded.drafter,
            overlap=overlap,
            widths=make_width_choice(parts.spec),
            mixed_chunk=make_mixed_chunk(parts.sched.itl_budget, parts.sched.mixed_chunk_size),
            ranks=others.ranks,
            stages=loaded.stages,
            grammars=grammars,
            boundary=boundary,
            graphs=graphs,
        )

    def assemble_least() -> NodeCore:
        core = assemble(least_plan(loaded.model.spec.max_context))
        others.make_pages(core.pool)
        return core

    depth = loop_depth(overlap, num_stages)
    plan = measured_plan(parts, loaded, device, depth, gpu, assemble_least, log, others.measure_uses)
    grammars = make_grammars(parts, loaded.model.spec, log, notify)
    with explained(gpu, device, KV_POOL):
        core = assemble(plan, grammars, graphs_of(parts, gpu, loaded.model))
    others.share(core.pool)
    return core
