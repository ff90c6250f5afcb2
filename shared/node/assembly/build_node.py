"""Build a node around its core: links, facts for peers, and the role's side."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shared.config.processes import NodeParts
from shared.config.settings.endpoints import tcp_endpoint
from shared.device.malloc import give_freed_memory_back
from shared.device.passed_checks import name_of_visible
from shared.device.torch_cuda import TorchCuda
from shared.node.assembly.build_memory import transports
from shared.node.assembly.fingerprint import build_name, make_fingerprint
from shared.node.loop.context import NodeContext, NodeFacts
from shared.node.loop.node import Node
from shared.node.loop.side import Side
from shared.node.machine.cores import NodeCores
from shared.node.machine.kv_events import KvEvents
from shared.node.records.core import NodeCore
from shared.node.records.request_spans import RequestSpans
from shared.node.records.tombstones import Tombstones
from shared.node.routers.dialled import Routers
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.observe.node_metrics import NodeMetrics
from shared.transfer.transports import CHECKED, about_transports, host_id, open_group
from shared.wire.descriptors import raise_limit
from shared.wire.keys.keyring import KeyRing
from shared.wire.zeromq.link import NodeLinks
from shared.wire.zeromq.link_options import LinkOptions

# limit on each part of a message to a prefill node from peers that dial it to ask for pages (Pull)
MOST_TO_PREFILL_BYTES = 1 << 20
SideOf = Callable[[NodeContext], Side]


def open_links(parts: NodeParts, node_id: str, epoch: int, ring: KeyRing | None) -> NodeLinks:
    node = parts.node
    raise_limit()
    caller_bytes = MOST_TO_PREFILL_BYTES if node.role == "prefill" else 0
    options = LinkOptions.for_silence(node.silence_s, ring=ring, caller_bytes=caller_bytes)
    options = replace(options, after_burst=give_freed_memory_back)
    return NodeLinks(node_id, epoch, tcp_endpoint(node.bind_host, node.bind_port), options)


def build_node(
    parts: NodeParts,
    core: NodeCore,
    links: NodeLinks,
    log: Logger,
    make_side: SideOf,
    cores: NodeCores,
    routers: tuple[str, ...],
    spans: RequestSpans,
) -> Node:
    facts = node_facts(parts, core, links)
    ctx = NodeContext(
        core=core,
        facts=facts,
        routers=Routers(routers),
        tombstones=Tombstones(facts.lease_s),
        metrics=NodeMetrics(),
        log=LogOnce(log),
        clock=time.monotonic,
        wire_counts=links.counts,
        wake=links.wakeup.set,
        cores=cores.describe_cores,
        spans=spans,
        make_group=partial(open_group, host=parts.node.bind_host, device=core.pool.device, wake=links.wakeup.set),
    )
    return Node(ctx, make_side(ctx), open_events(parts, core, links))


def open_events(parts: NodeParts, core: NodeCore, links: NodeLinks) -> KvEvents | None:
    """Return None without an address for events. Raise ConfigError if the address can't be had."""
    asked = parts.events
    if not asked.kv_events_endpoint:
        return None
    node_id, _, _ = links.identity.partition("@")
    topic = asked.kv_events_topic or f"kv@{node_id}@{parts.model.public_name}"
    publisher = links.open_publisher(asked.kv_events_endpoint, topic)
    return KvEvents(publisher, core.settings.page_size, core.settings.drafts.key_lookahead)


def node_facts(parts: NodeParts, core: NodeCore, links: NodeLinks) -> NodeFacts:
    node_id, _, epoch = links.identity.partition("@")
    page_size, drafter = parts.memory.page_size, core.engine.worker.drafter
    device, is_auto = core.settings.device, parts.node.transport == "auto"
    offered = transports(parts, device)
    shares_gpus = is_auto and CHECKED in offered
    return NodeFacts(
        role=parts.node.role,
        node_id=node_id,
        epoch=int(epoch, 16),
        endpoint=links.endpoint,
        host_id=host_id(name_of_visible(TorchCuda()) if shares_gpus else ""),
        transports=offered,
        fingerprint=make_fingerprint(
            core.spec,
            core.pool.planes,
            page_size,
            drafter,
            build_name(),
            core.scheduler.intake.grammar_version,
            num_parts=core.pool.num_parts,
        ),
        max_context=core.settings.max_context,
        max_running=core.kv.rows.num_total,
        max_waiting=parts.sched.max_waiting,
        heartbeat_s=parts.node.heartbeat_s,
        lease_s=parts.node.lease_s,
        silence_s=parts.node.silence_s,
        about_transports=about_transports(device, checked=shares_gpus) if is_auto else "",
        lora_dir=parts.adapters.lora_dir,
    )
