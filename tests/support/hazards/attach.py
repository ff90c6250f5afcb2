"""Wires a detector to the production engine: the few accessors of relay, pool and tables declare what they touch.

    relay rows     FutureMap's methods                 pages    model, drafter, pulls and descriptions of the transfer,
                                                                copies of the cold tier
    table rows     snapshot, set_pages, free_row       lengths  every operator, through the storage watch

Everything is wrapped from outside, on the instances of one node. Ownership is checked when a step is launched,
generations at every access.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureIndices, FutureMap
from shared.engine.lease import StepLease
from shared.engine.plan import Admission, HistorySeed, StepPlan
from shared.model.math.interface import ModelInputs
from shared.node.records.core import NodeCore
from shared.sched.memory.offload import Offload
from tests.support.hazards.detector import Detector, HazardError
from tests.support.hazards.ledger import Ids, Ledger, Mode
from tests.support.hazards.storages import StorageMode, StorageWatch
from tests.support.hazards.streams import StreamWatch, edges

RELAY = ("output_tokens_buf", "new_seq_lens_buf", "written_by", "history")


class Hazards:
    """What the fixture gives: `watch(core)` before the core's first step; errors are raised on the host."""

    def __init__(self) -> None:
        self.detector = Detector()
        self.storages = StorageWatch(self.detector)
        self.nodes: list[NodeWatch] = []

    def watch(self, core: NodeCore, name: str = "") -> NodeCore:
        self.nodes.append(NodeWatch(self, core, f"{name}/" if name else ""))
        return core

    def watch_transfers(self, core: NodeCore, transports: Sequence[Any]) -> None:
        """Senders and receivers of a watched core's node."""
        node = next(node for node in self.nodes if node.core is core)
        for transport in transports:
            node.wrap_transport(transport)


@contextmanager
def watching() -> Iterator[Hazards]:
    """Raises HazardError at the end unless it was raised before."""
    hazards = Hazards()
    with edges(hazards.detector), StorageMode(hazards.storages):
        yield hazards
    hazards.detector.check()


