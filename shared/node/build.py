"""Build and run a node from its configuration.

prefill_node/app.py and decode_node/app.py set the core plan and the environment, and then call `run_node`.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from shared.config import core_plan
from shared.config.device_defaults import with_device_defaults
from shared.config.endpoints import tcp_endpoint
from shared.config.host_memory import host_memory
from shared.config.processes import NodeParts, NodeProcessConfig
from shared.config.vocabulary import read_vocabulary
from shared.core.errors import BatonError, ConfigError, DeviceLost, RankLost
from shared.core.keys import RequestKey
from shared.core.overshoot import loop_depth
from shared.core.request import Request
from shared.core.sampling_params import SamplingParams
from shared.device.cpu import do_nothing
from shared.device.faults import blames_device
from shared.device.gpu import Gpu
from shared.device.group import RankGroup
from shared.device.malloc import give_freed_memory_back, keep_freed_memory
from shared.device.streams import make_streams
from shared.device.torch_cuda import TorchCuda
from shared.engine.drafter import Drafter
from shared.grammar.compiler import GrammarCompiler
from shared.grammar.grammars import Grammars
from shared.kv.layout import layer_ends, page_bytes
from shared.model.interface import Model, ModelSpec, Stage
from shared.model.load import load_model, why_on_cpu
from shared.model.packed_folder import PackedFolder
from shared.node.assemble import CoreSizes, assemble_core, boundary_of, pool_planes
from shared.node.compiling import KernelLog, tell_of_kernels
from shared.node.context import NodeContext, NodeFacts
from shared.node.core import NodeCore
from shared.node.cores import NodeCores
from shared.node.daemon import Daemon
from shared.node.deterministic import check_deterministic
from shared.node.fingerprint import build_name, make_fingerprint
from shared.node.gpu_memory import KV_POOL, TOO_LARGE, explained, measure_use
from shared.node.graph_spec import GraphSpec, graphs_of
from shared.node.load_options import load_options
from shared.node.memory_plan import MemoryPlan, least_plan, plan_memory
from shared.node.node import Node
from shared.node.routers.dialled import Routers
from shared.node.routers.early_peers import drop_early_messages
from shared.node.routers.sources import sources_of
from shared.node.routers.watch import RouterWatch
from shared.node.side import Side
from shared.node.tombstones import Tombstones
from shared.observe.library_logs import capture_libraries
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.observe.node_metrics import NodeMetrics
from shared.ranks.leader import RankProcesses
from shared.sched.draft_length import make_width_choice
from shared.sched.largest import EVERY_FEATURE
from shared.sched.mixed_chunk import make_mixed_chunk
from shared.sched.probe import PROBE_PROMPT
from shared.sched.settings import SchedSettings
from shared.speculation.drafters import make_drafter
from shared.transfer.transports import about_transports, available_transports, host_id, open_group
from shared.wire.codec import WireLimits
from shared.wire.descriptors import raise_limit
from shared.wire.keyring import KeyRing, ring_of_node
from shared.wire.zeromq.link import NodeLinks
from shared.wire.zeromq.link_options import LinkOptions

EXIT_FAILED = 1
# limit on each part of a message to a prefill node from peers that dial it to ask for pages (Pull)
MOST_TO_PREFILL_BYTES = 1 << 20
SideOf = Callable[[NodeContext], Side]


@dataclass(frozen=True, slots=True)
class Loaded:
    model: Model
    drafter: Drafter | None
    stages: tuple[Stage, ...] = ()
    packed: PackedFolder | None = None

    @property
    def mapped_bytes(self) -> int:
        """Return the bytes of mapped weights, which the system counts as free memory."""
        return 0 if self.packed is None else self.packed.mapped_bytes


def run_node(config: NodeProcessConfig, make_side: SideOf) -> int:
    """Return the exit code. Raise ConfigError for errors that the user can correct."""
    parts = config.parts
    asked = parts.node
    routers, sources = sources_of(asked.router, asked.routers_file, has_keys=parts.security.has_keys)
    ring = ring_of_node(parts.security.keys, parts.node.node_id)
    node_id = ring.name if ring is not None else parts.node.node_id or f"{parts.node.role}-{os.getpid()}"
    log = Logger(node_id, sys.stderr, level=parts.log.log_level, color=parts.log.log_color)
    capture_libraries(log)
    keep_freed_memory()
    links = open_links(parts, node_id, time.time_ns() // 1000, ring)
    watch = RouterWatch(routers, sources, links.wakeup.set)
    core: NodeCore | None = None
    cores = NodeCores(config.cores, parts.parallel, node_id)
    others = RankProcesses(config, node_id)
    node: Node | None = None
    kernels = KernelLog(log)
    forget_kernels = tell_of_kernels(kernels, parts.sched.device)
    try:
        with drop_early_messages(links):
            others.start()
            core = build_core(config, log, links.wakeup.set, others, cores)
            warm_up(core, log)
            cores.settle(core.model, log)
        node = build_node(parts, core, links, log, make_side, cores, routers)
        daemon = Daemon(node, links, log, parts.node.drain_s, check=others.check, cores=cores, watch=watch)
        watch.start()
        kernels.serving()
        log.info("ready", endpoint=links.endpoint, pid=os.getpid())
        code = daemon.run()
        check_at_exit(node, log)
    except Exception as error:  # routers get no message: the links close, and routers use other nodes
        if not (isinstance(error, RankLost | DeviceLost) or blames_device(error)):
            raise
        log.error("this node can't go on", error=error)
        return EXIT_FAILED
    finally:
        with ExitStack() as ends:  # the callbacks run in reverse order, each even if others raise
            ends.callback(cores.close)
            ends.callback(core.close if core is not None else do_nothing)
            ends.callback(links.close)
            ends.callback(core.streams.stop if core is not None else do_nothing)
            ends.callback(others.close)
            ends.callback(node.side.close if node is not None else do_nothing)
            ends.callback(forget_kernels)
            ends.callback(watch.close)
    log.info("stopped")
    return code


def open_links(parts: NodeParts, node_id: str, epoch: int, ring: KeyRing | None) -> NodeLinks:
    node = parts.node
    raise_limit()
    limits = WireLimits(max_frame_bytes=node.max_message_bytes)
    caller_bytes = MOST_TO_PREFILL_BYTES if node.role == "prefill" else 0
    options = LinkOptions.for_silence(node.silence_s, limits=limits, ring=ring, caller_bytes=caller_bytes)
    options = replace(options, after_burst=give_freed_memory_back)
    return NodeLinks(node_id, epoch, tcp_endpoint(node.bind_host, node.bind_port), options)


def build_core(
    config: NodeProcessConfig, log: Logger, notify: Callable[[], None], others: RankProcesses, cores: NodeCores
) -> NodeCore:
    size, num_stages = config.parts.parallel.num_ranks, config.parts.parallel.pp
    torch.set_num_threads(cores.threads)
    device, streams = devices(config.parts, max(size, num_stages), TorchCuda(), log)
    parts, gpu = with_device_defaults(config.parts, device), gpu_of(streams)
    check_deterministic(parts, on_gpu=gpu is not None)
    if num_stages > core_plan.num_threads(config.cores):
        log.warning("this node has fewer threads than stages, so its stages take turns", stages=num_stages)
    started = time.monotonic()
    cores.take(device, log)
    loaded = load(parts, device, cores, others.model_group, gpu)
    seconds = round(time.monotonic() - started, 2)
    spec = loaded.model.spec
    told = {"model": spec.name, "dtype": spec.dtype, "weights": spec.weight_dtype, "kv": spec.kv_dtype}
    parted = {"ranks": size, "stages": num_stages, "mapped_mib": loaded.mapped_bytes >> 20}
    log.info("model loaded", **told, **parted, seconds=seconds)
    overlap = parts.sched.overlap and streams != "inline"
    on_start = partial(torch.set_num_threads, cores.threads)
    made = make_streams(streams, on_thread_start=on_start, notify=notify, gpu=gpu, num_stages=num_stages)
    boundary = boundary_of(device, gpu)

    def assemble(plan: MemoryPlan, grammars: Grammars | None = None, graphs: GraphSpec | None = None) -> NodeCore:
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

    least = partial(assemble, least_plan(loaded.model.spec.max_context))
    plan = measured_plan(parts, loaded, device, loop_depth(overlap, num_stages), gpu, least, log)
    grammars = make_grammars(parts, loaded.model.spec, log, notify)
    with explained(gpu, device, KV_POOL):
        core = assemble(plan, grammars, graphs_of(parts, gpu, loaded.model))
    others.share(core.pool)
    return core


def measured_plan(
    parts: NodeParts,
    loaded: Loaded,
    device: str,
    depth: int,
    gpu: Gpu | None,
    make_least: Callable[[], NodeCore],
    log: Logger,
) -> MemoryPlan:
    """`make_least` makes a core with two pages, to measure steps on a GPU."""
    memory, max_context = parts.memory, loaded.model.spec.max_context
    num_bytes = page_bytes(pool_planes(loaded.model, loaded.drafter, memory.page_size))
    use = None if gpu is None else measure_use(gpu, torch.device(device), make_least, memory, num_bytes)
    plan = plan_memory(parts, max_context, num_bytes, depth, device, available_bytes(loaded), use)
    log.info("KV memory", pages=plan.num_pages, page_size=memory.page_size, max_context=plan.max_context)
    if use is not None:
        log.info("GPU memory", **use.parts(plan.num_pages * num_bytes))
    return plan


def available_bytes(loaded: Loaded) -> int:
    _, available = host_memory()
    return available - loaded.mapped_bytes


def gpu_of(streams: str) -> Gpu | None:
    return TorchCuda() if streams == "cuda" else None


def make_grammars(parts: NodeParts, spec: ModelSpec, log: Logger, notify: Callable[[], None]) -> Grammars | None:
    if spec.has_encoder or parts.parallel.pp > 1:
        return None
    try:
        vocabulary = read_vocabulary(parts.model.model)
    except ConfigError as error:
        log.warning("no structured output: the vocabulary can't be read", why=error.message)
        return None
    if not vocabulary.eos_ids or len(vocabulary.tokens) != spec.vocab_size:
        told = {"ends": len(vocabulary.eos_ids), "vocabulary": len(vocabulary.tokens), "model": spec.vocab_size}
        log.warning("no structured output: the vocabulary does not fit the model", **told)
        return None
    return Grammars(GrammarCompiler(vocabulary), vocabulary.eos_ids, notify)


def devices(parts: NodeParts, num_parts: int, gpu: Gpu, log: Logger) -> tuple[str, str]:
    """Return the device and the kind of streams. Raise ConfigError for a missing GPU.

    `auto` takes a GPU if the model can use it. A node of several ranks or stages runs on the CPU, because
    these share host memory.
    """
    device = parts.sched.device
    if device == "inline":
        return "cpu", "inline"
    if device == "cuda" and not gpu.is_available():
        raise ConfigError(
            "--device cuda: torch sees no GPU: none is there, its driver is missing, CUDA_VISIBLE_DEVICES hides it, or "
            "this torch was built for CPUs; use --device cpu or auto"
        )
    if device == "auto":
        device = "cuda" if num_parts == 1 and gpu.is_available() else "cpu"
        if device == "cuda" and (why := why_on_cpu(parts.model.model, load_options(parts))):
            log.info("the GPU is not used", why=why)
            device = "cpu"
    return device, device


def load(parts: NodeParts, device: str, cores: NodeCores, group: RankGroup | None, gpu: Gpu | None) -> Loaded:
    """Only rank 0 makes drafts. In a pipeline, the drafter runs on the first stage's stream."""
    memory = gpu.memory_info(torch.device(device)) if gpu is not None else None
    name, options = parts.model.model, load_options(parts, cores, memory)
    model: Model
    stages: tuple[Stage, ...] = ()
    if group is not None:
        from shared.model.shard import load_shard  # a late import, because the module imports the CPU's kernels

        model = load_shard(name, options, group)
    elif (num_stages := parts.parallel.pp) > 1:
        from shared.model.pipeline import load_pipeline

        model, stages = load_pipeline(name, options, num_stages, heads_every_row=parts.node.role == "decode")
    else:
        with explained(gpu, device, TOO_LARGE):
            model = load_model(name, options, device)
    with explained(gpu, device, TOO_LARGE):
        loaded = Loaded(model, make_drafter(parts.spec, name, model, cores.team), stages, options.packed)
    give_freed_memory_back()
    return loaded


