"""/admin/*, for the operators' key: show, drain or restart nodes, change roles, abort answers, change adapters."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.api.admin.admin_adapters import AdapterAdmin
from router.api.fields.fields import Body, FieldTable, named_in
from router.api.fields.parse import BodyParser
from router.dispatch.gateway import Gateway
from router.fleet.registry import RegisteredNode, Registry
from router.http.connection import Connection
from router.http.errors import AdminIsOff, Conflict, MissingRight, NotFound, UnknownNode
from router.queue.rate_limit import RateLimits
from router.requests.pairs import BrokenPair
from router.tenants.tenant import CHANGE
from shared.config.settings.endpoints import KEY_MARK
from shared.core.errors import Aborted, InvalidRequest
from shared.core.states import NodeState
from shared.observe.last_faults import LastFaults
from shared.wire.messages import Drain

MAX_BODY_BYTES = 4096
Then = Literal["stop", "restart", "prefill", "decode"]
Seconds = Annotated[float, Meta(ge=0, le=86400)]


class DrainRequest(Body, frozen=True, kw_only=True):
    node: Annotated[str, Meta(min_length=1, max_length=256)]
    then: Literal["stop", "restart"] = "stop"
    move_after_s: Seconds | None = None
    force: bool = False


class RoleRequest(Body, frozen=True, kw_only=True):
    node: Annotated[str, Meta(min_length=1, max_length=256)]
    role: Literal["prefill", "decode"]
    least: Annotated[int, Meta(ge=0, le=4096)] = 0
    move_after_s: Seconds | None = None
    force: bool = False


class AbortRequest(Body, frozen=True, kw_only=True):
    id: Annotated[str, Meta(min_length=1, max_length=256)]


LEAVING = {
    "node": "the node's id",
    "move_after_s": "seconds that its requests get to finish before they move to other nodes",
    "force": "leave even when no other node can serve",
}
DRAIN = FieldTable("/admin/drain", DrainRequest, LEAVING | {"then": "`stop`, or `restart` in the same role"})
ROLE = FieldTable(
    "/admin/role",
    RoleRequest,
    LEAVING
    | {
        "role": "the role that the node comes back in",
        "least": "how many other nodes its old role must keep, else 409; two calls at once then can't empty a role",
    },
)
ABORT = FieldTable("/admin/abort", AbortRequest, {"id": "the answer's id, as its client sees it"})


class AdminHandlers:
    """No method waits until a node has left: the status shows nodes that are leaving."""

    def __init__(
        self,
        gateway: Gateway,
        registry: Registry,
        move_after_s: float,
        is_on: bool,
        limits: RateLimits,
        names: Collection[str],
        faults: LastFaults,
    ) -> None:
        """`names`: of the model itself."""
        self._gateway = gateway
        self._registry = registry
        self._move_after_s = move_after_s
        self._is_on = is_on
        self._limits = limits
        self._faults = faults
        self.adapters = AdapterAdmin(gateway, registry, names, move_after_s, self._check_on)
        self._drain = BodyParser(DRAIN, strict=True)
        self._role = BodyParser(ROLE, strict=True)
        self._abort = BodyParser(ABORT, strict=True)

    async def status(self, connection: Connection) -> None:
        self._check_on()
        now = time.monotonic()
        nodes = [node_status(node, now) for node in self._registry]
        router_id, epoch = self._gateway.identity
        router = {"id": router_id, "epoch": f"{epoch:x}", "time": time.time(), "endpoint": self._gateway.node_endpoint}
        unreachable = [pair_status(pair, now) for pair in self._gateway.broken_pairs()]
        answer = {
            "router": router,
            "open_requests": self._gateway.num_open,
            "queue": self._gateway.waiting(),
            "limits": self._limits.left(now),
            "nodes": nodes,
            "unreachable": unreachable,
            **self._registry.misfit_status(now),
            "faults": self._faults.newest_first(),
        }
        await connection.answer(200, msgspec.json.encode(answer))

    async def drain(self, connection: Connection) -> None:
        self._check_on()
        body = self._drain.parse(await connection.body.read(MAX_BODY_BYTES)).body
        connection.subject = named_in(body)
        if body.force and CHANGE not in connection.tenant.rights:
            raise MissingRight("with force requests may fail, so it needs the right change")
        await self._leave(connection, self._node(body.node, body.force), body.then, body.move_after_s)

    async def role(self, connection: Connection) -> None:
        self._check_on()
        body = self._role.parse(await connection.body.read(MAX_BODY_BYTES)).body
        connection.subject = named_in(body)
        node = self._node(body.node, body.force)
        if node.role == body.role:
            raise InvalidRequest(f"{body.node} is a {body.role} node already", param="role")
        others = [one for one in self._registry if one.role == node.role and one.is_there and one is not node]
        if len(others) < body.least:
            raise Conflict(f"{body.node} stays: {node.role} needs {body.least} other nodes", param="least")
        await self._leave(connection, node, body.role, body.move_after_s)

    async def abort(self, connection: Connection) -> None:
        self._check_on()
        body = self._abort.parse(await connection.body.read(MAX_BODY_BYTES)).body
        connection.subject = named_in(body)
        if not self._gateway.abort(body.id, Aborted("the request was aborted by the server's operator")):
            raise NotFound(f"no answer {body.id!r} is under way", param="id")
        await connection.answer(200, msgspec.json.encode({"id": body.id}))

    def _check_on(self) -> None:
        if not self._is_on:
            raise AdminIsOff("admin is off: start the router with --admin-key-file")

    def _node(self, name: str, force: bool) -> RegisteredNode:
        node = self._registry.named(name)
        if node is None:
            known = ", ".join(sorted(other.node_id for other in self._registry)) or "none"
            raise UnknownNode(f"there is no node {name!r}; known are {known}", param="node")
        others = [other for other in self._registry.usable(time.monotonic()) if other is not node]
        if not others and not force:
            raise Conflict(f"{name} is the last node that serves; with force it leaves anyway", param="node")
        return node

    async def _leave(
        self, connection: Connection, node: RegisteredNode, then: Then, move_after_s: float | None
    ) -> None:
        limit_s = self._move_after_s if move_after_s is None else move_after_s
        self._gateway.drain(node, Drain(node.node_id, then), limit_s)
        answer = {"node": node.node_id, "epoch": f"{node.hello.epoch:x}", "then": then}
        await connection.answer(202, msgspec.json.encode(answer))


def pair_status(pair: BrokenPair, now: float) -> dict[str, object]:
    return {
        "prefill": pair.prefill.node_id,
        "decode": pair.decode.node_id,
        "endpoint": pair.decode.hello.node_endpoint.partition(KEY_MARK)[0],
        "since_s": round(max(0.0, now - pair.since), 3),
        "tries": pair.num_faults,
    }


def node_status(node: RegisteredNode, now: float) -> dict[str, object]:
    load, figures = node.report.load, node.figures
    speed, handoff_s = figures.prompts.speed(now), figures.prompts.handoff(now)
    return {
        "node": node.node_id,
        "role": node.role,
        "epoch": f"{node.hello.epoch:x}",
        "state": state_of(node, now),
        "last_seen_s": round(max(0.0, now - node.last_seen), 3),
        "known_s": round(now - node.known_since, 3),
        "hello": node.hello,
        "open_sequences": node.ours.open_sequences,
        "open_prompt_tokens": node.ours.open_prompt_tokens,
        "dispatched": node.ours.dispatched,
        "rows": load.rows if load else {},
        "pages": load.pages if load else {},
        "kept_pages": load.kept_pages if load else 0,
        "waiting": load.waiting if load else 0,
        "waiting_tokens": node.report.waiting_tokens,
        "hands_over": load.hands_over if load else {},
        "cores": load.cores if load else "",
        "others": node.report.others,
        "lacks_routers": node.report.lacks,
        # Recent measurements follow. Only prefill nodes have `handoff_s`.
        "prompt_tokens_per_s": round(speed.tokens_per_s, 1) if speed else None,
        "prompt_step_s": round(speed.step_s, 6) if speed else None,
        "handoff_s": round(handoff_s, 6) if handoff_s is not None else None,
        "slowness": round(figures.slowness.times, 2),  # step times divided by the peers' step times
        "share": figures.slowness.share,
    }


def state_of(node: RegisteredNode, now: float) -> NodeState:
    if node.is_silent:
        return NodeState.SILENT
    if node.leaving is not None:
        return NodeState.DRAINING
    return NodeState.READY if node.breaker.allows(now) else NodeState.AVOIDED
