"""Begin, end and repeat attempts. An attempt is one run of a request on its nodes. Sans-IO.

    start --Generate--> the request's nodes
    a node is lost, drains, refuses or fails --Abort--> the next attempt continues after the emitted tokens, or Failure

A request has one attempt at a time. Messages of earlier attempts have older keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet.registry import RegisteredNode
from router.policy.interface import Wanted
from router.policy.placement import NODES_AWAY_S, Placement, Placer
from router.policy.sources import PrefixSources
from router.queue.admission import AdmissionQueue
from router.requests.abort_log import AbortLog
from router.requests.effects import Alarm, Effects, Failure, Update
from router.requests.faults import can_resume, given_up, is_nobodys_fault
from router.requests.journal import Journal, OpenRequest
from router.requests.returns import EndedAnswer, Returns, page_near_end
from router.requests.suspects import SuspectRequests
from router.requests.tickets import Tickets, deadline_ms
from shared.core.errors import BatonError, NodeLost, NoNodes, PeerUnreachable, RequestKillsNodes
from shared.core.keys import RequestKey
from shared.wire.codec import to_wire
from shared.wire.messages import Abort, Generate, Key, SequenceEnd

MAX_EXCUSED = 4  # limit on a request's failed attempts that are not charged
KILLER_ALARM = "two nodes have died while they ran the same request"
KILLER_REASON = "two nodes have died while they ran this request: it is not tried again"


class Attempts:
    """Owned by the dispatcher. DispatchLimits explains `max_attempts` and `resume_wait_s`."""

    def __init__(
        self,
        identity: tuple[str, int],
        placer: Placer,
        journal: Journal,
        aborts: AbortLog,
        suspects: SuspectRequests,
        tickets: Tickets,
        admission: AdmissionQueue,
        sources: PrefixSources | None,
        *,
        max_attempts: int,
        resume_wait_s: float,
    ) -> None:
        self._router_id, self._router_epoch = identity
        self._placer = placer
        self._journal = journal
        self._aborts = aborts
        self._suspects = suspects
        self._tickets = tickets
        self._admission = admission
        self._sources = sources
        self._max_attempts = max_attempts
        self._resume_wait_s = resume_wait_s
        self.returns = Returns()
        self.excused_until = -float("inf")  # see Dispatcher.was_away

    def start(self, request: OpenRequest, now: float, effects: Effects) -> None:
        """Send a request to nodes, park it, or fail it. Raise nothing."""
        attempt = request.attempt
        try:
            placement = self._place(request, now)
        except NoNodes as error:
            if attempt.parked_until is None and (attempt.number or self._placer.is_possible(now)):
                attempt.parked_until = now + (self._resume_wait_s if attempt.number else NODES_AWAY_S)
            if attempt.parked_until is None or now >= attempt.parked_until:
                self.fail(request, error.with_traceback(None), effects)  # breaks the cycle of error, frames and effects
            return
        attempt.parked_until = None
        effects.num_by_cost += placement.is_by_cost
        effects.picks.extend((picked.node.role, picked.reason) for picked in placement.picks)
        self._send(request, placement, now, effects)

    def _place(self, request: OpenRequest, now: float) -> Placement:
        apart = self._suspects.nodes()
        if self._suspects.is_suspect(request):
            return self._placer.place_alone(request, now, apart)
        return self._placer.place(
            Wanted(request.num_tokens, now, request.pages, request.asked.affinity),
            request.avoid,
            request.asked.most_tokens,
            request.asked.needs,
            apart,
            on_one=request.asked.wants_scores,
        )

    def _send(self, request: OpenRequest, placement: Placement, now: float, effects: Effects) -> None:
        attempt = request.attempt
        attempt.occupy(placement.prefill, placement.decode)
        attempt.is_alone, attempt.sent_at = placement.is_alone, now
        self._placer.pairs.sent(attempt)
        effects.placed.append((request.rid, [node.hello.fingerprint for node in attempt.nodes]))
        first = attempt.prefiller
        assert first is not None
        if not attempt.number:
            self.returns.came(self._page_names(request, first), now)
        generate = self._generate(request, now, effects)
        first.unconfirmed.sent(generate.key, deadline_ms(now))
        effects.sends.append((first.peer, generate))

    def _generate(self, request: OpenRequest, now: float, effects: Effects) -> Generate:
        asked, prefill = request.asked, request.attempt.prefill
        target = request.attempt.decode if prefill is not None else None
        key, ticket = self.key(request, 0), None
        if prefill is not None and target is not None:
            ticket = self._tickets.issue(request, key, prefill, target)
        return Generate(
            key=to_wire(key),
            prompt_ids=asked.prompt_ids,
            output_ids=[[] if sequence.is_closed else sequence.ids.copy() for sequence in request.sequences],
            num_sequences=asked.num_sequences,
            ended=[index for index, sequence in enumerate(request.sequences) if sequence.is_closed],
            sampling=to_wire(asked.sampling),
            seed=asked.seed,
            decode_node=target.node_id if target else "",
            decode_epoch=target.hello.epoch if target else 0,
            decode_endpoint=target.hello.node_endpoint if target else "",
            remaining_ms=max(1, int((request.deadline - now) * 1000)),
            adapter=asked.adapter,
            cache_salt=asked.cache_salt,
            tenant=asked.tenant.number,
            scored=len(request.scores) + 1,
            ticket=ticket,
            source=self._sources.choose(request, key, effects) if self._sources is not None else None,
            trace=asked.journey.sent(request.attempt.number, request.attempt.nodes) or asked.trace,
        )

    def leave(self, node: RegisteredNode, error: BatonError, effects: Effects) -> None:
        """Resume this node's requests elsewhere. Excuse attempts sent to a lost node after its last message.

        It was probably unreachable already: when this router loses its network, its links break one by one."""
        for request in self._needing(node):
            was_gone = isinstance(error, NodeLost) and request.attempt.sent_at > node.last_seen
            self.resume_or_fail(request, error, effects, is_free=was_gone, at_once=not was_gone)

    def bury(self, node: RegisteredNode, error: BatonError, effects: Effects) -> None:
        """Judge and resume a dead node's requests. Suspects go first, because each suspect needs a node of its own."""
        if effects.now < self.excused_until:  # this router was frozen, so the node may still be alive
            self.leave(node, error, effects)
            return
        requests = self._needing(node)
        just_left = [request for request in self._journal.parked() if request.attempt.ran_on == node.peer]
        verdict = self._suspects.judge(node, [*just_left, *(req for req in requests if req.runs_on(node))])
        if verdict.culprit is not None:
            effects.alarms.append(Alarm(KILLER_ALARM, node.node_id))
            self.fail(verdict.culprit, RequestKillsNodes(KILLER_REASON, subject=verdict.culprit.rid), effects)
        for request in sorted(requests, key=lambda request: request not in verdict.suspects):
            if request is not verdict.culprit:
                is_free = verdict.spares_others and request not in verdict.suspects
                self.resume_or_fail(request, error, effects, is_free=is_free)

    def _needing(self, node: RegisteredNode) -> list[OpenRequest]:
        """After its hand-off, a request does not need its prefill node."""
        requests = self._journal.served_by(node)
        return [request for request in requests if node is request.attempt.runner or not request.is_handed_over]

    def resume_or_fail(
        self,
        request: OpenRequest,
        error: BatonError,
        effects: Effects,
        *,
        is_free: bool = False,
        at_once: bool = True,
    ) -> None:
        """Begin the next attempt after the emitted tokens, or fail the request.

        Without `at_once`, the next attempt waits for the next tick, when more is known about the nodes."""
        is_excused = isinstance(error, NodeLost) and effects.now < self.excused_until
        if not is_excused and not any(node.is_draining for node in request.attempt.nodes):
            self._charge(request, is_free or is_nobodys_fault(error))
        if not can_resume(error):
            self.fail(request, error, effects)
            return
        if request.num_failed >= self._max_attempts:
            self.fail(request, given_up(error, request.num_failed), effects)
            return
        self.withdraw(request, error.code, effects)
        effects.num_resumed += 1
        if request.is_done:
            self.forget(request, effects.now)
        elif not at_once or isinstance(error, PeerUnreachable):
            # One node of the pair may have died. The next tick shows which one.
            request.attempt.parked_until = effects.now + self._resume_wait_s
        else:
            self.start(request, effects.now, effects)

    def move(self, request: OpenRequest, decode: RegisteredNode, effects: Effects) -> None:
        prefill = request.attempt.prefill
        self.withdraw(request, "moved", effects)
        request.num_moves += 1
        effects.num_moved += 1
        if request.is_done:
            self.forget(request, effects.now)
        else:
            self._send(request, Placement(prefill, decode), effects.now, effects)

    def _charge(self, request: OpenRequest, is_free: bool) -> None:
        """Count the attempt as failed or excused. Without MAX_EXCUSED, two nodes could blame each other for ever."""
        if is_free and request.num_excused < MAX_EXCUSED:
            request.num_excused += 1
        else:
            request.num_failed += 1

    def withdraw(self, request: OpenRequest, reason: str, effects: Effects) -> None:
        """`reason`: an error's code, or a word of ours."""
        request.asked.journey.attempt_over(reason)
        self._stop_everywhere(request, effects)
        self._no_verdict(request)
        request.begin_next_attempt()
        self._restart_sequences(request, effects)

    def _restart_sequences(self, request: OpenRequest, effects: Effects) -> None:
        """Close a sequence that lacks only its SequenceEnd."""
        for index, sequence in enumerate(request.sequences):
            if sequence.is_closed:
                continue
            sequence.restart()
            reason = sequence.reason_to_end(request.asked.sampling)
            if reason is not None:
                sequence.is_closed = True
                end = SequenceEnd(to_wire(self.key(request, index)), reason.value, len(sequence.ids), 0, "", "")
                effects.news.append(Update(request.rid, index, (), (), end))

    def avoid(self, request: OpenRequest, *nodes: RegisteredNode | None) -> None:
        request.avoid.update(node.peer for node in nodes if node is not None)

    def fail(self, request: OpenRequest, error: BatonError, effects: Effects) -> None:
        request.asked.journey.over(error)
        self.abandon(request, effects)
        effects.news.append(Failure(request.rid, error))

    def abandon(self, request: OpenRequest, effects: Effects) -> None:
        self._stop_everywhere(request, effects)
        self.end(request, effects.now)

    def end_answered(self, request: OpenRequest, now: float) -> None:
        """End a request whose sequences all have their last token."""
        attempt = request.attempt
        names = self._page_names(request, attempt.prefiller) if attempt.prefiller is not None else ()
        if names:
            key, peers = to_wire(self.key(request, 0)), tuple(node.peer for node in attempt.nodes)
            name, tenant = page_near_end(names), request.asked.tenant.number
            self.returns.ended(request.rid, EndedAnswer(key, peers, name, tenant, now, attempt.sent_at), names)
        self.end(request, now)

    def _page_names(self, request: OpenRequest, node: RegisteredNode) -> Sequence[bytes]:
        """Return the identities of the prompt's full pages on this node, last first."""
        return request.pages.names(node.hello) if request.pages is not None else ()

    def end(self, request: OpenRequest, now: float) -> None:
        self._no_verdict(request)
        self.forget(request, now)

    def _no_verdict(self, request: OpenRequest) -> None:
        """Allow another probe of the nodes if this request was a probe without a result."""
        for node in request.attempt.nodes:
            node.breaker.abandoned()
        self._placer.pairs.left(request.attempt)

    def forget(self, request: OpenRequest, now: float) -> None:
        """Forget a request without telling its client."""
        self._admission.over(request, now)
        for sequence in request.sequences:
            sequence.is_closed = True
        for node in request.attempt.nodes:
            self._aborts.remember(node.peer, to_wire(self.key(request, 0)), now)
        request.attempt.release()
        request.asked.journey.over(None)
        self._suspects.forget(request)
        self._journal.remove(request.rid)

    def _stop_everywhere(self, request: OpenRequest, effects: Effects) -> None:
        key = to_wire(self.key(request, 0))
        for node in request.attempt.nodes:
            self.stop(node, key, effects, all_sequences=True)

    def stop(self, node: RegisteredNode, key: Key, effects: Effects, *, all_sequences: bool) -> None:
        effects.sends.append((node.peer, Abort(key=key, all_sequences=all_sequences)))
        self._aborts.remember(node.peer, key, effects.now)

    def key(self, request: OpenRequest, seq_index: int) -> RequestKey:
        return RequestKey(self._router_id, self._router_epoch, request.rid, request.attempt.number, seq_index)