def core_sizes(parts: NodeParts, device: str, plan: MemoryPlan) -> CoreSizes:
    memory, shares = parts.memory, parts.node.role == "prefill" and "shm" in transports(parts, device)
    return CoreSizes(
        plan.num_pages,
        memory.max_running,
        memory.prefix_cache,
        shared_memory=shares or parts.parallel.num_ranks > 1,
        cold_pages=plan.cold_pages,
        cold_file_pages=plan.cold_file_pages,
        cold_dir=memory.offload_dir,
    )


def sched_settings(parts: NodeParts, model: Model, device: str, plan: MemoryPlan) -> SchedSettings:
    return SchedSettings(
        page_size=parts.memory.page_size,
        max_context=plan.max_context,
        chunk_size=parts.sched.chunk_size,
        mixed_chunk_size=parts.sched.mixed_chunk_size,
        width=parts.spec.width,
        max_ungranted_pages=max(1, int(parts.memory.max_pinned_fraction * plan.num_pages)),
        growth_reserve=parts.sched.growth_reserve,
        device=device,
        layer_ends=layer_ends(model.kv_planes(parts.memory.page_size), parts.transfer.layer_parts),
    )


def transports(parts: NodeParts, device: str) -> tuple[str, ...]:
    receives, trusts_network = parts.node.role == "decode", parts.transfer.trust_network
    return available_transports(parts.node.transport, device, receives=receives, trusts_network=trusts_network)


