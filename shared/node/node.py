"""One node without its sockets and clocks: tick(inbox, now) -> actions. Both kinds of node are this, with another side.

    completions -> next step -> messages -> transfers, grants, leases -> outbox | next step -> heartbeats -> outbox

A step's completion comes before the messages, so that network work never delays the next launch. What the messages and
transfers brought is answered before the step that they make possible: a prefill node waits for Installed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shared.core.errors import BatonError, IntegrityError, NodeDraining, Overloaded
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.core.states import FinishReason, QueueStage
from shared.kv.window_cache import WindowCache
from shared.node.cache_teller import CacheTeller
from shared.node.context import NodeContext
from shared.node.convert import end_of, requests_of, run_of, scores_of, tokens_of
from shared.node.mail import Dial, HangUp, Outgoing
from shared.node.report import StepWatch, node_load
from shared.node.routers import RouterLife, RoutersWord
from shared.node.side import Side
from shared.sched.events import Emitted, Ended, SchedEvent, Scored
from shared.wire.codec import key_of, to_wire
from shared.wire.messages import (
    Abort,
    Adapter,
    Begun,
    CacheReplay,
    Drain,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Key,
    SequenceEnd,
    TokenRun,
    Unwelcome,
    Welcome,
)
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received, WireTotals
from shared.wire.ranges import MAX_TEXT

HELLO_AGAIN_S = 2.0  # without a Welcome: one got lost, or the router still knows another life of this node


class Node:
    """Drives scheduler loop and side. `busy`: tick again at once; else wait for a message or a completion."""

    def __init__(self, ctx: NodeContext, side: Side) -> None:
        self.ctx = ctx
        self.side = side
        self.busy = False
        self.next_heartbeat = 0.0
        self._teller = CacheTeller(ctx.core.kv, ctx.facts.node_id, ctx.facts.epoch)
        self._watch = StepWatch(ctx.core, ctx.metrics, ctx.clock)
        self._waiting_since: dict[RequestKey, tuple[Request, float]] = {}
        self._runs: dict[str, list[TokenRun]] = {}
        self._ends: dict[str, list[SequenceEnd]] = {}
        self._hello_due: dict[str, float] = {}  # routers that are up and have not said Welcome
        self._hello_said: dict[str, float] = {}  # routers that are up -> when they were last told
        self._connections: Counter[str] = Counter()  # to each router, so far
        self._wire = WireTotals()

    def tick(self, inbox: Sequence[Inbound], now: float) -> list[Dial | Outgoing | HangUp]:
        """Run one round: both halves, whose actions are carried out after each where time counts."""
        return [*self.take_in(inbox, now), *self.go_on(now)]

    def take_in(self, inbox: Sequence[Inbound], now: float) -> list[Dial | Outgoing | HangUp]:
        """First half: what a step, the peers and the transfers brought, and the answers to it."""
        self.busy = False
        self._step(now)
        for inbound in inbox:
            self._receive_safely(inbound, now)
        self.side.poll(now)
        return self.ctx.outbox.take()

    def go_on(self, now: float) -> list[Dial | Outgoing | HangUp]:
        """Second half: the step that has become possible, and what is to be said of all."""
        self._expire(now)
        self._step(now)
        self._note_started(now)
        self._flush_tokens()
        self._tell_of_cache()
        self._heartbeat(now)
        return self.ctx.outbox.take()

    @property
    def idle(self) -> bool:
        """No request anywhere, no step in flight."""
        core = self.ctx.core
        return core.idle and not self.side.outside()

    def fail_all(self, reason: str) -> None:
        """The end of a drain: whoever is left gets a typed error with the next tick."""
        for req in self.side.outside():
            self.side.abort(req.key)
            self.ctx.end(req.key, NodeDraining(reason))
        for key in list(self.ctx.core.requests):
            self.ctx.core.fail(key, NodeDraining(reason))

    def goodbye(self) -> list[Dial | Outgoing | HangUp]:
        facts = self.ctx.facts
        for peer in self.ctx.routers.welcomed():
            self.ctx.outbox.send(peer, Goodbye(facts.node_id, facts.epoch))
        return self.ctx.outbox.take()

    # ---- steps and what they bring

    def _step(self, now: float) -> None:
        if self.ctx.core.step():
            self.busy = True
        self._watch.look(now)
        self._take_events(now)

    def _take_events(self, now: float) -> None:
        """Handling an event may cause others (a failed hand-off ends its request)."""
        while events := self.ctx.core.take_events():
            self.busy = True  # freed memory may let somebody run
            for event in events:
                self._take_event(event, now)
        ends, self.ctx.ends = self.ctx.ends, []
        for end in ends:
            self._report_end(end)

    def _take_event(self, event: SchedEvent, now: float) -> None:
        if isinstance(event, Emitted):
            peer = self.ctx.routers.peer_of(event.key)
            if peer is not None:
                self._runs.setdefault(peer, []).append(run_of(event))
        elif isinstance(event, Scored):
            self._send_scores(event)
        elif isinstance(event, Ended):
            self._waiting_since.pop(event.key, None)
            self.ctx.tombstones.bury(event.key, now)
            self.ctx.metrics.observe("time_to_free_seconds", max(0.0, self.ctx.clock() - now))
            self._report_end(event)
        self.side.event(event, now)

    def _send_scores(self, event: Scored) -> None:
        """At once: they go ahead of the tokens, which leave with the round's end."""
        peer, facts = self.ctx.routers.peer_of(event.key), self.ctx.facts
        if peer is not None:
            for message in scores_of(event, facts.node_id, facts.epoch):
                self.ctx.outbox.send(peer, message)

    def _report_end(self, event: Ended) -> None:
        """An abort is not reported: whoever asked for it knows, or has told the router why."""
        peer = self.ctx.routers.peer_of(event.key)
        if peer is not None and event.reason is not FinishReason.ABORT:
            self._report(peer, event)

    def _report(self, peer: str, event: Ended) -> None:
        self._ends.setdefault(peer, []).append(end_of(event))

    def _flush_tokens(self) -> None:
        facts = self.ctx.facts
        runs, self._runs = self._runs, {}
        ends, self._ends = self._ends, {}
        for peer in {**runs, **ends}:
            for message in tokens_of(facts.node_id, facts.epoch, runs.get(peer, []), ends.get(peer, [])):
                self.ctx.outbox.send(peer, message)

    def _tell_of_cache(self) -> None:
        for peer, message in self._teller.tell(self.ctx.routers.welcomed()):
            self.ctx.outbox.send(peer, message)
        self.busy = self.busy or self._teller.has_more

    # ---- messages

    def _receive_safely(self, inbound: Inbound, now: float) -> None:
        """What a peer sends may make no sense; only our own books not adding up ends the process."""
        try:
            self._receive(inbound, now)
        except IntegrityError:
            raise
        except BatonError as error:
            self.ctx.drop(inbound.peer, f"{error.code}: {error.message}")

    def _receive(self, inbound: Inbound, now: float) -> None:
        if isinstance(inbound, Received):
            self._receive_message(inbound, now)
        elif inbound.peer not in self.ctx.routers.peers:
            if isinstance(inbound, PeerClosed):
                self.side.peer_closed(inbound.peer)
            else:
                self.side.peer_up(inbound.peer)
        elif isinstance(inbound, PeerUp):
            self._connections[inbound.peer] += 1
            self._say_hello(inbound.peer, now)
        else:
            self._router_closed(inbound.peer, now)

    def _receive_message(self, received: Received, now: float) -> None:
        message, from_router = received.message, received.peer in self.ctx.routers.peers
        if not from_router:
            self.side.receive(received, now)
        elif isinstance(message, Welcome):
            self._welcomed(received.peer, message, now)
        elif isinstance(message, Generate):
            self._generate(received.peer, message, now)
        elif self.ctx.routers.life(received.peer) is None:
            self.ctx.drop(received.peer, f"{type(message).__name__} of a router that has not said Welcome")
        elif isinstance(message, Abort):
            self._abort(message, now)
        elif isinstance(message, Drain) and message.node_id == self.ctx.facts.node_id:
            self._drain(message, now)
        elif isinstance(message, CacheReplay) and message.node_id == self.ctx.facts.node_id:
            self._teller.asked(received.peer, message.after)
        else:
            self.ctx.drop(received.peer, f"{type(message).__name__} from a router")

    def _drain(self, drain: Drain, now: float) -> None:
        """Of two limits the later word counts: somebody has thought again."""
        self.ctx.draining, self.ctx.then = True, drain.then
        if drain.move_after_ms is not None:
            self.ctx.move_at = now + drain.move_after_ms / 1000
        self.next_heartbeat = now

    def _say_hello(self, peer: str, now: float) -> None:
        facts = self.ctx.facts
        self._hello_said[peer], self._hello_due[peer] = now, now + HELLO_AGAIN_S
        self.ctx.outbox.send(
            peer,
            Hello(
                role=facts.role,
                node_id=facts.node_id,
                epoch=facts.epoch,
                node_endpoint=facts.endpoint,
                fingerprint=facts.fingerprint,
                max_context=facts.max_context,
                max_running=facts.max_running,
                host_id=facts.host_id,
                transports=list(facts.transports),
                connection=self._connections[peer],
                adapters=[Adapter(own.name, own.digest) for own in self.ctx.core.spec.adapters],
                key_lookahead=self.ctx.core.settings.key_lookahead,
                has_window=isinstance(self.ctx.core.kv.cache, WindowCache),
            ),
        )

    def _welcomed(self, peer: str, message: Welcome, now: float) -> None:
        if message.connection != self._connections[peer]:  # on this one the router has not heard us, or not any more
            self.ctx.drop(peer, "Welcome to another connection")
            if peer in self._hello_said:
                self._hello_due.setdefault(peer, self._hello_said[peer] + HELLO_AGAIN_S)
            return
        self._hello_due.pop(peer, None)
        routers, life = self.ctx.routers, RouterLife(message.router_id, message.router_epoch)
        rival = routers.rival(peer, life)
        if rival is not None:
            self.ctx.drop(peer, f"Welcome of a second router of one name: the first is at {rival}")
            self._life_over(routers.refuse(peer, life, rival), now)
            self._say_unwelcome(peer, rival)
            return
        word = RoutersWord(message.ticket_key, now - message.clock_ms / 1000, now)
        self._life_over(routers.welcome(peer, life, word), now)
        self.next_heartbeat = 0.0  # the router needs our load before it can choose us

    def _say_unwelcome(self, peer: str, rival: str) -> None:
        """Tell a router that the first of its name is served, and it is not."""
        facts = self.ctx.facts
        self.ctx.outbox.send(peer, Unwelcome(facts.node_id, facts.epoch, rival[:MAX_TEXT]))

    def _life_over(self, life: RouterLife | None, now: float) -> None:
        """End what a router had asked for, and ask those again that were refused because of it."""
        self._router_over(life)
        for heir in self.ctx.routers.take_heirs(life) if life is not None else ():
            self._say_hello(heir, now)

    def _router_over(self, life: RouterLife | None) -> None:
        """Nobody waits for these requests any more."""
        if life is None:
            return
        scheduler = self.ctx.core.scheduler
        keys = [*scheduler.requests, *(req.key for req in self.side.outside())]
        for key in keys:
            if (key.router_id, key.router_epoch) == (life.router_id, life.epoch):
                self._abort_one(key)

    def _router_closed(self, peer: str, now: float) -> None:
        life = self.ctx.routers.closed(peer)
        self._hello_due.pop(peer, None)
        self._hello_said.pop(peer, None)
        if life is None:
            return  # it was not up yet; the link keeps trying
        self._life_over(life, now)
        self.ctx.outbox.hang_up(peer)  # with what is queued for the router that is gone
        self.ctx.outbox.dial(peer, peer)

    def _generate(self, peer: str, generate: Generate, now: float) -> None:
        key, life, rival = key_of(generate.key), self.ctx.routers.life(peer), self.ctx.routers.refused_for(peer)
        if rival is not None:  # it had not heard yet that it is refused, and begins the request anew when it has
            self._say_unwelcome(peer, rival)
            return
        if life is None:  # the Welcome met a full queue: nobody would miss what we drop
            early = Overloaded(f"{self.ctx.facts.node_id} has not heard its router's Welcome")
            self._report(peer, Ended(key, FinishReason.ERROR, 0, 0, early))
            return
        if (key.router_id, key.router_epoch) != (life.router_id, life.epoch):
            self.ctx.drop(peer, "Generate of another life of the router")
            return
        requests = [
            req
            for req in requests_of(generate, self.ctx.next_arrival, now)
            if not self.ctx.tombstones.covers(req.key) and req.key not in self.ctx.core.requests
        ]
        if not requests:
            self.ctx.drop(peer, "Generate of an aborted, ended or known request")
            return
        refusal = self._refusal(requests)
        if refusal is not None:
            for req in requests:
                self.ctx.end(req.key, refusal)
        else:
            for req in self._hand_over(generate, requests, now) if generate.decode_node else requests:
                self._submit(req, now)

    def _hand_over(self, generate: Generate, requests: Sequence[Request], now: float) -> Sequence[Request]:
        try:
            return self.side.hand_over(generate, requests, now)
        except BatonError as error:  # a decode node whose name can't be one
            for req in requests:
                self.ctx.end(req.key, error)
            return ()

    def _refusal(self, requests: Sequence[Request]) -> BatonError | None:
        if self.ctx.draining:
            return NodeDraining(f"{self.ctx.facts.node_id} takes nothing new")
        if len(self.ctx.core.scheduler.waiting) + len(requests) > max(self.ctx.facts.max_waiting, len(requests)):
            return Overloaded(f"{self.ctx.facts.node_id} has too many requests waiting")
        return self.ctx.missing_adapter(requests[0]) or next(filter(None, map(self.ctx.bad_ids, requests)), None)

    def _submit(self, req: Request, now: float) -> None:
        self._waiting_since[req.key] = (req, now)
        self.ctx.core.submit(req)

    def _abort(self, abort: Abort, now: float) -> None:
        """By the router, whose word ends a request wherever it is."""
        key = key_of(abort.key)
        self.ctx.tombstones.bury(key, now, abort.all_sequences)
        if not abort.all_sequences:
            self._abort_one(key)
            return
        keys = [*self.ctx.core.requests, *(req.key for req in self.side.outside())]
        for other in keys:
            if other.sibling(key.seq_index) == key:
                self._abort_one(other)

    def _abort_one(self, key: RequestKey) -> None:
        self.side.abort(key)
        self.ctx.core.abort(key)

    # ---- time

    def _expire(self, now: float) -> None:
        self.ctx.core.scheduler.expire(now)
        self.ctx.tombstones.expire(now)

    def _note_started(self, now: float) -> None:
        """Requests that are WAITING no more: how long they were, and a word to their routers. A step that ends this
        node at once is not told of: the word leaves with the round's outbox."""
        begun: dict[str, list[Key]] = {}
        for key, (req, since) in list(self._waiting_since.items()):
            if not req.row and not req.finished:
                continue
            self.ctx.metrics.observe_queue(QueueStage.WAITING, now - since)
            del self._waiting_since[key]
            peer = self.ctx.routers.peer_of(key)
            if peer is not None and not req.finished:
                begun.setdefault(peer, []).append(to_wire(key))
        for peer, keys in begun.items():
            self.ctx.outbox.send(peer, Begun(self.ctx.facts.node_id, self.ctx.facts.epoch, keys))

    def _heartbeat(self, now: float) -> None:
        if now < self.next_heartbeat:
            return
        self.next_heartbeat = now + self.ctx.facts.heartbeat_s
        for peer in [peer for peer, due in self._hello_due.items() if due <= now]:
            self._say_hello(peer, now)
        peers = self.ctx.routers.welcomed()
        if not peers:
            return
        self._watch.count()
        self._count_wire()
        load = node_load(self.ctx.core, self.ctx.metrics, self.side.outside(), self.side.hands_over(), self.ctx.cores())
        facts, move_at = self.ctx.facts, self.ctx.move_at
        move_after_ms = None if move_at is None else max(0, round(1000 * (move_at - now)))
        for peer in peers:
            told = (self.ctx.draining, move_after_ms, self._teller.seq(peer))
            self.ctx.outbox.send(peer, Heartbeat(facts.node_id, facts.epoch, load, *told))

    def _count_wire(self) -> None:
        for name, amount in self._wire.take(self.ctx.wire_counts).items():
            self.ctx.metrics.count(name, amount)
