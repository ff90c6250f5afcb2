"""Define a node's core: everything except the network, behind one interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.core.errors import BatonError
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.device.streams import StreamSet
from shared.engine.engine import Engine
from shared.engine.future_map import FutureMap
from shared.engine.graphs import GraphRunner
from shared.engine.plan import Int32s
from shared.kv.manager import KVManager
from shared.kv.pool import KVPool
from shared.model.math.interface import Model, ModelSpec
from shared.sched.loop import EngineLoop
from shared.sched.requests.queues import Queues
from shared.sched.scheduler import Scheduler
from shared.sched.steps.events import SchedEvent
from shared.sched.steps.settings import SchedSettings


@dataclass(slots=True)
class NodeCore:
    """A core owns all its parts. `close` ends the streams and frees the memory."""

    model: Model
    pool: KVPool
    kv: KVManager
    future_map: FutureMap
    streams: StreamSet
    engine: Engine
    scheduler: Scheduler
    loop: EngineLoop
    graphs: GraphRunner | None = None  # None where every forward runs operator by operator

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def settings(self) -> SchedSettings:
        return self.scheduler.settings

    @property
    def queues(self) -> Queues:
        return self.scheduler.queues

    @property
    def requests(self) -> Mapping[RequestKey, Request]:
        return self.queues.requests

    @property
    def idle(self) -> bool:
        return not self.queues.requests and self.loop.idle

    def step(self, block: bool = False) -> bool:
        return self.loop.step(block)

    def submit(self, req: Request) -> None:
        self.scheduler.intake.submit(req)

    def abort(self, key: RequestKey) -> None:
        """End a request without an error. The key may be unknown."""
        self.queues.abort(key)

    def fail(self, key: RequestKey, error: BatonError) -> None:
        """The key may be unknown."""
        self.queues.fail(key, error)

    def take_events(self) -> list[SchedEvent]:
        return self.queues.take_events()

    def pages_of(self, row: int) -> Int32s:
        """Return a view of the row's pages. Copy this view before the row changes."""
        return self.kv.rows.pages_of(row)

    def check_integrity(self, idle: bool = False) -> None:
        """Raise IntegrityError unless pages, rows, locks and leases add up. `idle`: none of these may be in use."""
        self.kv.check_integrity(idle)
        self.engine.check_integrity(idle)
        self.queues.offload.check_integrity(idle)

    def close(self) -> None:
        self.streams.stop()
        self.scheduler.close()
        self.pool.close()
