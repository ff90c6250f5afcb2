"""Build the router's components and run them."""

from __future__ import annotations

import asyncio
import gc
import math
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import uvloop
from prometheus_client import CollectorRegistry

from router.api.admin.admin import AdminHandlers
from router.api.answer.stream_token import Signer
from router.api.ask.resolve import Resolver
from router.api.ask.sampling_defaults import load_sampling_defaults
from router.api.endpoint import EndpointRules
from router.api.site.body_reader import BodyReader
from router.api.site.generation_handlers import GenerationHandlers
from router.api.site.model_handlers import ModelHandlers
from router.api.site.routes import PathHandlers, build_routes
from router.api.site.served_model import ServedModel
from router.api.site.state_handlers import StateHandlers
from router.api.site.token_handlers import TokenHandlers
from router.certify.key_follower import SigningKeyFollower
from router.certify.signing import AnswerSigner, read_signing_key
from router.dispatch.dispatcher import Dispatcher, DispatchLimits
from router.dispatch.gateway import Gateway
from router.fleet.gateway_metrics import GatewayMetrics
from router.fleet.registry import Registry
from router.http.body_budget import BodyBudget
from router.http.certificate import Certificate, show_expiry
from router.http.freed_memory import return_freed_memory
from router.http.full_collections import run_full_collections
from router.http.protocol import HttpRules
from router.http.server import bind_http, serve
from router.http.web_rules import WebRules
from router.policy.placement import Placer
from router.policy.policies import make_policy
from router.queue.desk import Desk
from router.queue.rate_limit import RateLimits
from router.queue.spending import Ledger
from router.requests.journal import Journal
from router.tenants.book import KeysFollower, Tenants
from router.tenants.keys_file import ADMIN_FLAG, read_admins, read_keys
from router.text.load import load_text_model
from router.tools.detect import Speech, speech_of
from router.tools.reasoning import thought_tags
from router.tools.response_template import RegionKind
from shared.config.machine.systemd import notify_socket
from shared.config.models import shipped_model
from shared.config.processes import RouterProcessConfig
from shared.config.settings.http_settings import ANY
from shared.core.sampling_params import SamplingValues
from shared.device.malloc import share_one_heap
from shared.observe.last_faults import LastFaults
from shared.observe.library_logs import capture_libraries
from shared.observe.log import Logger, open_log
from shared.observe.log_once import LogOnce
from shared.observe.metrics import ClusterMetrics, RequestMetrics
from shared.observe.service_manager import CALL_EVERY_S, ServiceManager
from shared.observe.tenant_metrics import TenantMetrics
from shared.observe.tracer import open_tracer
from shared.wire.codec import AT_ROUTER
from shared.wire.descriptors import raise_limit
from shared.wire.keys.keyring import KeyRing, ring_of_router
from shared.wire.zeromq.link import RouterLink
from shared.wire.zeromq.link_options import LinkOptions

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

RID_BYTES = 8
NAME_BYTES = 2


@dataclass(frozen=True, slots=True)
class RouterKeys:
    """`answers`: signs certificates of answers, if the router has a key for them."""

    tenants: Tenants
    operators: Tenants
    answers: Ed25519PrivateKey | None = None


def run(config: RouterProcessConfig) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code. Raise ConfigError for unusable settings."""
    ring = ring_of_router(config.security.keys, config.router.router_id)
    config = replace(config, router=replace(config.router, router_id=own_name(config, ring)))
    faults = LastFaults()
    log = open_log(config.router.router_id, config.log, faults.heed)
    capture_libraries(log)
    share_one_heap()
    keys = RouterKeys(
        tenants=Tenants(read_keys(config.router.api_key_file)),
        operators=Tenants(read_admins(config.router.admin_key_file)),
        answers=read_signing_key(config.records.certificate_key),
    )
    http = config.http
    certificate = Certificate(http.tls_cert, http.tls_key, log) if http.has_tls else None
    listener = bind_http(config.router.host, config.router.port)
    try:
        speech = speech_of(load_text_model(config.model.model, config.text), config.text.tool_format)
        tell_speech(log, speech)
        defaults = load_sampling_defaults(config.text.sampling_defaults, config.model.model)
        log.info(
            "requests without sampling values get these",
            **asdict(defaults.values),
            source=defaults.source,
            unused=",".join(defaults.unused) or "none",
        )
        link = open_link(config, ring)  # opened last, because unread connections have no limits
        try:
            gc.freeze()  # exempt the constant vocabulary from garbage collection
            return uvloop.run(
                serve_all(config, listener, link, speech, defaults.values, log, faults, keys, certificate)
            )
        finally:
            link.close()
    finally:
        listener.close()


def tell_speech(log: Logger, speech: Speech) -> None:
    """Say at start how the model calls tools and thinks, and warn if its calls can't be read."""
    if speech.problem:
        log.warning("the model's response_template is not used", problem=speech.problem)
    if speech.template is not None:
        log.info(
            "answers are read by the model's response_template: tool_choice can only be auto or none",
            thoughts=speech.template.thinks,
            calls=speech.template.region(RegionKind.CALLS) is not None,
        )
        return
    tags = thought_tags(speech.text.template.sources)
    thoughts = tags.opening.strip() if tags is not None else "none"
    if speech.calls is None and speech.text.template.sources:
        log.warning(
            "the chat template reads tools in a format that is not known: calls arrive as text, and tool_choice can "
            "only be auto; --tool-format names a format",
            thoughts=thoughts,
        )
        return
    calls = speech.calls.name if speech.calls is not None else "none"
    log.info("how the model calls tools and thinks", calls=calls, told_by=speech.source, thoughts=thoughts)


