"""Run requests on nodes. Sans-IO: every call returns Effects, which gateway.py carries out.

open --room--> start --Generate--> first node ... Tokens -> Update ... last SequenceEnd: forgotten
  |                     |lost, drained, refused or failed: the next attempt (attempts.py)
  '--client gone, stop string, deadline: Abort to every node that runs a part of the request
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from router.dispatch.attempts import Attempts
from router.dispatch.moves import Moves
from router.dispatch.progress import Progress
from router.fleet.leaving import By, leaving_also
from router.fleet.prefix_index import PromptPages
from router.fleet.registry import RegisteredNode, Registry
from router.policy.placement import NO_NODES, Placer
from router.policy.sources import PrefixSources
from router.queue.admission import AdmissionQueue, Newcomer, Waiting
from router.requests.abort_log import AbortLog
from router.requests.answered import Answered
from router.requests.effects import Alarm, Effects
from router.requests.journal import Journal, OpenRequest
from router.requests.new_request import NewRequest
from router.requests.pairs import ALARM, BrokenPair
from router.requests.suspects import SuspectRequests
from router.requests.tickets import Tickets, deadline_ms
from router.tenants.tenant import Tenant
from shared.config.settings.silence import link_silence
from shared.core.errors import BatonError, DeadlineExceeded, NodeDraining, NodeLost, NoNodes
from shared.wire.messages import Begun, Drain, Generate, Message, Scores, Tokens, Welcome
from shared.wire.parts import Taken


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    max_open: int  # limit on requests that run on nodes
    max_attempts: int  # limit on a request's failed attempts; attempts on draining nodes don't count
    request_timeout_s: float
    resume_wait_s: float = 0.0  # longest time that an interrupted request waits for a usable node
    max_queued: int = 512
    pulls_prefixes: bool = True
    # seconds per prompt token, assumed until measured; None: no pulls until measured
    assumed_token_s: float | None = None


class Dispatcher:
    """Owned by the router's loop. `now` is a monotonic clock in seconds."""

    def __init__(
        self, identity: tuple[str, int], registry: Registry, placer: Placer, journal: Journal, limits: DispatchLimits
    ) -> None:
        self._identity = identity
        self._registry = registry
        self._placer = placer
        self._journal = journal
        self._limits = limits
        aborts, suspects, self.tickets = AbortLog(), SuspectRequests(registry), Tickets()
        sources = PrefixSources(registry, self.tickets, limits.assumed_token_s) if limits.pulls_prefixes else None
        self._admission = AdmissionQueue(registry, journal, limits.max_open, limits.max_queued)
        self.queue = self._admission.queue
        self._attempts = Attempts(
            identity,
            placer,
            journal,
            aborts,
            suspects,
            self.tickets,
            self._admission,
            sources,
            max_attempts=limits.max_attempts,
            resume_wait_s=limits.resume_wait_s,
        )
        self._moves = Moves(registry, placer, suspects)
        self._progress = Progress(identity, registry, journal, self._attempts, placer.pairs, aborts)

    def open(self, news: Sequence[NewRequest], now: float) -> tuple[list[str], Effects]:
        """Queue all these requests of one tenant, or none of them.

        Change nothing when raising QueueFull, DeadlineExceeded, DeadlineUnreachable or NoNodes."""
        if not self._placer.is_possible(now):
            raise NoNodes(NO_NODES)
        effects = Effects(now)
        first = news[0]
        answer = self._admission.answers.expected(first.tenant)
        cost = sum(new.cost(answer) for new in news)
        newcomer = Newcomer(first.tenant, len(news), cost, self._within_s(first), first.rank)
        for victim in self._admission.check(newcomer, now):
            self._attempts.fail(victim, self._admission.full(1), effects)
        requests = [self._new_request(new, answer, now) for new in news]
        for request in requests:
            self._journal.add_request(request)
            self._admission.push(request, now)
        self._start_next(effects)
        return [request.rid for request in requests], effects

    def check_room(self, tenant: Tenant, now: float) -> None:
        """Raise QueueFull if even the tenant's smallest request would be refused."""
        self._admission.victims(tenant, 1, 1, now)

    def _within_s(self, new: NewRequest) -> float:
        limit_s = self._limits.request_timeout_s
        return limit_s if new.within_s is None else min(new.within_s, limit_s)

    def _start_next(self, effects: Effects) -> None:
        now = effects.now
        while (request := self._admission.next(now)) is not None:
            effects.queue_waits.append(now - request.queued_at)
            request.asked.journey.left_queue()
            if self._admission.is_hopeless(request, now):
                self._attempts.fail(request, DeadlineExceeded("the request waited too long to end in time"), effects)
            else:
                self._attempts.start(request, now, effects)

    def _new_request(self, new: NewRequest, expected_answer: float, now: float) -> OpenRequest:
        pages = PromptPages(new.prompt_ids, new.adapter, new.cache_salt)
        return OpenRequest(self._journal.new_rid(), new, now + self._within_s(new), pages, expected_answer)

    def close(self, rids: Sequence[str], answered: Sequence[Answered], now: float) -> Effects:
        """Cancel open attempts, and tell nodes to keep the pages of conversations that are expected back."""
        effects = self.cancel(rids, now)
        for one in answered:
            effects.sends += self._attempts.returns.over(one)
        for rid in rids:
            self._attempts.returns.left(rid)
        return effects

    def cancel(self, rids: Iterable[str], now: float) -> Effects:
        effects = Effects(now)
        for request in filter(None, map(self._journal.find, rids)):
            self._attempts.abandon(request, effects)
        self._start_next(effects)
        return effects

    def close_sequence(self, rid: str, seq_index: int, now: float) -> Effects:
        effects = self._progress.close_sequence(rid, seq_index, now)
        self._start_next(effects)
        return effects

    def tokens(self, message: Tokens, now: float) -> Effects:
        effects = self._progress.tokens(message, now)
        self._start_next(effects)
        return effects

    def reported(self, node: RegisteredNode, taken: Taken, now: float) -> Effects:
        """Go on after a heartbeat: there may be room for more, and what the node never took goes elsewhere."""
        effects = self._progress.taken(node, taken, now)
        if node.unconfirmed.is_overdue(taken, deadline_ms(now)):
            effects.sends.append((node.peer, self.welcome(node, now)))
        self._start_next(effects)
        return effects

    def welcome(self, node: RegisteredNode, now: float) -> Welcome:
        """Return the answer to the node's Hello. Said again, it makes the node tell at once what it has taken."""
        return Welcome(*self._identity, node.hello.connection, self.tickets.key_of(node.peer), deadline_ms(now))

    def waiting(self, now: float) -> list[Waiting]:
        return self._admission.waiting(now)

    def node_lost(self, node: RegisteredNode, reason: str, now: float, *, has_died: bool = False) -> Effects:
        """Resume the requests of a node that disconnected, fell silent or restarted.

        `has_died`: the connection broke or the node restarted, without a Goodbye. A draining node does not count."""
        effects = Effects(now)
        node.breaker.failed(now)
        self._placer.pairs.forget(node)
        error = NodeLost(f"node {node.node_id} is lost: {reason}")
        is_death = has_died and not node.is_draining
        if is_death and now - node.last_seen < link_silence(self._registry.silence_s).shortest_s:
            self._attempts.bury(node, error, effects)
        else:
            self._attempts.leave(node, error, effects)
        return effects

    def begun(self, message: Begun, now: float) -> Effects:
        return self._progress.begun(message, now)

    def scores(self, message: Scores, now: float) -> Effects:
        return self._progress.scores(message, now)

    def unwelcome(self, node: RegisteredNode, now: float) -> Effects:
        """Resume the requests of a node that serves another router. Charge no attempt."""
        effects = Effects(now)
        self._placer.pairs.forget(node)
        node.leaving = leaving_also(node.leaving, By.NAMESAKE)
        self._attempts.leave(node, NodeDraining(f"node {node.node_id} serves another router of this name"), effects)
        return effects

    def was_away(self, excused_until: float) -> None:
        """Until `excused_until`, charge no attempt for a lost node. This router was frozen, and notices broken links
        late."""
        self._attempts.excused_until = excused_until

    def drain(self, node: RegisteredNode, drain: Drain, move_after_s: float, now: float) -> Effects:
        """Send the node no new requests. Move its requests after `move_after_s`. The node informs other routers."""
        effects = Effects(now)
        leaving = leaving_also(node.leaving, By.US)
        node.leaving = leaving = replace(leaving, then=drain.then, until=now + move_after_s)
        effects.sends.append((node.peer, leaving.drain(node.node_id, now)))
        return effects

    def needs(self, node: RegisteredNode) -> bool:
        return bool(self._journal.served_by(node))

    def send_refused(self, peer: str, message: Message, now: float) -> Effects:
        """Handle a message that was not sent: the queue was full, or the peer was not connected."""
        effects = Effects(now)
        if isinstance(message, Generate):
            node = self._registry.by_peer(peer)
            if node is not None:
                node.breaker.failed(now)
            request = self._journal.find(message.key.rid)
            if request is not None and request.attempt.number == message.key.attempt:
                self._attempts.avoid(request, request.attempt.prefiller)
                if request.attempt.number:  # an unsent attempt did not fail; the next tick tries again
                    self._attempts.withdraw(request, "unsent", effects)
                    request.attempt.parked_until = now + self._limits.resume_wait_s
                else:
                    self._attempts.resume_or_fail(request, NodeLost(f"node {peer} takes no messages"), effects)
        return effects

    def tick(self, now: float) -> Effects:
        effects = Effects(now)
        self._placer.is_possible(now)  # called to record the time when nodes were last connected
        for request in self._journal.overdue(now):
            self._attempts.fail(request, DeadlineExceeded("the request took longer than this server allows"), effects)
        for node in self._registry:
            if node.leaving is not None and now >= node.leaving.until:
                self._attempts.leave(node, NodeDraining(f"node {node.node_id} is drained"), effects)
        for request in self._journal.parked():
            self._attempts.start(request, now, effects)
        self._start_next(effects)
        self._look_at_pairs(effects)
        for move in self._moves.due(self._journal.all(), now):
            self._attempts.move(move.request, move.decode, effects)
        return effects

    def _look_at_pairs(self, effects: Effects) -> None:
        """Report broken pairs one tick late, when pairs of dead nodes are already dropped."""
        pairs = self._placer.pairs
        pairs.look()
        effects.alarms.extend(Alarm(ALARM, pair.name) for pair in pairs.take_news())

    def broken_pairs(self) -> list[BrokenPair]:
        return self._placer.pairs.all()

    def fail_all(self, error: BatonError, now: float) -> Effects:
        effects = Effects(now)
        for request in self._journal.all():
            self._attempts.fail(request, error, effects)
        return effects
