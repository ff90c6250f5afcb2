"""/admin/adapters: load and remove LoRA adapters while nodes run, and show which node has which.

    POST, DELETE --> an order to every node --heartbeats--> what became of it, for each node
    GET          --> what the nodes' Hellos name, and their last orders

The router keeps nothing: it offers what nodes name, so every router offers the same, whichever took the order.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from router.api.fields.fields import Body, FieldTable, named_in
from router.api.fields.parse import BodyParser
from router.dispatch.gateway import Gateway
from router.fleet.registry import RegisteredNode, Registry
from router.http.connection import Connection
from router.http.errors import Conflict, NotFound
from shared.core.errors import InvalidRequest, NoNodes
from shared.wire.messages import AdapterOrder, LoadAdapter, RemoveAdapter
from shared.wire.ranges import MAX_NAME
from shared.wire.versions import SINCE, knows

MAX_BODY_BYTES = 16384
WAIT_S = 5.0  # a longer load goes on, and GET shows its end
POLL_S = 0.05
AGAIN_S = 1.0  # an order may be lost in a full queue
UNANSWERED = "unanswered"
UNFINISHED = (UNANSWERED, "loading")
Order = LoadAdapter | RemoveAdapter
Row = dict[str, object]
Seconds = Annotated[float, Meta(ge=0, le=86400)]


class AdapterLoad(Body, frozen=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    path: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None


class AdapterRemoval(Body, frozen=True, kw_only=True):
    move_after_s: Seconds | None = None


LOAD = FieldTable(
    "/admin/adapters",
    AdapterLoad,
    {
        "name": "the name by which requests ask for the adapter",
        "path": "its folder on each node, relative to the node's `--lora-dir`; default: the name",
    },
)
REMOVE = FieldTable(
    "/admin/adapters/{name}",
    AdapterRemoval,
    {"move_after_s": "seconds that its requests get to finish before they move to other nodes, or fail"},
)


class AdapterAdmin:
    """`names`: the model's own, which no adapter may take. `check_on` raises if there is no admin."""

    def __init__(
        self,
        gateway: Gateway,
        registry: Registry,
        names: Collection[str],
        move_after_s: float,
        check_on: Callable[[], None],
        wait_s: float = WAIT_S,
    ) -> None:
        self._gateway = gateway
        self._registry = registry
        self._names = names
        self._move_after_s = move_after_s
        self._check_on = check_on
        self._wait_s = wait_s
        self._load = BodyParser(LOAD, strict=True)
        self._remove = BodyParser(REMOVE, strict=True)

    async def show_or_load(self, connection: Connection) -> None:
        self._check_on()
        if connection.scope["method"] == "POST":
            await self._load_on_all(connection)
        else:
            answer = {"adapters": self._registry.adapters(), "nodes": [shown(node) for node in self._there()]}
            await connection.answer(200, msgspec.json.encode(answer))

    async def _load_on_all(self, connection: Connection) -> None:
        body = self._load.parse(await connection.body.read(MAX_BODY_BYTES)).body
        connection.subject = named_in(body)
        if not body.name.isprintable() or body.name != body.name.strip():
            raise InvalidRequest("a name has no line breaks, and no spaces around it", param="name")
        if body.name in self._names:
            raise InvalidRequest(f"{body.name} is the model's own name", param="name")
        number, path = secrets.randbits(53), body.name if body.path is None else body.path
        rows = await self._ask(lambda node: LoadAdapter(node.node_id, number, body.name, path), UNFINISHED)
        if all(row["state"] == "refused" for row in rows):
            raise Conflict("; ".join(f"{row['node']} refuses: {row['why']}" for row in rows), param="path")
        await self._answer(connection, body.name, number, rows, UNFINISHED)

    async def remove_adapter(self, connection: Connection) -> None:
        self._check_on()
        name = str(connection.scope["path_params"]["name"])
        body = self._remove.parse(await connection.body.read(MAX_BODY_BYTES) or b"{}").body
        connection.subject = {"name": name, **named_in(body)}
        if not any(has_adapter(node, name) for node in self._there()):
            raise NotFound(f"no node has an adapter {name[:100]!r}", param="name")
        limit_s = self._move_after_s if body.move_after_s is None else body.move_after_s
        number, after_ms = secrets.randbits(53), round(1000 * limit_s)
        rows = await self._ask(lambda node: RemoveAdapter(node.node_id, number, name, after_ms), (UNANSWERED,))
        await self._answer(connection, name, number, rows, (UNANSWERED, "leaving"))

    def _there(self) -> list[RegisteredNode]:
        return [node for node in self._registry if not node.is_silent]

    async def _ask(self, order_for: Callable[[RegisteredNode], Order], unfinished: Collection[str]) -> list[Row]:
        """Send the order to all nodes, and return a row for each once no row is unfinished, or after `wait_s`."""
        if not self._there():
            raise NoNodes("no node is connected now; try again")
        orders = [(node, order_for(node)) for node in self._registry]
        until, again_at = time.monotonic() + self._wait_s, 0.0
        while True:
            rows = [self._row(node, order) for node, order in orders]
            now = time.monotonic()
            if now >= until or not any(row["state"] in unfinished for row in rows):
                return rows
            if now >= again_at:
                again_at = now + AGAIN_S
                for (node, order), row in zip(orders, rows, strict=True):
                    if row["state"] == UNANSWERED:
                        self._gateway.send_order(node, order)
            await asyncio.sleep(POLL_S)

    def _row(self, node: RegisteredNode, order: Order) -> Row:
        is_here = self._registry.named(node.node_id) is node and not node.is_silent
        told = next((one for one in node.report.adapter_orders if one.number == order.number), None)
        protocol, name = node.hello.fingerprint.protocol, type(order).__name__
        if not knows(protocol, name):
            why = f"it speaks protocol {protocol}, and this needs {SINCE[name]}: upgrade it first"
            return row_of(node, "refused", why=why)
        if not is_here:
            return row_of(node, "refused", why="it does not answer, or has left")
        return row_of(node, UNANSWERED) if told is None else row_of(node, **msgspec.structs.asdict(told))

    async def _answer(
        self, connection: Connection, name: str, number: int, rows: Sequence[Row], unfinished: Collection[str]
    ) -> None:
        """`number`: GET shows it beside what became of the order. `differs`: nodes have other weights for the name,
        and requests go to most of them only."""
        status = 202 if any(row["state"] in unfinished for row in rows) else 200
        digests = {row["digest"] for row in rows if row["state"] == "loaded"}
        answer = {"name": name, "number": number, "differs": len(digests) > 1, "nodes": rows}
        await connection.answer(status, msgspec.json.encode(answer))


def has_adapter(node: RegisteredNode, name: str) -> bool:
    """Return whether a node takes requests for the adapter, or has some left, whose time a second removal changes."""
    is_leaving = any(order.name == name and order.state == "leaving" for order in node.report.adapter_orders)
    return is_leaving or any(own.name == name for own in node.hello.adapters)


def row_of(
    node: RegisteredNode, state: str, *, digest: str = "", why: str = "", requests: int = 0, **others: object
) -> Row:
    """`others`: the order's own fields, which are the same in each row."""
    return {
        "node": node.node_id, "role": node.role, "state": state, "digest": digest, "why": why, "requests": requests
    }  # fmt: skip


def shown(node: RegisteredNode) -> Row:
    orders: Sequence[AdapterOrder] = node.report.adapter_orders
    own = {adapter.name: adapter.digest for adapter in node.hello.adapters}
    return {"node": node.node_id, "role": node.role, "adapters": own, "orders": orders}
