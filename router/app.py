"""The router's wiring: the only place of this package that builds things."""

from __future__ import annotations

import gc
import os
import secrets
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from router.api.admin import AdminHandlers
from router.api.body_budget import BodyBudget
from router.api.endpoint import EndpointRules
from router.api.handlers import Handlers
from router.api.playground import Playground
from router.api.resolve import Resolver
from router.api.routes import build_routes
from router.api.stream_token import Signer
from router.api.web_rules import WebRules
from router.dispatch import Dispatcher, DispatchLimits
from router.gateway import Gateway
from router.http_protocol import HttpRules
from router.journal import Journal
from router.placement import Placer
from router.policy.choose import make_policy
from router.registry import Registry
from router.server import bind_http, serve
from router.text.interface import TextModel
from router.text.load import load_text_model
from router.tools.formats import tool_format
from shared.config.processes import RouterProcessConfig
from shared.core.errors import ConfigError
from shared.observe.library_logs import capture_libraries
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.observe.metrics import ClusterMetrics, RequestMetrics
from shared.wire.codec import AT_ROUTER
from shared.wire.descriptors import raise_limit
from shared.wire.key_files import require_private
from shared.wire.keyring import KeyRing, ring_of_router
from shared.wire.link import RouterLink
from shared.wire.link_options import LinkOptions

RID_BYTES = 8
NAME_BYTES = 2
MAX_KEY_CHARS = 4096


@dataclass(frozen=True, slots=True)
class RouterKeys:
    """What must be sent to use the API, and to move nodes. Empty: nothing."""

    api: str
    admin: str


def run(config: RouterProcessConfig) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code. Raises ConfigError for what can't work."""
    ring = ring_of_router(config.security.keys, config.router.router_id)
    config = replace(config, router=replace(config.router, router_id=own_name(config, ring)))
    log = Logger(config.router.router_id, sys.stderr, level=config.log.log_level, color=config.log.log_color)
    capture_libraries(log)
    keys = RouterKeys(
        api=read_key(config.router.api_key_file, "--api-key-file"),
        admin=read_key(config.router.admin_key_file, "--admin-key-file"),
    )
    listener = bind_http(config.router.host, config.router.port)
    try:
        link = open_link(config, ring)
        try:
            text = load_text_model(config.model.model, config.text)
            tool_format({}, config.text.tool_format or None)  # says what is wrong with the name
            gc.freeze()  # the vocabulary never changes: no collection should walk over it
            return uvloop.run(serve_all(config, listener, link, text, log, keys))
        finally:
            link.close()
    finally:
        listener.close()


def own_name(config: RouterProcessConfig, ring: KeyRing | None) -> str:
    """Return the name this router has for its nodes: given, bound by its key, or drawn, for two routers under one name
    would each be refused where the other is served."""
    if ring is not None:
        return ring.name
    return config.router.router_id or f"router-{secrets.token_hex(NAME_BYTES)}"


def open_link(config: RouterProcessConfig, ring: KeyRing | None) -> RouterLink:
    """Raise ConfigError for an endpoint that can't be bound."""
    raise_limit()
    options = LinkOptions.for_silence(config.timeouts.node_silence_s, limits=AT_ROUTER, ring=ring)
    return RouterLink(config.router.node_endpoint, options)


async def serve_all(
    config: RouterProcessConfig,
    listener: socket.socket,
    link: RouterLink,
    text: TextModel,
    log: Logger,
    keys: RouterKeys,
) -> int:
    """Builds everything that lives in the event loop, and runs it."""
    prometheus = CollectorRegistry()
    metrics = RequestMetrics(prometheus)
    follows_caches = make_policy(config.router.policy).reads_caches
    registry = Registry(config.timeouts.node_silence_s, follows_caches=follows_caches)
    gateway = make_gateway(config, registry, link, ClusterMetrics(prometheus), log)
    handlers = Handlers(
        Resolver(config.model.public_name, text, config.limits, registry.adapters, config.text.tool_format),
        gateway,
        registry,
        metrics,
        prometheus,
        max_context=config.model.max_context,
        strict_fields=config.router.strict_fields,
        max_json_depth=config.http.max_json_depth,
        seers=tuple(filter(None, (keys.api, keys.admin))) if keys.api else (),
        signer=Signer(keys.api),
    )
    rules = EndpointRules(
        log=log,
        metrics=metrics,
        api_key=keys.api,
        retry_after_s=config.timeouts.retry_after_s,
        slow_reader_s=config.timeouts.slow_reader_s,
        web=WebRules(config.http.allowed_hosts, config.http.cors_origins),
        bodies=BodyBudget(config.http.max_bodies_bytes),
    )
    is_on = bool(keys.admin) or config.router.admin_without_key
    admin = AdminHandlers(gateway, registry, config.timeouts.move_after_s, is_on)
    app = build_routes(rules, handlers, Playground(), admin, keys.admin)
    http_rules = HttpRules(config.http, metrics, LogOnce(log), config.timeouts.retry_after_s)
    return await serve(app, http_rules, listener, gateway, log, config.timeouts.shutdown_s)


def make_gateway(
    config: RouterProcessConfig, registry: Registry, link: RouterLink, metrics: ClusterMetrics, log: Logger
) -> Gateway:
    identity = (config.router.router_id, new_epoch())
    placer = Placer(registry, make_policy(config.router.policy), config.router.local_prefill_tokens)
    limits = DispatchLimits(
        max_open=config.limits.max_open_requests,
        max_attempts=config.timeouts.max_attempts,
        request_timeout_s=config.timeouts.request_timeout_s,
        resume_wait_s=config.timeouts.resume_wait_s,
    )
    dispatcher = Dispatcher(identity, registry, placer, Journal(lambda: secrets.token_hex(RID_BYTES)), limits)
    return Gateway(identity, registry, dispatcher, link, metrics, log, wire_counts=link.stats.counts)


def read_key(path: str, flag: str) -> str:
    """The key that must be sent, "" for none. A file that others may read is refused, for then they have the key."""
    if not path:
        return ""
    file = Path(path).expanduser()
    try:
        with file.open(encoding="ascii") as opened:
            require_private(os.fstat(opened.fileno()), file)
            key = opened.read(MAX_KEY_CHARS).strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error.message}") from None
    if not key:
        raise ConfigError(f"{flag} {path}: the file is empty")
    return key


def new_epoch() -> int:
    """Rises with every start, and differs between two starts in the same millisecond."""
    return (time.time_ns() // 1_000_000) << 16 | secrets.randbits(16)
