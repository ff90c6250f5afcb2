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

T = TypeVar("T")
OK, NO_KEY, UNREADY = 200, 401, 503


class NoRouterError(Exception):
    """No server answers, or the server is not a usable router."""


class ReadyAnswer(msgspec.Struct, frozen=True):
    ready: bool
    pair: bool
    nodes: list[object]
    misfits: tuple[Misfit, ...]
    strangers: tuple[ForeignNode, ...] = ()


class StatusRouter(msgspec.Struct, frozen=True):
    epoch: str
    time: float
    endpoint: str


class StatusAnswer(msgspec.Struct, frozen=True):
    router: StatusRouter
    nodes: tuple[SeenNode, ...]
    unreachable: tuple[SeenPair, ...] = ()


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
    return ReadyFacts(answer.ready, answer.pair, len(answer.nodes), answer.misfits, answer.strangers)


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
    router, epoch = answer.router, int(answer.router.epoch, 16)
    return Status(router.time, epoch, router.endpoint, answer.nodes, asked_s, answered_s, answer.unreachable), ""


def decode(body: bytes, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise NoRouterError(f"{path} can't be read: {error}") from None
