"""Build one node's core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shared.config.settings.frozen import ENCODER
from shared.core.adapter_table import AdapterTable
from shared.core.errors import ConfigError
from shared.core.overshoot import loop_depth
from shared.device.gpu import Gpu
from shared.device.streams import StreamSet
from shared.device.torch_cuda import TorchCuda
from shared.engine.boundary import Boundary, PinnedCopies, SameMemory
from shared.engine.drafter import Drafter
from shared.engine.engine import Engine
from shared.engine.future_map import FutureMap
from shared.engine.stages import FirstStage
from shared.engine.transfer_jobs import TransferJobs
from shared.engine.worker import Runner, Whole, Worker
from shared.grammar.grammars import NO_GRAMMARS, Grammars, NoGrammars
from shared.kv.cold_store import ColdStore
from shared.kv.group_cache import make_cache
from shared.kv.layout import PlaneSpec, page_windows
from shared.kv.manager import KVManager
from shared.kv.pages import PageAllocator
from shared.kv.pool import KVPool
from shared.kv.rows import ReqToTokenPool
from shared.model.math.adapter_bank import bank_of
from shared.model.math.interface import Model, ModelSpec, Stage
from shared.node.assembly.graph_spec import GraphSpec, make_graphs
from shared.node.records.core import NodeCore
from shared.ranks.tp import Ranks
from shared.sched.loop import EngineLoop
from shared.sched.memory.offload import ColdTier
from shared.sched.scheduler import Scheduler
from shared.sched.steps.draft_length import FixedWidth, WidthChoice
from shared.sched.steps.mixed_chunk import BudgetedChunk, MixedChunk
from shared.sched.steps.prompts import ForEncoder, InChunks, PromptRules
from shared.sched.steps.settings import DraftRules, SchedSettings


@dataclass(frozen=True, slots=True)
class CoreSizes:
    num_pages: int  # num_pages, cold_pages and cold_file_pages: see MemoryPlan
    max_running: int
    prefix_cache: bool = True
    shared_memory: bool = False
    cold_pages: int = 0
    cold_file_pages: int = 0
    cold_dir: str = ""  # folder of the cold tier's file; empty: the system's temporary folder


def pool_planes(model: Model, drafter: Drafter | None, page_size: int) -> tuple[PlaneSpec, ...]:
    return model.kv_planes(page_size) + (drafter.kv_planes(page_size) if drafter is not None else ())


def runner_of(ranks: Ranks | None, stages: Sequence[Stage]) -> Runner:
    if ranks is not None and stages:
        raise ConfigError("a model is split among ranks or among stages, not both")
    return ranks or (FirstStage(stages[0]) if stages else Whole())


def prompts_of(
    spec: ModelSpec, sizes: CoreSizes, drafter: Drafter | None, mixed_chunk: MixedChunk | None
) -> PromptRules:
    """Raise ConfigError for flags that an encoder model can't have."""
    if not spec.has_encoder:
        return InChunks()
    asked = {
        "--spec": drafter is not None and bool(drafter.kv_planes(1)),
        "--offload-bytes": bool(sizes.cold_pages),
        "--itl-budget": isinstance(mixed_chunk, BudgetedChunk),
    }
    ENCODER.refuse(asked, of=spec.name)
    return ForEncoder()


def boundary_of(device: str, gpu: Gpu | None = None) -> Boundary:
    if device == "cpu":
        return SameMemory()
    gpu = gpu or TorchCuda()
    return PinnedCopies(torch.device(device), lambda size: gpu.pinned((size,), torch.uint8))


def make_tier(engine: Engine, pool: KVPool, sizes: CoreSizes) -> ColdTier | None:
    if not sizes.cold_pages:
        return None
    store = ColdStore(pool.page_bytes, sizes.cold_pages, sizes.cold_file_pages, sizes.cold_dir)
    return ColdTier(store, pool, TransferJobs(engine, is_cold=True))


def table_of(model: Model) -> AdapterTable:
    bank = bank_of(model)
    named = ((own.name, own.digest) for own in model.spec.adapters)
    return AdapterTable(named, 0 if bank is None else bank.num_spare, model.spec.short_context)


def assemble_core(
    model: Model,
    streams: StreamSet,
    settings: SchedSettings,
    sizes: CoreSizes,
    *,
    drafter: Drafter | None = None,
    overlap: bool = True,
    widths: WidthChoice | None = None,
    mixed_chunk: MixedChunk | None = None,
    ranks: Ranks | None = None,
    stages: Sequence[Stage] = (),
    grammars: Grammars | NoGrammars = NO_GRAMMARS,
    boundary: Boundary | None = None,
    graphs: GraphSpec | None = None,
) -> NodeCore:
    """Build a core.

    - widths, mixed_chunk: by default, each chooses the largest number of tokens that the settings allow.
    - ranks: the model's other ranks. The caller shares the pool with these ranks, and then seals the pool.
    - boundary: by default, the boundary of `settings.device`.
    """
    ends = () if stages else settings.layer_ends  # a pipeline doesn't report finished layers
    depth = loop_depth(overlap, 1 + len(streams.stages))
    settings = replace(
        settings, depth=depth, layer_ends=ends, prompts=prompts_of(model.spec, sizes, drafter, mixed_chunk)
    )
    planes = pool_planes(model, drafter, settings.page_size)
    exact = settings.needs_cpu_seq_lens or model.spec.needs_cpu_seq_lens
    windows = page_windows(planes)
    settings = replace(settings, adapters=table_of(model), needs_cpu_seq_lens=exact, num_page_groups=len(windows))
    extras = () if drafter is None else drafter.relay_specs
    if drafter is not None:
        rules = DraftRules(drafter.key_lookahead, drafter.reads_history, relays_drafts=bool(drafter.relay_specs))
        settings = replace(settings, drafts=rules)
    pool = KVPool(
        planes,
        sizes.num_pages,
        settings.page_size,
        device=settings.device,
        shared=sizes.shared_memory,
        sealed=ranks is None,
    )
    num_rows = sizes.max_running + 1
    kv = KVManager(
        ReqToTokenPool(num_rows, settings.num_pages(settings.history_len), len(windows)),
        PageAllocator(sizes.num_pages, pool.generation),
        make_cache(windows, settings.page_size, sizes.prefix_cache and settings.prompts.share_prefixes),
    )
    future_map = FutureMap(num_rows, settings.history_len, extras, settings.device)
    streams.settle()
    boundary = boundary or boundary_of(settings.device)
    captured = make_graphs(model, pool, drafter, graphs, settings, sizes.max_running, streams)
    worker = Worker(model, pool, future_map, drafter, boundary, captured or runner_of(ranks, stages))
    engine = Engine(streams, worker, future_map, settings.speculative, stages)
    widths, tier = widths or FixedWidth(settings.width), make_tier(engine, pool, sizes)
    scheduler = Scheduler(kv, settings, engine.new_step, widths, tier, engine.stages.choose, grammars, mixed_chunk)
    return NodeCore(model, pool, kv, future_map, streams, engine, scheduler, EngineLoop(scheduler, engine), captured)
