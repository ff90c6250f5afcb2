"""Ask a router for its state once, and for its metrics twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from deploy.metrics_page import Page, parse_page
from deploy.router_http import UNREACHABLE, RouterHttp, error_message
from deploy.router_url import no_answer
from deploy.tools.doctor.facts import Cluster, ForeignNode, Misfit, ReadyFacts, SeenNode, SeenPair, Status
from shared.wire.messages import Hello

T = TypeVar("T")
OK, NO_KEY, UNREADY = 200, 401, 503


class NoRouterError(Exception):
    """No server answers, or the server is not a usable router."""


class ReadyMisfit(msgspec.Struct, frozen=True):
    a: str
    b: str
    differs: str


class ReadyStranger(msgspec.Struct, frozen=True):
    node: str
    protocol: int
    ours: int


class ReadyAnswer(msgspec.Struct, frozen=True):
    ready: bool
    pair: bool
    nodes: list[object]
    misfits: list[ReadyMisfit]
    strangers: list[ReadyStranger] = []


class StatusRouter(msgspec.Struct, frozen=True):
    epoch: str
    time: float
    endpoint: str


class StatusNode(msgspec.Struct, frozen=True):
    state: str
    last_seen_s: float
    known_s: float
    hello: Hello
    lacks_routers: tuple[str, ...] = ()


class StatusPair(msgspec.Struct, frozen=True):
    prefill: str
    decode: str
    endpoint: str
    since_s: float
    tries: int


class StatusAnswer(msgspec.Struct, frozen=True):
    router: StatusRouter
    nodes: list[StatusNode]
    unreachable: list[StatusPair] = []


def look_at_router(http: RouterHttp, url: str, interval_s: float, sleep: Callable[[float], None]) -> Cluster:
    """Raise NoRouterError if a look fails."""
    before = ask_page(http)
    sleep(interval_s)
    ready, after = ask_ready(http), ask_page(http)
    status, no_status = ask_status(http)
    return Cluster(url, ready, before, after, interval_s, status, no_status)


def ask_router(http: RouterHttp, path: str) -> tuple[int, bytes]:
    try:
        return http.ask("GET", path)
    except UNREACHABLE as error:
        raise NoRouterError(no_answer(http.url, error).message) from None


def ask_page(http: RouterHttp) -> Page:
    status, body = ask_router(http, "/metrics")
    if status == NO_KEY:
        raise NoRouterError(
            "the router shows its nodes only to clients with a key: give --admin-key-file or --api-key-file"
        )
    if status != OK:
        raise NoRouterError(f"no Baton router: /metrics answers {status}")
    try:
        return parse_page(body.decode("utf-8"))
    except ValueError:
        raise NoRouterError("no Baton router: /metrics is not a page of metrics") from None


def ask_ready(http: RouterHttp) -> ReadyFacts:
    status, body = ask_router(http, "/ready")
    if status not in (OK, UNREADY):
        raise NoRouterError(f"no Baton router: /ready answers {status}")
    answer = decode(body, ReadyAnswer, "/ready")
    misfits = tuple(Misfit(one.a, one.b, one.differs) for one in answer.misfits)
    strangers = tuple(ForeignNode(one.node, one.protocol, one.ours) for one in answer.strangers)
    return ReadyFacts(answer.ready, answer.pair, len(answer.nodes), misfits, strangers)


def ask_status(http: RouterHttp) -> tuple[Status | None, str]:
    """Return (status, "") or (None, reason)."""
    asked_s = time.time()
    status, body = ask_router(http, "/admin/status")
    answered_s = time.time()
    if status != OK:
        return None, f"/admin/status answers {status}: {error_message(body) or 'no reason given'}"
    try:
        answer = decode(body, StatusAnswer, "/admin/status")
    except NoRouterError as error:
        return None, f"router and doctor have different versions: {error}"
    nodes = tuple(
        SeenNode(node.state, node.last_seen_s, node.known_s, node.hello, node.lacks_routers) for node in answer.nodes
    )
    router = answer.router
    pairs = tuple(SeenPair(**msgspec.structs.asdict(pair)) for pair in answer.unreachable)
    return Status(router.time, int(router.epoch, 16), router.endpoint, nodes, asked_s, answered_s, pairs), ""


def decode(body: bytes, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise NoRouterError(f"{path} can't be read: {error}") from None