def own_name(config: RouterProcessConfig, ring: KeyRing | None) -> str:
    """Return the name from the key ring, else from the settings, else a random name. If routers have equal names, a
    node serves only the first."""
    if ring is not None:
        return ring.name
    return config.router.router_id or f"router-{secrets.token_hex(NAME_BYTES)}"


def open_link(config: RouterProcessConfig, ring: KeyRing | None) -> RouterLink:
    """Raise ConfigError if the node endpoint can't be bound."""
    raise_limit()
    options = LinkOptions.for_silence(config.timeouts.node_silence_s, limits=AT_ROUTER, ring=ring)
    return RouterLink(config.router.node_endpoint, options)


async def serve_all(
    config: RouterProcessConfig,
    listener: socket.socket,
    link: RouterLink,
    speech: Speech,
    defaults: SamplingValues,
    log: Logger,
    faults: LastFaults,
    keys: RouterKeys,
    certificate: Certificate | None,
) -> int:
    prometheus = CollectorRegistry()
    metrics = RequestMetrics(prometheus)
    if certificate is not None:
        show_expiry(prometheus, certificate.until)
    follows_caches = make_policy(config.router.policy).reads_caches or config.router.pull_prefixes == "on"
    silence_s, router_id = config.timeouts.node_silence_s, config.router.router_id
    registry = Registry(silence_s, follows_caches=follows_caches, router_id=router_id)
    desk = Desk(keys.tenants, TenantMetrics(prometheus), LogOnce(log))
    gateway = make_gateway(config, registry, link, ClusterMetrics(prometheus), log, keys.tenants, desk.limits)
    GatewayMetrics(
        prometheus, registry, lambda: sum(row.requests for row in gateway.waiting()), registry.adapters, time.time
    )
    tracer = open_tracer(router_id, config.trace, log, config.records.trace_sample)
    answers = None if keys.answers is None else AnswerSigner(keys.answers, speech.text.template.sources)
    once = LogOnce(log, interval_s=math.inf)
    limits, router = config.limits, config.router
    bodies = BodyReader(metrics, once, limits.max_body_bytes, router.strict_fields, config.http.max_json_depth)
    model = ServedModel(make_resolver(config, registry, speech, defaults), registry, config.model.max_context)
    signer = Signer(keys.tenants.now.stream_secret or keys.operators.now.stream_secret)  # equal on all routers
    rules = endpoint_rules(config, log, metrics, keys.tenants)
    is_on = keys.operators.asks_for_keys or router.admin_without_key
    times, names = config.timeouts, config.model.public_names
    handlers = PathHandlers(
        GenerationHandlers(model, bodies, gateway, desk, signer, answers, tracer),
        TokenHandlers(model, bodies),
        ModelHandlers(model, bodies),
        StateHandlers(registry, lambda: gateway.is_stopping, prometheus, keys.tenants, keys.operators),
        AdminHandlers(gateway, registry, times.move_after_s, is_on, desk.limits, names, faults),
    )
    app = build_routes(rules, handlers, keys.operators)
    http_rules = HttpRules(config.http, metrics, LogOnce(log), times.retry_after_s, times.slow_reader_s)
    tasks = start_background(config, keys, log, gateway, certificate, answers)
    try:
        return await serve(app, http_rules, listener, gateway, log, config.timeouts.shutdown_s, certificate)
    finally:
        for task in tasks:
            task.cancel()
        if tracer is not None:
            tracer.close()


