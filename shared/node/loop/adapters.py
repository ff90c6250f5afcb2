"""Load and remove LoRA adapters while the node runs, as routers order. Sans-IO, except for the thread that reads files.

    LoadAdapter     loading --the thread has read it--> loaded: a slot has the weights, and Hello names the adapter
                            '--> refused
    RemoveAdapter   leaving: Hello no longer names it --no request uses it--> removed: the slot is free

A node that restarts has the adapters of its command line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from shared.config.processes import NodeParts
from shared.core.adapter_table import AdapterTable
from shared.core.errors import AdapterMissing, BatonError, ConfigError
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.model.math.adapter_bank import AdapterBank, ReadAdapter
from shared.node.loop.context import NodeContext
from shared.wire.messages import AdapterOrder, LoadAdapter, RemoveAdapter
from shared.wire.node_parts import OrderState
from shared.wire.ranges import MAX_ORDERS

NO_FOLDER = "it was started without --lora-dir: start it with --lora-dir DIR, the folder that has the adapters"

MAX_NUMBERS = 10_000  # of orders, remembered so that a late copy of an order changes nothing
MOST_WHY = 500  # characters of a reason, which may quote a file: every heartbeat has the reasons of several orders


def check_lora_dir(parts: NodeParts, device: str) -> None:
    """Raise ConfigError early, before the model is loaded."""
    folder = parts.adapters.lora_dir
    if folder and device != "cpu":
        raise ConfigError(f"--lora-dir: on {device} adapters are loaded only at the start; use --lora, or --device cpu")
    if folder and not Path(folder).expanduser().is_dir():
        raise ConfigError(f"--lora-dir {folder} is not a folder")


def path_below(root: str, path: str) -> Path:
    """Return an adapter's folder. Raise ConfigError if it is not below `root`, links followed.

    Routers name paths over the network. The operator's folder limits what they can make a node open."""
    if not root:
        raise ConfigError(NO_FOLDER)
    try:
        top = Path(root).expanduser().resolve()
        folder = (top / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links; a null byte
        raise ConfigError(f"{path!r} is not a path: {error}") from error
    if Path(path).is_absolute() or top not in folder.parents:
        raise ConfigError(f"{path!r} is not below --lora-dir: write a path relative to that folder, without ..")
    return folder


def check_links(root: str, folder: Path) -> None:
    """Raise ConfigError if a link in an adapter's folder leads out of `root`."""
    top = Path(root).expanduser().resolve()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink() and top not in path.resolve().parents:
            raise ConfigError(f"{path.name} is a link that leads out of --lora-dir: copy the file itself")


def read_below(bank: AdapterBank, root: str, folder: Path) -> ReadAdapter:
    """Runs on the thread that reads. Raise ConfigError."""
    check_links(root, folder)
    return bank.read(folder)


@dataclass(frozen=True, slots=True)
class Removal:
    name: str
    until: float  # then the requests that still use the weights fail


@dataclass(slots=True, eq=False)
class AdapterReading:
    order: LoadAdapter
    result: Future[ReadAdapter]


class AdapterDesk:
    """Owned by the node's loop thread. `outside`: requests that the scheduler doesn't know (yet)."""

    def __init__(
        self,
        ctx: NodeContext,
        bank: AdapterBank | None,
        outside: Callable[[], Sequence[Request]],
        abort: Callable[[RequestKey], None],
        executor: Executor | None = None,
    ) -> None:
        """`abort` drops a request of `outside`."""
        self._ctx, self._bank = ctx, bank
        self._outside, self._abort = outside, abort
        threads = torch.get_num_threads()  # the loop thread's, so that weights are packed as at the start
        self._executor = executor or ThreadPoolExecutor(
            1, "adapter", initializer=torch.set_num_threads, initargs=(threads,)
        )
        self._reading: list[AdapterReading] = []
        self._removals: dict[str, Removal] = {}  # by digest
        self._orders: dict[int, AdapterOrder] = {}  # by number; the last ones
        self._numbers: dict[int, None] = {}  # in order; those of all orders, as far as memory is kept for them
        self._has_news = False

    @property
    def _table(self) -> AdapterTable:
        return self._ctx.core.settings.adapters

    def take_order(self, order: LoadAdapter | RemoveAdapter, now: float) -> None:
        """An order that is said again, with its number, changes nothing."""
        if order.number in self._numbers:
            return
        self._numbers[order.number] = None
        while len(self._numbers) > MAX_NUMBERS:
            del self._numbers[next(iter(self._numbers))]
        self._has_news = True
        if isinstance(order, LoadAdapter):
            self._load(order)
        else:
            self._remove(order, now)

    def _load(self, order: LoadAdapter) -> None:
        self._note(order, "loading")
        try:
            folder = path_below(self._ctx.facts.lora_dir, order.path)
        except ConfigError as error:
            self._refuse_order(order, error)
            return
        if self._bank is None:
            self._refuse_order(order, ConfigError("its model takes no adapters"))
            return
        reading = AdapterReading(order, self._executor.submit(read_below, self._bank, self._ctx.facts.lora_dir, folder))
        self._reading.append(reading)
        reading.result.add_done_callback(lambda _: self._ctx.wake())

    def _remove(self, order: RemoveAdapter, now: float) -> None:
        for reading in [reading for reading in self._reading if reading.order.name == order.name]:
            self._reading.remove(reading)
            self._refuse_order(reading.order, ConfigError("it was removed before it was loaded"))
        digest = self._table.remove_name(order.name) or self._leaving_as(order.name)
        is_last = bool(digest) and not self._table.serves(digest)
        if is_last:
            self._removals[digest] = Removal(order.name, now + order.move_after_ms / 1000)
        self._note(order, "leaving" if is_last else "removed", digest)
        self._ctx.log.info((order.name, order.number), "an adapter is removed", adapter=order.name, digest=digest)

    def _leaving_as(self, name: str) -> str:
        """Return the weights that were removed under the name last, if requests use them, or "". A later order may
        change their time."""
        return next((one for one in reversed(self._table.leaving) if self._removals[one].name == name), "")

    def go_on(self, now: float) -> bool:
        """Return whether routers should hear of a change."""
        for reading in [reading for reading in self._reading if reading.result.done()]:
            self._reading.remove(reading)
            self._install(reading)
        for digest in self._table.leaving:
            self._leave(digest, now)
        has_news, self._has_news = self._has_news, False
        return has_news

    def _install(self, reading: AdapterReading) -> None:
        order, self._has_news = reading.order, True
        try:
            read = reading.result.result()
            slot = self._table.add(order.name, read.digest)
        except BatonError as error:
            self._refuse_order(order, error)
            return
        except Exception as error:  # a broken file must not end the node
            self._refuse_order(order, ConfigError(f"{type(error).__name__}: {error}"))
            return
        if slot:
            assert self._bank is not None
            self._bank.put(slot, read)
        self._note(order, "loaded", read.digest)
        self._ctx.log.info((order.name, order.number), "an adapter is loaded", adapter=order.name, digest=read.digest)

    def _leave(self, digest: str, now: float) -> None:
        """Free the slot if no request uses it."""
        users = self.users(digest)
        if not users:
            self._has_news = True
            for slot in self._table.free(digest):
                if self._bank is not None:
                    self._bank.clear(slot)
            del self._removals[digest]
        elif now >= self._removals[digest].until:
            self._fail(users)

    def users(self, digest: str) -> list[Request]:
        return [req for req in (*self._ctx.core.requests.values(), *self._outside()) if req.ask.adapter == digest]

    def _fail(self, users: Sequence[Request]) -> None:
        gone = AdapterMissing(f"the adapter was removed from {self._ctx.facts.node_id} before the answer's end")
        for req in users:
            if req.key in self._ctx.core.requests:
                self._ctx.core.fail(req.key, gone)
            else:
                self._abort(req.key)
                self._ctx.end(req.key, gone)

    def _refuse_order(self, order: LoadAdapter, error: BatonError) -> None:
        why = error.message[:MOST_WHY]
        self._note(order, "refused", why=why)
        self._ctx.log.warning((order.name, order.number), "an adapter is refused", adapter=order.name, why=why)

    def _note(self, order: LoadAdapter | RemoveAdapter, state: OrderState, digest: str = "", why: str = "") -> None:
        self._orders[order.number] = AdapterOrder(order.number, order.name, state, digest, why)
        while len(self._orders) > MAX_ORDERS:
            del self._orders[next(iter(self._orders))]

    def orders(self) -> list[AdapterOrder]:
        """Return what became of the last orders, for a heartbeat."""
        return [self._now(order) for order in self._orders.values()]

    def _now(self, order: AdapterOrder) -> AdapterOrder:
        if order.state != "leaving":
            return order
        num_users = 0 if self._table.serves(order.digest) else len(self.users(order.digest))
        return msgspec.structs.replace(order, requests=num_users, state="leaving" if num_users else "removed")

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
