"""One node's core, put together: model, memory, relay, worker, engine, scheduler, loop. Called by the nodes' app.py
and by tests; nothing else builds these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.device.streams import StreamSet
from shared.engine.drafter import Drafter
from shared.engine.engine import Engine
from shared.engine.future_map import FutureMap, RelaySpec
from shared.engine.worker import Worker
from shared.kv.manager import KVManager, page_count
from shared.kv.pages import PageAllocator
from shared.kv.pool import KVPool
from shared.kv.prefix_cache import PrefixCache
from shared.kv.rows import ReqToTokenPool
from shared.model.interface import Model
from shared.sched.loop import EngineLoop
from shared.sched.scheduler import Scheduler
from shared.sched.settings import SchedSettings


@dataclass(frozen=True, slots=True)
class CoreSizes:
    num_pages: int  # page 0, the sink, included
    max_running: int
    prefix_cache: bool = True
    shared_memory: bool = False


@dataclass(slots=True)
class NodeCore:
    """Everything of a node that is not network. `close` ends streams and memory."""

    model: Model
    pool: KVPool
    kv: KVManager
    future_map: FutureMap
    streams: StreamSet
    engine: Engine
    scheduler: Scheduler
    loop: EngineLoop

    def check_integrity(self, idle: bool = False) -> None:
        """Pages, rows, locks and leases add up; idle: nothing is out."""
        self.kv.check_integrity(idle)
        self.engine.check_integrity(idle)

    def close(self) -> None:
        self.streams.stop()
        self.pool.close()


def assemble_core(
    model: Model,
    streams: StreamSet,
    settings: SchedSettings,
    sizes: CoreSizes,
    *,
    drafter: Drafter | None = None,
    overlap: bool = True,
) -> NodeCore:
    planes = model.kv_planes(settings.page_size)
    pool = KVPool(planes, sizes.num_pages, settings.page_size, device=settings.device, shared=sizes.shared_memory)
    num_rows = sizes.max_running + 1
    kv = KVManager(
        ReqToTokenPool(num_rows, page_count(settings.history_len, settings.page_size)),
        PageAllocator(sizes.num_pages, pool.generation),
        PrefixCache(settings.page_size, enabled=sizes.prefix_cache),
    )
    extras: Sequence[RelaySpec] = drafter.relay_specs if drafter is not None else ()
    future_map = FutureMap(num_rows, settings.history_len, extras, settings.device)
    worker = Worker(model, pool, future_map, drafter, settings.device)
    engine = Engine(streams, worker, future_map, publishes=settings.speculative)
    scheduler = Scheduler(kv, settings, streams.schedule, engine.new_step)
    return NodeCore(model, pool, kv, future_map, streams, engine, scheduler, EngineLoop(scheduler, engine, overlap))