def endpoint_rules(
    config: RouterProcessConfig, log: Logger, metrics: RequestMetrics, tenants: Tenants
) -> EndpointRules:
    return EndpointRules(
        log=log,
        metrics=metrics,
        tenants=tenants,
        retry_after_s=config.timeouts.retry_after_s,
        slow_reader_s=config.timeouts.slow_reader_s,
        web=WebRules(allowed_hosts(config), config.http.cors_origins),
        bodies=BodyBudget(config.http.max_bodies_bytes, config.limits.max_body_bytes),
    )


def allowed_hosts(config: RouterProcessConfig) -> tuple[str, ...]:
    """With TLS a browser has compared the host name with the certificate, so any name will do."""
    return (ANY,) if config.http.has_tls else (*config.http.allowed_hosts, config.router.host)


def make_resolver(
    config: RouterProcessConfig, registry: Registry, speech: Speech, defaults: SamplingValues
) -> Resolver:
    name, *others = config.model.public_names
    most = config.limits.default_max_tokens or shipped_model.max_tokens(config.model.model)
    return Resolver(
        name,
        speech.text,
        replace(config.limits, default_max_tokens=most),
        registry.adapters,
        speech.calls,
        defaults,
        keeps_parts=config.router.unsupported_parts == "placeholder",
        is_strict=config.router.strict_fields,
        other_names=tuple(others),
        opens_objects=config.text.open_objects,
        template=speech.template,
    )


def start_background(
    config: RouterProcessConfig,
    keys: RouterKeys,
    log: Logger,
    gateway: Gateway,
    certificate: Certificate | None,
    answers: AnswerSigner | None,
) -> list[asyncio.Task[None]]:
    """The caller cancels the tasks."""
    renewed = [] if certificate is None else [asyncio.create_task(certificate.follow())]
    if answers is not None:
        follower = SigningKeyFollower(config.records.certificate_key, answers, log)
        renewed.append(asyncio.create_task(follower.follow()))
    return [
        *renewed,
        asyncio.create_task(KeysFollower(config.router.api_key_file, keys.tenants, log).follow()),
        asyncio.create_task(KeysFollower(config.router.admin_key_file, keys.operators, log, ADMIN_FLAG).follow()),
        asyncio.create_task(return_freed_memory()),
        asyncio.create_task(run_full_collections(lambda: gateway.num_open)),
        asyncio.create_task(tell_manager(ServiceManager(notify_socket()), lambda: gateway.is_stopping)),
    ]


async def tell_manager(manager: ServiceManager, is_stopping: Callable[[], bool]) -> None:
    """Speak to systemd, from the loop that serves, until this task is cancelled at the router's end."""
    try:
        while manager.listens:
            manager.tell(is_leaving=is_stopping())
            await asyncio.sleep(CALL_EVERY_S)
    finally:
        manager.tell(is_leaving=True)
        manager.close()


def make_gateway(
    config: RouterProcessConfig,
    registry: Registry,
    link: RouterLink,
    metrics: ClusterMetrics,
    log: Logger,
    tenants: Tenants,
    rates: RateLimits,
) -> Gateway:
    identity = (config.router.router_id, new_epoch())
    placer = Placer(registry, make_policy(config.router.policy), config.router.local_prefill_tokens)
    limits = DispatchLimits(
        max_open=config.limits.max_open_requests,
        max_attempts=config.timeouts.max_attempts,
        request_timeout_s=config.timeouts.request_timeout_s,
        resume_wait_s=config.timeouts.resume_wait_s,
        max_queued=config.limits.max_queued_requests,
        pulls_prefixes=config.router.pull_prefixes == "on",
    )
    dispatcher = Dispatcher(identity, registry, placer, Journal(lambda: secrets.token_hex(RID_BYTES)), limits)
    ledger = Ledger(identity, tenants.now.stream_secret, tenants, rates, dispatcher.queue, time.monotonic())
    return Gateway(identity, registry, dispatcher, link, metrics, log, wire_counts=link.stats.counts, ledger=ledger)


def new_epoch() -> int:
    """Return a number that grows with each start. Random bits distinguish starts in one millisecond."""
    return (time.time_ns() // 1_000_000) << 16 | secrets.randbits(16)
