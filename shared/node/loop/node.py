"""Define a node without sockets and clocks: tick(inbox, now) -> actions.

    completions -> next step -> messages -> transfers, grants, leases -> outbox | next step -> heartbeats -> outbox

A step's completion comes before the messages, so network work never delays the next launch. Answers leave before
the step that they make possible, because a prefill node waits for Installed. Prefill and decode nodes differ only in
the side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shared.core.errors import BatonError, IntegrityError, NodeDraining, Overloaded
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.core.states import FinishReason, QueueStage
from shared.core.trace_context import traced
from shared.model.math.adapter_bank import bank_of
from shared.node.loop.adapters import AdapterDesk
from shared.node.loop.context import NodeContext
from shared.node.loop.membership import Membership
from shared.node.loop.side import Side
from shared.node.records.cache_teller import CacheTeller, Outsiders
from shared.node.records.convert import end_of, requests_of, run_of, scores_of, tokens_of
from shared.node.records.departure import Departure
from shared.node.records.mail import Dial, HangUp, Outgoing
from shared.node.records.report import StepWatch, node_load
from shared.node.routers.dialled import RouterState
from shared.node.routers.lives import RouterLife
from shared.node.routers.load_shares import LoadShares
from shared.node.routers.spendings import Spendings
from shared.sched.steps.events import ContextOutgrown, Emitted, Ended, SchedEvent, Scored
from shared.wire.codec import key_of, to_wire
from shared.wire.messages import (
    Abort,
    Begun,
    CacheReplay,
    Drain,
    Generate,
    Goodbye,
    Heartbeat,
    Keep,
    Key,
    LoadAdapter,
    Release,
    RemoveAdapter,
    SequenceEnd,
    Spending,
    TokenRun,
    Welcome,
)
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received, WireTotals
from shared.wire.unreadable import Unreadable

TAKEN_AT_ONCE = 1024  # Generates after which the router hears at once; a round reads at most as many


class Node:
    """`busy`: the next tick is due immediately."""

    def __init__(self, ctx: NodeContext, side: Side, outsiders: Outsiders | None = None) -> None:
        self.ctx = ctx
        self.side = side
        self.busy = False
        self.next_heartbeat = 0.0
        self._teller = CacheTeller(ctx.core.kv, ctx.facts.node_id, ctx.facts.epoch, outsiders)
        self._watch = StepWatch(ctx.core, ctx.metrics, ctx.clock, ctx.spans)
        self._waiting_since: dict[RequestKey, tuple[Request, float]] = {}
        self._runs: dict[str, list[TokenRun]] = {}
        self._ends: dict[str, list[SequenceEnd]] = {}
        self.membership = Membership(ctx, self._router_over)
        self.adapters = AdapterDesk(ctx, bank_of(ctx.core.model), side.outside, side.abort)
        self._wire = WireTotals()
        self._spendings = Spendings()

    def tick(self, inbox: Sequence[Inbound], now: float) -> list[Dial | Outgoing | HangUp]:
        """Run both halves. A daemon carries out the actions of `take_in` before it calls `go_on`."""
        return [*self.take_in(inbox, now), *self.go_on(now)]

    def take_in(self, inbox: Sequence[Inbound], now: float) -> list[Dial | Outgoing | HangUp]:
        self.busy = False
        self._step(now)
        for inbound in inbox:
            self._receive_safely(inbound, now)
        self.side.poll(now)
        return self.ctx.outbox.take_messages()

    def go_on(self, now: float) -> list[Dial | Outgoing | HangUp]:
        self.ctx.core.queues.expire(now)
        self.ctx.tombstones.expire(now)
        if self.adapters.go_on(now):
            self.membership.say_hello_again(now)
            self.next_heartbeat = now
        self._step(now)
        self._note_started(now)
        self._flush_tokens()
        self._tell_of_cache()
        self._heartbeat(now)
        return self.ctx.outbox.take_messages()

    @property
    def wakes_at(self) -> float:
        return min(self.next_heartbeat, self.side.wakes_at)

    @property
    def idle(self) -> bool:
        core = self.ctx.core
        return core.idle and not self.side.outside() and not self.side.holds_rows

    def fail_all(self, reason: str) -> None:
        """Let the next tick report NodeDraining for all remaining requests."""
        for req in self.side.outside():
            self.side.abort(req.key)
            self.ctx.end(req.key, NodeDraining(reason))
        for key in list(self.ctx.core.requests):
            self.ctx.core.fail(key, NodeDraining(reason))

    def listed(self, routers: Sequence[str], now: float) -> list[Dial | Outgoing | HangUp]:
        self.membership.listed(routers, now)
        self.next_heartbeat = now
        return self.ctx.outbox.take_messages()

    def goodbye(self) -> list[Dial | Outgoing | HangUp]:
        self.side.leave()
        facts = self.ctx.facts
        for peer in self.ctx.routers.welcomed():
            self.ctx.outbox.send(peer, Goodbye(facts.node_id, facts.epoch))
        return self.ctx.outbox.take_messages()

    # ---- steps and their results

    def _step(self, now: float) -> None:
        if self.ctx.core.step():
            self.busy = True
        self._watch.look(now)
        self._take_events(now)

    def _take_events(self, now: float) -> None:
        """Handle all events, and the events that these cause: for example, a failed hand-off ends its request."""
        while events := self.ctx.core.take_events():
            self.busy = True  # freed memory may let a request run
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
        elif isinstance(event, ContextOutgrown):
            self.ctx.metrics.count("outgrown_contexts")
            self.ctx.log.info(("outgrown",), "a text outgrew the short context, and its KV is computed again")
        self.side.event(event, now)

    def _send_scores(self, event: Scored) -> None:
        """Send the prompt's log-probabilities before the tokens, which follow at the round's end."""
        peer, facts = self.ctx.routers.peer_of(event.key), self.ctx.facts
        if peer is not None:
            for message in scores_of(event, facts.node_id, facts.epoch):
                self.ctx.outbox.send(peer, message)

    def _report_end(self, event: Ended) -> None:
        """Report an end, except an abort: the router knows about aborts."""
        self.ctx.spans.ended(event)
        peer = self.ctx.routers.peer_of(event.key)
        if peer is not None and event.reason is not FinishReason.ABORT:
            self._report(peer, event)

    def _report(self, peer: str, event: Ended) -> None:
        self._ends.setdefault(peer, []).append(end_of(event))

    def _answer(self, peer: str, key: Key, error: BatonError) -> None:
        """Tell a router that its Generate came to nothing. Without an answer it would wait."""
        if peer in self.ctx.routers.dialled:
            self._report(peer, Ended(key_of(key), FinishReason.ERROR, 0, 0, error))

    def _flush_tokens(self) -> None:
        facts = self.ctx.facts
        runs, ends, self._runs, self._ends = self._runs, self._ends, {}, {}
        for peer in {**runs, **ends}:
            for message in tokens_of(facts.node_id, facts.epoch, runs.get(peer, []), ends.get(peer, [])):
                self.ctx.outbox.send(peer, message)

    def _tell_of_cache(self) -> None:
        for peer, message in self._teller.tell(self.ctx.routers.welcomed()):
            self.ctx.outbox.send(peer, message)
        self.busy = self.busy or self._teller.has_more

    # ---- messages

    def _receive_safely(self, inbound: Inbound, now: float) -> None:
        """Drop a message whose handling fails. Only an IntegrityError, our own fault, ends the process."""
        try:
            self._receive(inbound, now)
        except IntegrityError:
            raise
        except BatonError as error:
            self.ctx.drop(inbound.peer, f"{error.code}: {error.message}")
            if isinstance(inbound, Received) and isinstance(inbound.message, Generate):
                self._answer(inbound.peer, inbound.message.key, error)

    def _receive(self, inbound: Inbound, now: float) -> None:
        if isinstance(inbound, Received):
            self._receive_message(inbound, now)
        elif isinstance(inbound, Unreadable):
            self._answer(inbound.peer, inbound.key, inbound.error)
        elif inbound.peer not in self.ctx.routers.dialled:
            if isinstance(inbound, PeerClosed):
                self.side.peer_closed(inbound.peer, accepted=inbound.accepted)
            else:
                self.side.peer_up(inbound.peer)
        elif isinstance(inbound, PeerUp):
            self.membership.up(inbound.peer, now)
        else:
            self.membership.closed(inbound.peer, now, gave_up=inbound.gave_up)

    def _receive_message(self, received: Received, now: float) -> None:
        message, from_router = received.message, received.peer in self.ctx.routers.dialled
        if not from_router:
            self.side.receive(received, now)
        elif isinstance(message, Welcome):
            if self.membership.welcomed(received.peer, message, now):
                self.next_heartbeat = 0.0
        elif isinstance(message, Generate):
            self._generate(received.peer, message, now)
        elif self.ctx.routers.life(received.peer) is None:
            self.ctx.drop(received.peer, f"{type(message).__name__} from a router that has not said Welcome")
        elif isinstance(message, Abort):
            self._abort(message, now)
        elif isinstance(message, Keep):
            self.ctx.core.queues.budget.ended.keep(key_of(message.key), message.keep_ms / 1000)
        elif isinstance(message, Drain) and message.node_id == self.ctx.facts.node_id:
            self._drain(message, now)
        elif isinstance(message, LoadAdapter | RemoveAdapter) and message.node_id == self.ctx.facts.node_id:
            self.adapters.take_order(message, now)
        elif isinstance(message, CacheReplay) and message.node_id == self.ctx.facts.node_id:
            self._teller.asked(received.peer, message.after)
        elif isinstance(message, Spending):
            self._take_spending(received.peer, message)
        elif isinstance(message, Release) and message.node_id == self.ctx.facts.node_id:
            self.membership.released(received.peer, now)
        else:
            self.ctx.drop(received.peer, f"{type(message).__name__} from a router")

    def _take_spending(self, peer: str, message: Spending) -> None:
        if self.ctx.routers.life(peer) == RouterLife(message.router_id, message.router_epoch):
            self._spendings.take_spending(message)
        else:
            self.ctx.drop(peer, "Spending of another router")

    def _drain(self, drain: Drain, now: float) -> None:
        """A later message may change the time limit."""
        leaving = self.ctx.leaving or Departure()
        after_ms = drain.move_after_ms
        move_at = leaving.move_at if after_ms is None else now + after_ms / 1000
        self.ctx.leaving = replace(leaving, then=drain.then, move_at=move_at)
        self.next_heartbeat = now

    def _router_over(self, life: RouterLife) -> None:
        for key in [*self.ctx.core.requests, *(req.key for req in self.side.outside())]:
            if (key.router_id, key.router_epoch) == (life.router_id, life.epoch):
                self._abort_one(key)

    def _generate(self, peer: str, generate: Generate, now: float) -> None:
        key, session = key_of(generate.key), self.ctx.routers.dialled[peer].session
        life, rival = session.life, session.rival
        if rival is not None:  # a router that hears of its refusal begins the request again
            self.membership.say_unwelcome(peer, rival)
            return
        if life != RouterLife(key.router_id, key.router_epoch):  # the Welcome was lost in a full queue
            early = Overloaded(f"{self.ctx.facts.node_id} has not received its router's Welcome")
            self._answer(peer, generate.key, early)
            return
        self._take_generate(peer, generate, now)
        session.taken.append(generate.key)
        if len(session.taken) >= TAKEN_AT_ONCE:
            self.next_heartbeat = now

    def _take_generate(self, peer: str, generate: Generate, now: float) -> None:
        requests = [
            req
            for req in requests_of(generate, self.ctx.next_arrival, now)
            if not self.ctx.tombstones.covers(req.key) and req.key not in self.ctx.core.requests
        ]
        if not requests:
            self.ctx.drop(peer, "Generate of an aborted, ended or known request")
            return
        self.ctx.log.debug("a request has come", peer=peer, key=requests[0].key, **traced(generate.trace))
        for req in requests:
            self.ctx.spans.follow(req.key, generate.trace, hands_over=bool(generate.decode_node))
        refusal = self._refusal(requests)
        if refusal is not None:
            for req in requests:
                self.ctx.end(req.key, refusal)
        else:
            here = self._hand_over(generate, requests, now) if generate.decode_node else requests
            for req in here:
                self._waiting_since[req.key] = (req, now)
                self.ctx.core.submit(req)
            if here and generate.source is not None:
                self.side.bring_prefix(generate, here[0], now)

    def _hand_over(self, generate: Generate, requests: Sequence[Request], now: float) -> Sequence[Request]:
        try:
            return self.side.hand_over(generate, requests, now)
        except BatonError as error:  # an invalid decode node
            for req in requests:
                self.ctx.end(req.key, error)
            return ()

    def _refusal(self, requests: Sequence[Request]) -> BatonError | None:
        if self.ctx.leaving is not None:
            return NodeDraining(f"{self.ctx.facts.node_id} takes no new requests")
        if len(self.ctx.core.queues.waiting) + len(requests) > max(self.ctx.facts.max_waiting, len(requests)):
            return Overloaded(f"{self.ctx.facts.node_id} has too many requests waiting")
        return self.ctx.missing_adapter(requests[0]) or next(filter(None, map(self.ctx.bad_ids, requests)), None)

    def _abort(self, abort: Abort, now: float) -> None:
        key = key_of(abort.key)
        self.ctx.tombstones.bury(key, now, abort.all_sequences)
        if not abort.all_sequences:
            self._abort_one(key)
            return
        for other in [*self.ctx.core.requests, *(req.key for req in self.side.outside())]:
            if other.sibling(key.seq_index) == key:
                self._abort_one(other)

    def _abort_one(self, key: RequestKey) -> None:
        self.side.abort(key)
        self.ctx.core.abort(key)

    # ---- time

    def _note_started(self, now: float) -> None:
        """Measure how long started requests were WAITING, and report these requests to their routers.

        A Begun leaves with the round's outbox. If the round's step ends this node, no Begun is sent.
        """
        begun: dict[str, list[Key]] = {}
        for key, (req, since) in list(self._waiting_since.items()):
            if not req.row and not req.finished:
                continue
            self.ctx.metrics.observe_queue(QueueStage.WAITING, now - since)
            self.ctx.spans.add_span(key, "wait", since, now, {})
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
        self.membership.go_on(now)
        links = self.ctx.routers.served()
        if not links:
            return
        self._watch.count()
        for name, amount in self._wire.take(self.ctx.wire_counts).items():
            self.ctx.metrics.count(name, amount)
        load = node_load(self.ctx.core, self.ctx.metrics, self.side.outside(), self.side.hands_over(), self.ctx.cores())
        facts, leaving, shares = self.ctx.facts, self.ctx.leaving, LoadShares(self.ctx.core, self.side.outside())
        lacks, orders = self.membership.lacking(), self.adapters.orders()
        for link in links:
            beat = Heartbeat(
                facts.node_id,
                facts.epoch,
                load,
                draining=leaving is not None,
                move_after_ms=None if leaving is None else leaving.move_after_ms(now),
                cache_seq=self._teller.seq(link.peer),
                others=shares.beside(link.life),
                leaves=link.state is RouterState.LEAVING,
                lacks=lacks,
                taken=link.tell_taken(),
                adapter_orders=orders,
            )
            self.ctx.outbox.send(link.peer, beat)
        for peer, message in self._spendings.news(links):
            self.ctx.outbox.send(peer, message)