def build_node(
    parts: NodeParts,
    core: NodeCore,
    links: NodeLinks,
    log: Logger,
    make_side: SideOf,
    cores: NodeCores,
    routers: tuple[str, ...],
) -> Node:
    facts = node_facts(parts, core, links)
    ctx = NodeContext(
        core=core,
        facts=facts,
        routers=Routers(routers),
        tombstones=Tombstones(facts.lease_s),
        metrics=NodeMetrics(),
        log=LogOnce(log),
        clock=time.monotonic,
        wire_counts=links.counts,
        wake=links.wakeup.set,
        cores=cores.told,
        make_group=partial(open_group, host=parts.node.bind_host, device=core.pool.device, wake=links.wakeup.set),
    )
    return Node(ctx, make_side(ctx))


def node_facts(parts: NodeParts, core: NodeCore, links: NodeLinks) -> NodeFacts:
    node_id, _, epoch = links.identity.partition("@")
    page_size, drafter = parts.memory.page_size, core.engine.worker.drafter
    return NodeFacts(
        role=parts.node.role,
        node_id=node_id,
        epoch=int(epoch, 16),
        endpoint=links.endpoint,
        host_id=host_id(),
        transports=transports(parts, core.settings.device),
        fingerprint=make_fingerprint(
            core.spec, core.pool.planes, page_size, drafter, build_name(), core.scheduler.intake.grammar_version
        ),
        max_context=core.settings.max_context,
        max_running=core.kv.rows.num_total,
        max_waiting=parts.sched.max_waiting,
        heartbeat_s=parts.node.heartbeat_s,
        lease_s=parts.node.lease_s,
        silence_s=parts.node.silence_s,
        about_transports=about_transports(core.settings.device) if parts.node.transport == "auto" else "",
    )


def warm_up(core: NodeCore, log: Logger) -> None:
    """Run every sampling feature, so that kernels compile before clients wait."""
    started = time.monotonic()
    kinds = SamplingParams(max_tokens=3, temperature=0.0), EVERY_FEATURE
    for arrival, sampling in enumerate(kinds):
        key = RequestKey("warm-up", 0, str(arrival), 0, 0)
        core.submit(Request(key, np.asarray(PROBE_PROMPT, np.int64), sampling, seed=1, arrival=-arrival))
    while not core.idle:
        core.step(block=True)
    core.take_events()
    core.kv.flush_cache()
    gc.freeze()  # later garbage collections skip the objects made so far
    give_freed_memory_back()
    log.info("warm", seconds=round(time.monotonic() - started, 2))


def check_at_exit(node: Node, log: Logger) -> None:
    """Log problems, don't raise."""
    try:
        node.ctx.core.kv.check_integrity(idle=node.idle)
    except BatonError as error:
        log.error("KV memory does not add up", error=error)
