"""Receive nodes' messages, apply the dispatcher's Effects, wake HTTP tasks and tick.

Everything runs on the event loop's thread; nothing blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.reports import report_of
from router.fleet.leaving import By
from router.fleet.registry import ROLES, RegisteredNode, Registry, misfits_of
from router.fleet.slowness import Share
from router.queue.admission import Waiting
from router.queue.spending import Ledger, Reading, carriers
from router.requests.effects import Effects, Failure
from router.requests.mailbox import Mailbox
from router.requests.new_request import NewRequest
from router.requests.pairs import BrokenPair
from router.tenants.tenant import Tenant
from shared.config.settings.silence import link_silence
from shared.core.errors import BatonError, NoNodes
from shared.core.trace_context import traced
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.observe.metric_names import REFUSED_EPOCH, REFUSED_PREFIX
from shared.observe.metrics import ClusterMetrics
from shared.wire.codec import key_of
from shared.wire.messages import (
    PROTOCOL_VERSION,
    Begun,
    CacheEvents,
    CacheReplay,
    Drain,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    LoadAdapter,
    Message,
    Release,
    RemoveAdapter,
    Scores,
    Spending,
    Tokens,
    Unwelcome,
    Welcome,
)
from shared.wire.peers import Inbound, PeerClosed, Received, WireTotals

TICK_S = 0.25
# This router was frozen if its loop stood still for this share of the shortest silence that ends a link. The rest of
# that silence covers messages in flight.
AWAY_SHARE = 0.9
TURN_S = 0.005  # CPU time, as in shared/wire/zeromq/budget.py
SWEEP_S = 60.0
NODE_LINES = 10  # log lines of each kind about each node in a minute; enough for every loss of an honest node


class Link(Protocol):
    """RouterLink, or the simulated network of the tests."""

    @property
    def endpoint(self) -> str: ...

    async def receive(self) -> Sequence[Inbound]: ...

    def send(self, peer: str, message: Message) -> bool: ...


class Gateway:
    """`is_stopping`: new requests are refused, open requests continue."""

    def __init__(
        self,
        identity: tuple[str, int],
        registry: Registry,
        dispatcher: Dispatcher,
        link: Link,
        metrics: ClusterMetrics,
        log: Logger,
        clock: Callable[[], float] = time.monotonic,
        wire_counts: Counter[str] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._identity = identity
        self._wire_counts: Counter[str] = Counter() if wire_counts is None else wire_counts
        self._wire = WireTotals()
        self._registry = registry
        self._dispatcher = dispatcher
        self._link = link
        self._ledger = ledger
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._log_once = LogOnce(log)
        self._node_log = LogOnce(log, lines=NODE_LINES)
        self._mailboxes: dict[str, Mailbox] = {}
        self._awake_at: float | None = None
        self._sweep_at = -float("inf")
        self.is_stopping = False

    def open(self, requests: Sequence[NewRequest], answer_id: str = "") -> Mailbox:
        """Open requests and return their mailbox, which the caller closes. Raise the errors of Dispatcher.open."""
        if self.is_stopping:
            raise NoNodes("this server is shutting down")
        rids, effects = self._dispatcher.open(requests, self._clock())
        mailbox = Mailbox(answer_id)
        mailbox.rids = rids
        self._mailboxes.update(dict.fromkeys(rids, mailbox))
        trace = traced(requests[0].trace) if requests else {}
        self._log.debug("an answer is begun", answer=answer_id, requests=",".join(rids), **trace)
        self._apply(effects)
        return mailbox

    def check_room(self, tenant: Tenant) -> None:
        """Raise QueueFull if no request of the tenant can be opened now."""
        self._dispatcher.check_room(tenant, self._clock())

    def close(self, mailbox: Mailbox) -> None:
        """Abort an answer's open requests. Idempotent."""
        self._apply(self._dispatcher.close(mailbox.rids, mailbox.answered, self._clock()))
        for rid in mailbox.rids:
            self._mailboxes.pop(rid, None)

    def abort(self, answer_id: str, error: BatonError) -> bool:
        """End an open answer with an error. Return False for an unknown answer."""
        found = [(rid, mailbox) for rid, mailbox in self._mailboxes.items() if mailbox.answer_id == answer_id]
        for rid, mailbox in found:
            mailbox.put(Failure(rid, error))
        self._apply(self._dispatcher.cancel([rid for rid, _ in found], self._clock()))
        return bool(found)

    def close_sequence(self, rid: str, seq_index: int) -> None:
        self._apply(self._dispatcher.close_sequence(rid, seq_index, self._clock()))

    def fail_all(self, error: BatonError) -> None:
        self._apply(self._dispatcher.fail_all(error, self._clock()))

    def drain(self, node: RegisteredNode, drain: Drain, move_after_s: float) -> None:
        self._log.info("node is drained", node=node.node_id, then=drain.then, move_after_s=move_after_s)
        self._apply(self._dispatcher.drain(node, drain, move_after_s, self._clock()))

    def send_order(self, node: RegisteredNode, order: LoadAdapter | RemoveAdapter) -> None:
        self._link.send(node.peer, order)

    def broken_pairs(self) -> list[BrokenPair]:
        return self._dispatcher.broken_pairs()

    def waiting(self) -> list[Waiting]:
        return self._dispatcher.waiting(self._clock())

    @property
    def num_open(self) -> int:
        return len(self._mailboxes)

    @property
    def identity(self) -> tuple[str, int]:
        """(router id, epoch)"""
        return self._identity

    @property
    def node_endpoint(self) -> str:
        return self._link.endpoint

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._tick())

    async def _receive(self) -> None:
        while True:
            until = time.thread_time() + TURN_S
            for inbound in await self._link.receive():
                self.handle(inbound)
                if time.thread_time() >= until:  # many messages from nodes must not keep clients waiting
                    await asyncio.sleep(0)
                    until = time.thread_time() + TURN_S

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        now = self._clock()
        self._note_absence(now)
        self._awake_at = now
        for name, amount in self._wire.take(self._wire_counts).items():
            self._metrics.count(self._identity[0], name, amount)
        for node in self._registry.newly_silent(now):
            self._lose(node, "it has fallen silent", now)
        self._apply(self._dispatcher.tick(now))
        self._tell_spending(now)
        self._metrics.queued({row.tenant: (row.requests, row.tokens) for row in self._dispatcher.waiting(now)})
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            self._metrics.sweep({node.node_id for node in self._registry}, now)

    def _tell_spending(self, now: float) -> None:
        nodes = carriers(self._registry)
        message = self._ledger.write(now) if self._ledger is not None and nodes else None
        if message is not None:
            for node in nodes:
                self._link.send(node.peer, message)

    def _on_spending(self, peer: str, message: Spending, now: float) -> None:
        if self._ledger is None:
            return
        reading = self._ledger.read(message, now)
        if reading is Reading.UNSIGNED:
            why = "another stream_secret, or a node made it up: limits do not hold over all routers"
            self._log_once.warning((peer, "spending"), "spending is not signed by our routers", peer=peer, why=why)
        elif reading is Reading.OTHER_VERSION:
            kind, why = (message.router_id, "spending"), "until both have one version, each counts alone"
            self._log_once.warning(kind, "a router of another version counts alone", router=message.router_id, why=why)
        elif self._ledger.differences:
            first, *others = self._ledger.differences
            self._log_once.warning(
                (message.router_id, "limits"),
                "routers have different limits for a tenant: is one keys file old?",
                tenant=first.tenant,
                router=message.router_id,
                ours=per_minute(first.ours),
                theirs=per_minute(first.theirs),
                other_tenants=len(others),
            )

    def _note_absence(self, now: float) -> None:
        """Detect a freeze of this router before messages are handled, because nodes may have dropped the router
        meanwhile."""
        silence_s = self._registry.silence_s
        may_be_missed_s = AWAY_SHARE * link_silence(silence_s).shortest_s
        if self._awake_at is not None and now - self._awake_at > may_be_missed_s:
            self._log_once.warning(("away",), "this router was frozen", seconds=round(now - self._awake_at, 1))
            self._awake_at = now
            self._dispatcher.was_away(excused_until=now + silence_s)

    def handle(self, inbound: Inbound) -> None:
        now = self._clock()
        self._note_absence(now)
        if isinstance(inbound, Received):
            message = inbound.message
            if isinstance(message, Tokens):
                self._apply(self._dispatcher.tokens(message, now))
            elif isinstance(message, Begun):
                self._apply(self._dispatcher.begun(message, now))
            elif isinstance(message, Scores):
                self._apply(self._dispatcher.scores(message, now))
            elif isinstance(message, Heartbeat):
                self._on_heartbeat(inbound.peer, message, now)
            elif isinstance(message, Hello):
                self._on_hello(inbound.peer, message, now)
            elif isinstance(message, CacheEvents):
                self._ask(inbound.peer, self._registry.cache_events(inbound.peer, message))
            elif isinstance(message, Spending):
                self._on_spending(inbound.peer, message, now)
            elif isinstance(message, Goodbye):
                self._on_gone(inbound.peer, "it said goodbye", now)
            elif isinstance(message, Unwelcome):
                self._on_unwelcome(message, now)
            else:
                self._log_once.warning((inbound.peer, type(message)), "not a message for a router", peer=inbound.peer)
        elif isinstance(inbound, PeerClosed):
            self._on_gone(inbound.peer, "its connection closed", now, has_died=True)

    def _on_hello(self, peer: str, hello: Hello, now: float) -> None:
        if self._registry.strangers.is_one(hello, now):
            self._on_stranger(hello, now)
            return
        node, replaced = self._registry.hello(peer, hello, now)
        if node is None:
            if hello.role in ROLES:
                self._metrics.count(self._identity[0], f"{REFUSED_PREFIX}{REFUSED_EPOCH}", 1)
            self._log_once.warning((peer, "hello"), "a Hello of an old epoch or unknown role", peer=peer)
            return
        # Send the Welcome first: `_lose` may send a Generate, which the node would refuse before its Welcome.
        self._link.send(peer, self._dispatcher.welcome(node, now))
        if replaced is not None:
            self._lose(replaced, "it has restarted", now, has_died=replaced is not node)
        here = ("here", node.node_id)
        self._node_log.info(here, "node is here", node=node.node_id, role=node.role, epoch=f"{hello.epoch:x}")
        for other, (first, second, name) in misfits_of(node):
            # logged once a minute per pair of first nodes, because one node can name new kinds again and again
            kinds = frozenset((node.kind.first, other.first))
            self._log_once.warning(kinds, "nodes do not fit together", a=first, b=second, differs=name)

    def _on_stranger(self, hello: Hello, now: float) -> None:
        self._log_once.warning(
            (hello.node_id, "protocol"),
            "a node speaks another protocol and gets no requests",
            node=hello.node_id,
            speaks=hello.fingerprint.protocol,
            ours=PROTOCOL_VERSION,
            why="install the same version of Baton on both",
        )
        before = self._registry.ended_by(hello)
        if before is not None:
            self._remove(before)
            self._lose(before, "it has restarted with another protocol", now, has_died=True)

    def _on_heartbeat(self, peer: str, beat: Heartbeat, now: float) -> None:
        node = self._registry.heartbeat(beat, now)
        if node is None:  # the node's list of routers lacked us, so we removed the node
            self._link.send(peer, Welcome(*self._identity, connection=0))
        else:
            self._metrics.update(report_of(node, beat))
            self._tell_share(node)
            self._apply(self._dispatcher.reported(node, beat.taken, now))
            if node.leaving is not None and By.US in node.leaving.by and not beat.draining:  # the Drain was lost
                self._link.send(node.peer, node.leaving.drain(node.node_id, now))
            self._ask(node.peer, self._registry.missed_events(node, beat))
            if beat.leaves and not self._dispatcher.needs(node):  # a lost Release is sent again at the next heartbeat
                self._link.send(node.peer, Release(node.node_id))

    def _tell_share(self, node: RegisteredNode) -> None:
        slowness = node.figures.slowness
        share, times = slowness.take_news(), round(slowness.times, 2)
        if share is Share.WHOLE:
            self._log.info("node is as fast as its peers again, and gets its share", node=node.node_id)
        elif share is not None:
            self._log.warning("node is slower than its peers, and gets less work", node=node.node_id, times=times)

    def _ask(self, peer: str, replay: CacheReplay | None) -> None:
        """Send a replay request, if any. If the request is lost, the next heartbeat causes another."""
        if replay is not None:
            self._link.send(peer, replay)

    def _on_gone(self, peer: str, reason: str, now: float, *, has_died: bool = False) -> None:
        node = self._registry.by_peer(peer)
        if node is not None:
            self._remove(node)
            self._lose(node, reason, now, has_died=has_died)

    def _on_unwelcome(self, message: Unwelcome, now: float) -> None:
        self._log_once.error(
            ("unwelcome",),
            "another router of this name is up, and this one gets no nodes: start it with a --router-id of its own",
            node=message.node_id,
            other=message.endpoint,
        )
        node = self._registry.find(message.node_id, message.epoch)
        if node is not None:
            self._remove(node)
            self._apply(self._dispatcher.unwelcome(node, now))

    def _remove(self, node: RegisteredNode) -> None:
        self._registry.remove(node)
        self._metrics.forget(node.node_id)

    def _lose(self, node: RegisteredNode, reason: str, now: float, *, has_died: bool = False) -> None:
        gone = node.leaving is not None
        kind = ("gone", gone, node.node_id)
        self._node_log.warning(kind, "node is gone" if gone else "node is lost", node=node.node_id, reason=reason)
        effects = self._dispatcher.node_lost(node, reason, now, has_died=has_died)
        if effects.num_resumed:
            moved = ("elsewhere", node.node_id)
            self._node_log.info(moved, "requests go on elsewhere", lost=node.node_id, requests=effects.num_resumed)
        self._apply(effects)

    def _apply(self, effects: Effects) -> None:
        if effects.num_resumed:
            self._metrics.resumed(effects.num_resumed)
        if effects.num_moved:
            self._metrics.moved(effects.num_moved)
        if effects.num_by_cost:
            self._metrics.started_by_cost(effects.num_by_cost)
        for seconds in effects.queue_waits:
            self._metrics.waited(seconds)
        for outcome in effects.sought:
            self._metrics.sought(outcome)
        for role, reason in effects.picks:
            self._metrics.picked(role, reason)
        for rid in effects.begun:
            if (mailbox := self._mailboxes.get(rid)) is not None:
                mailbox.begun.add(rid)
        for rid, fingerprints in effects.placed:
            if (mailbox := self._mailboxes.get(rid)) is not None:
                mailbox.nodes.setdefault(rid, []).extend(fingerprints)
        for news in effects.news:
            mailbox = self._mailboxes.get(news.rid)
            if mailbox is not None:
                mailbox.put(news)
        for alarm in effects.alarms:
            self._log_once.warning((alarm.kind, alarm.subject), alarm.kind, node=alarm.subject)
        for peer, message in effects.sends:
            if isinstance(message, Generate):
                key = key_of(message.key)
                self._log.debug("a request goes to a node", node=peer, key=key, **traced(message.trace))
            if not self._link.send(peer, message):
                self._apply(self._dispatcher.send_refused(peer, message, self._clock()))


def per_minute(limits: tuple[int, int]) -> str:
    return "{} requests, {} tokens a minute (0: no limit)".format(*limits)