class NodeWatch:
    """The ledgers of one node, and the wrappers that write into them."""

    def __init__(self, hazards: Hazards, core: NodeCore, prefix: str) -> None:
        self.core, self.prefix = core, prefix
        self.detector, self.storages = hazards.detector, hazards.storages
        self._row_generation = np.zeros(core.kv.rows.num_rows, np.int64)
        self._private: dict[int, np.ndarray] = {}
        self._plan: StepPlan | None = None
        self._make_ledgers()
        self._protect()
        for stream in core.streams.all():
            StreamWatch(self.detector, self.storages, stream, prefix + stream.name, self._facts)
        self._wrap_relay(core.future_map)
        self._wrap_table()
        self._wrap_model()
        self._wrap_engine()
        offload = core.queues.offload
        if isinstance(offload, Offload):
            self._wrap_cold(offload)

    def _make_ledgers(self) -> None:
        core, make = self.core, self.detector.ledger
        num_rows = core.future_map.num_rows
        names = [*RELAY, *core.future_map.extras]
        self.relay = {name: make(f"{self.prefix}relay.{name}", "row", num_rows) for name in names}
        self.pages = make(f"{self.prefix}kv", "page", core.pool.num_pages)
        self.table = make(f"{self.prefix}page_table", "row", core.kv.rows.num_rows)

    def _protect(self) -> None:
        """Regions of the second net."""
        core = self.core
        buffers = {name: getattr(core.future_map, name) for name in RELAY} | core.future_map.extras
        with self.detector.mute():
            for name, tensor in buffers.items():
                self.storages.protect(self.relay[name].name, tensor.data_ptr(), tensor.nbytes)
            self.storages.protect(self.pages.name, core.pool.pages_bytes.data_ptr(), core.pool.pages_bytes.nbytes)
        table = core.kv.rows.table
        self.storages.protect(self.table.name, table.ctypes.data, table.nbytes)

    def _facts(self) -> dict[str, Any]:
        """What the host knows when it launches a closure; generations of later owners are then told apart."""
        return {
            "pages": self.core.pool.generation.astype(np.int64),
            "rows": self._row_generation.copy(),
            "plan": self._plan,
            "private": self._private,
        }

    # ---- declaring

    def touch(self, ledger: Ledger, ids: Ids, mode: Mode) -> None:
        launch = self.detector.launch
        kind = "pages" if ledger is self.pages else "rows"
        facts = launch.facts if launch is not None else self._facts()
        ids = np.asarray(ids, np.int64)
        if kind == "pages" and mode is not Mode.CHECKED:
            self._require_in_use(ids, facts["pages"])
        self.detector.access(ledger, ids, mode, facts[kind][ids])

    def _require_in_use(self, pages: Ids, generation: Ids) -> None:
        free = pages[(generation[pages] % 2 == 0) & (pages != 0)]
        if len(free):
            what = f"{self.pages.name}, pages {free[:8].tolist()} were free when this was launched"
            self.detector.report(f"{what}\n  {self.detector.here()}")

    def _ids(self, future: FutureIndices) -> Ids:
        with self.detector.mute():
            ids: Ids = future.indices.numpy().astype(np.int64)
        return ids

    def _wrap(self, owner: Any, method: str, declare: Callable[..., None], *scopes: str, after: bool = False) -> None:
        """Declare, then call, with the named buffers open to the second net."""
        original, detector = getattr(owner, method), self.detector

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not after:
                declare(*args, **kwargs)
            with detector.scope(*scopes):
                out = original(*args, **kwargs)
            if after:
                declare(*args, **kwargs)
            return out

        setattr(owner, method, watched)

    # ---- relay

    def _wrap_relay(self, fm: FutureMap) -> None:
        relay, touch = self.relay, self.touch
        scopes = [ledger.name for ledger in relay.values()]
        tokens, lengths = relay["output_tokens_buf"], relay["new_seq_lens_buf"]
        written_by, history = relay["written_by"], relay["history"]

        def stash(future: FutureIndices, next_token_ids: Any, step: int, **extras: Any) -> None:
            for ledger in (tokens, written_by, *(relay[name] for name in extras)):
                touch(ledger, self._ids(future), Mode.WRITE)

        def gather(future: FutureIndices, expect_step: Any) -> None:
            touch(tokens, self._ids(future), Mode.READ)
            touch(written_by, self._ids(future), Mode.READ)

        def history_of(future: FutureIndices) -> None:
            touch(history, self._ids(future), Mode.READ)
            if self.detector.launch is not None:
                self.detector.launch.allowed.add(history.name)

        def history_tokens(future: FutureIndices, num_tokens: int) -> None:
            touch(history, self._ids(future), Mode.READ)

        def write_history(rows: Any, positions: Any, ids: Any) -> None:
            touch(history, self._ids(FutureIndices(rows)), Mode.WRITE)

        def seed_history(seeds: Sequence[HistorySeed], ids: Any) -> None:
            touch(history, np.asarray([seed.row for seed in seeds], np.int64), Mode.WRITE)

        def publish(future: FutureIndices, *rest: Any) -> None:
            touch(lengths, self._ids(future), Mode.WRITE)

        def published(future: FutureIndices) -> None:
            touch(lengths, self._ids(future), Mode.READ)

        def relayed(name: str, future: FutureIndices) -> None:
            touch(relay[name], self._ids(future), Mode.READ)

        declared = (stash, gather, history_of, history_tokens, write_history, seed_history, publish, published, relayed)
        for declare in declared:
            self._wrap(fm, declare.__name__, declare, *scopes)
        resolve = "resolve_seq_lens_cpu"  # waits inside: what it reads it reads after
        self._wrap(fm, resolve, lambda rows, ready: touch(lengths, rows, Mode.READ), *scopes, after=True)

    # ---- table

    def _wrap_table(self) -> None:
        rows, table = self.core.kv.rows, self.table
        self._wrap(rows, "snapshot", lambda wanted: self.touch(table, np.asarray(wanted), Mode.READ), table.name)
        self._wrap(rows, "set_pages", lambda row, *rest: self.touch(table, np.asarray([row]), Mode.WRITE), table.name)
        self._wrap(rows, "free_row", lambda row: self.touch(table, np.asarray([row]), Mode.WRITE), table.name)
        alloc_row = rows.alloc_row

        def counted() -> int | None:
            row = alloc_row()
            if row is not None:
                self._row_generation[row] += 1
            return row

        rows.alloc_row = counted  # type: ignore[method-assign]

    # ---- pages

    def _wrap_model(self) -> None:
        core, name = self.core, self.pages.name
        self._wrap(core.model, "forward", lambda inputs, kv: self._declare_forward(inputs), name)
        self._wrap(core.pool, "move_slots", self._declare_move, name)
        drafter = core.engine.worker.drafter
        if drafter is not None:
            self._wrap(drafter, "extend", lambda fb, *rest: self._touch_spans(fb.inputs, Mode.WRITE, 0), name)
            self._wrap(drafter, "propose", lambda fb, *rest: self._declare_proposal(fb), name)

    def _declare_proposal(self, fb: ForwardBatch) -> None:
        """A draft head writes the slots of the window too, for its own next forward."""
        self._touch_spans(fb.inputs, Mode.READ, fb.plan.num_prefill)
        self._touch_spans(fb.inputs, Mode.WRITE, fb.plan.num_prefill)

    def _declare_move(self, page_table: Any, *slots: Any) -> None:
        with self.detector.mute():
            read, written = (page_table.gather(1, each // self.core.pool.page_size).numpy() for each in slots)
        self.touch(self.pages, np.unique(read), Mode.READ)
        self.touch(self.pages, np.unique(written), Mode.WRITE)

    def _declare_forward(self, inputs: ModelInputs) -> None:
        self._touch_spans(inputs, Mode.READ, 0)
        self._touch_spans(inputs, Mode.WRITE, 0)
        with self.detector.mute():
            is_live = self.storages.region_of(inputs.layout.page_table)
        launch = self.detector.launch
        if is_live is not None and launch is not None and launch.facts["plan"] is not None:
            self.touch(self.table, launch.facts["plan"].req_pool_indices, Mode.READ)

    def _touch_spans(self, inputs: ModelInputs, mode: Mode, first_row: int) -> None:
        """Reads: pages of slots 0..last; writes: those of the step's own slots."""
        page_size = self.core.pool.page_size
        with self.detector.mute():
            ends = inputs.layout.cu_q_lens.numpy()
            slots, table = inputs.for_attention().key_slots.numpy(), inputs.layout.page_table.numpy()
        touched = []
        for b in range(first_row, len(ends) - 1):
            low, high = int(slots[ends[b]]) // page_size, int(slots[ends[b + 1] - 1]) // page_size
            begin = 0 if mode is Mode.READ else low
            pages = table[b, begin : high + 1]
            self._require_own(b, begin, high, pages, mode)
            touched.append(pages)
        if touched:
            self.touch(self.pages, np.concatenate(touched), mode)

    def _require_own(self, b: int, begin: int, end: int, pages: Ids, mode: Mode) -> None:
        """A step stays within its rows' pages, and writes only pages that no cache and no other row has. Raises
        where the kernel would reach beyond its arrays."""
        detector, launch = self.detector, self.detector.launch
        if launch is not None and launch.facts["plan"] is not None and not launch.facts["plan"].req_pool_indices[b]:
            return  # a step of nobody's: the padding row, whose pages are the sink
        if end < begin or len(pages) < end + 1 - begin or (pages == 0).any():
            message = f"batch row {b} goes past its pages ({mode.value} of page indices {begin} to {end})"
            detector.report(f"{message}\n  {detector.here()}")
            raise HazardError(message)
        private = launch.facts["private"].get(b) if launch is not None else None
        if mode is Mode.WRITE and private is not None and not private[begin : end + 1].all():
            detector.report(f"batch row {b} writes pages {pages.tolist()} that are shared\n  {detector.here()}")

    def wrap_transport(self, transport: Any) -> None:
        """A sender reads pages whose generation and digest are checked later; a receiver writes its own."""
        touch, name = self.touch, self.pages.name
        if hasattr(transport, "describe"):
            self._wrap(transport, "describe", lambda pages, *part: touch(self.pages, pages, Mode.CHECKED), name)
        if hasattr(transport, "pull"):
            self._wrap(transport, "pull", lambda ready, frames, own: touch(self.pages, own, Mode.WRITE), name)

    def _wrap_cold(self, offload: Offload) -> None:
        store, pool, name = offload._tier.store, self.core.pool, self.pages.name

        def touch(view: Any, mode: Mode) -> None:
            page = (view.ctypes.data - pool.pages_bytes.data_ptr()) // pool.page_bytes
            self.touch(self.pages, np.asarray([page]), mode)

        self._wrap(store, "store", lambda filing, page: touch(page, Mode.READ), name)
        self._wrap(store, "load", lambda cold, place, page: touch(page, Mode.WRITE), name)

    # ---- steps

    def _wrap_engine(self) -> None:
        engine, loop = self.core.engine, self.core.loop
        launch, sample, admit, step = engine.launch, engine.sample_masked, engine.admit, loop.step

        def launch_watched(plan: StepPlan) -> Any:
            self._require_rows(plan)
            with self._launching(plan):
                return launch(plan)

        def sample_watched(lease: StepLease) -> None:
            assert isinstance(lease.work, StepPlan)
            with self._launching(lease.work):
                sample(lease)

        def admit_watched(admission: Admission) -> Any:
            self._require_rows(admission)
            return admit(admission)

        def step_watched(block: bool = False) -> bool:
            moved = step(block)
            self.detector.check()
            return moved

        engine.launch, engine.sample_masked = launch_watched, sample_watched  # type: ignore[method-assign]
        engine.admit, loop.step = admit_watched, step_watched  # type: ignore[method-assign]

    @contextmanager
    def _launching(self, plan: StepPlan) -> Iterator[None]:
        """Closures that are launched meanwhile may read the plan, and the pages that its rows have now."""
        self._plan, self._private = plan, dict(enumerate(self.core.kv._private[plan.req_pool_indices]))
        try:
            yield
        finally:
            self._plan, self._private = None, {}

    def _require_rows(self, work: StepPlan | Admission) -> None:
        """Every row of a step belongs to the request that the step names, and to no other batch row; the padding row is
        nobody's."""
        rows = [int(row) for row in work.req_pool_indices]
        for row, row_id in zip(rows, work.row_ids, strict=True):
            owner = self.core.kv.owner(row) if row else str(row_id.key)
            if owner != str(row_id.key):
                self.detector.report(f"step {work.step}: row {row} is {owner}'s, not {row_id.key}'s")
        double = [row for row, count in Counter(rows).items() if count > 1]
        if double:
            self.detector.report(f"step {work.step}: rows {double} are there twice")
