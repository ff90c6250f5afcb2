"""Runs requests on nodes: attempts, tokens, aborts, lost nodes, deadlines. Sans-IO: every call returns Effects.

    open --Generate--> first node ... Tokens -> Update ... last SequenceEnd: forgotten
      |                     |lost, drained, refused or failed: the next attempt goes on behind the emitted tokens,
      |                     |as soon as there is a node; when attempts or time run out: Failure
      '--client gone, stop string, deadline: Abort to every node that has a part in it

One attempt lives at a time: the nodes of the one before get an Abort, and what they still send has an older key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.abort_log import AbortLog
from router.effects import Alarm, Effects, Failure, Update
from router.faults import can_resume, error_of_end, given_up, is_node_fault, is_partners
from router.journal import Journal, OpenRequest, SequenceJournal
from router.placement import NODES_AWAY_S, Placer
from router.registry import RegisteredNode, Registry
from shared.core.errors import (
    BatonError,
    DeadlineExceeded,
    HandoffFailed,
    NodeDraining,
    NodeLost,
    NoNodes,
    Overloaded,
)
from shared.core.keys import RequestKey
from shared.core.sampling_params import SamplingParams
from shared.wire.codec import key_of, to_wire
from shared.wire.messages import Abort, Drain, Generate, Key, Message, SequenceEnd, TokenRun, Tokens


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """`max_attempts` counts those that failed; leaving a draining node is none. `resume_wait_s`: how long a broken
    request waits while no node can take it."""

    max_open: int
    max_attempts: int
    request_timeout_s: float
    resume_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NewRequest:
    prompt_ids: list[int]
    num_sequences: int
    sampling: SamplingParams
    seed: int
    adapter: str = ""  # digest


class Dispatcher:
    """Owned by the router's loop. `now` is a monotonic clock in seconds."""

    def __init__(
        self, identity: tuple[str, int], registry: Registry, placer: Placer, journal: Journal, limits: DispatchLimits
    ) -> None:
        self._router_id, self._router_epoch = identity
        self._registry = registry
        self._placer = placer
        self._journal = journal
        self._limits = limits
        self._told = AbortLog()
        self._excused_until = -float("inf")  # nodes lost until then cost no attempt: the router was away itself

    def open(self, news: Sequence[NewRequest], now: float) -> tuple[list[str], Effects]:
        """Admits all or none. Raises Overloaded or NoNodes, and then nothing has changed."""
        if len(self._journal) + len(news) > self._limits.max_open:
            raise Overloaded(f"{len(self._journal)} requests are open already; try again")
        if not self._placer.is_possible(now):
            raise NoNodes("no node can take requests now; try again")
        effects = Effects(now)
        requests = [self._new_request(new, now) for new in news]
        for request in requests:
            self._journal.add(request)
            self._start_attempt(request, now, effects)
        return [request.rid for request in requests], effects

    def cancel(self, rids: Iterable[str], now: float) -> Effects:
        """The client is gone, or wants no more of any of it."""
        effects = Effects(now)
        for request in filter(None, map(self._journal.find, rids)):
            self._abandon(request, effects)
        return effects

    def close_sequence(self, rid: str, seq_index: int, now: float) -> Effects:
        """The router itself found the end of one sequence (a stop string)."""
        effects = Effects(now)
        request = self._journal.find(rid)
        if request is None or request.sequences[seq_index].is_closed:
            return effects
        request.sequences[seq_index].is_closed = True
        key = to_wire(self._key(request, seq_index))
        for node in request.nodes:
            self._stop(node, key, effects, all_sequences=False)
        self._after_progress(request, effects)
        return effects

    def tokens(self, message: Tokens, now: float) -> Effects:
        """What a step of some node brought. Runs come before ends."""
        effects = Effects(now)
        node = self._registry.find(message.node_id, message.epoch)
        if node is None:
            effects.alarms.append(Alarm("tokens of an unknown node", message.node_id))
            return effects
        node.last_seen = now
        for run in message.runs:
            self._take_run(node, run, effects)
        for end in message.ends:
            self._take_end(node, end, now, effects)
        return effects

    def node_lost(self, node: RegisteredNode, reason: str, now: float) -> Effects:
        """Its connection closed, it fell silent, or it restarted."""
        effects = Effects(now)
        node.breaker.failed(now)
        self._leave(node, NodeLost(f"node {node.node_id} is lost: {reason}"), effects)
        return effects

    def was_away(self, excused_until: float) -> None:
        """The router was frozen: its nodes gave it up meanwhile, of which it will hear one by one."""
        self._excused_until = excused_until

    def drain(self, node: RegisteredNode, drain: Drain, move_after_s: float, now: float) -> Effects:
        """It gets nothing new. What still runs there when the time is over goes on elsewhere."""
        effects = Effects(now)
        node.is_draining, node.drain = True, drain
        node.move_at = now + move_after_s
        effects.sends.append((node.peer, drain))
        return effects

    def send_refused(self, peer: str, message: Message, now: float) -> Effects:
        """A message found a full queue or no peer."""
        effects = Effects(now)
        if isinstance(message, Generate):
            node = self._registry.by_peer(peer)
            if node is not None:
                node.breaker.failed(now)
            request = self._journal.find(message.key.rid)
            if request is not None and request.attempt == message.key.attempt:
                self._avoid(request, request.prefiller)
                if request.attempt:  # what never left is no failed attempt; the next tick tries again
                    self._withdraw(request, effects)
                    request.parked_until = now + self._limits.resume_wait_s
                else:
                    self._resume_or_fail(request, NodeLost(f"node {peer} takes no messages"), effects)
        return effects

    def tick(self, now: float) -> Effects:
        """Deadlines, drains that take too long, requests that wait for a node. Called a few times a second."""
        effects = Effects(now)
        self._placer.is_possible(now)  # it remembers when
        for request in self._journal.overdue(now):
            self._fail(request, DeadlineExceeded("the request took longer than this server allows"), effects)
        for node in self._registry:
            if node.is_draining and now >= node.move_at:
                self._leave(node, NodeDraining(f"node {node.node_id} is drained"), effects)
        for request in self._journal.parked():
            self._start_attempt(request, now, effects)
        return effects

    def fail_all(self, error: BatonError, now: float) -> Effects:
        """The router stops."""
        effects = Effects(now)
        for request in self._journal.all():
            self._fail(request, error, effects)
        return effects

    # ---- attempts

    def _new_request(self, new: NewRequest, now: float) -> OpenRequest:
        sequences = [SequenceJournal(new.sampling.max_tokens) for _ in range(new.num_sequences)]
        return OpenRequest(
            rid=self._journal.new_rid(),
            prompt_ids=new.prompt_ids,
            sampling=new.sampling,
            seed=new.seed,
            deadline=now + self._limits.request_timeout_s,
            sequences=sequences,
            adapter=new.adapter,
        )

    def _start_attempt(self, request: OpenRequest, now: float, effects: Effects) -> None:
        """Raises nothing: a request that can't be placed now waits a while, a new one only while nodes dial anew."""
        emitted = max(len(sequence.ids) for sequence in request.sequences)
        try:
            prompt = len(request.prompt_ids)
            most = prompt + request.sampling.max_tokens
            placement = self._placer.place(prompt + emitted, now, request.avoid, most, request.adapter)
        except NoNodes as error:
            if request.parked_until is None and (request.attempt or self._placer.is_possible(now)):
                request.parked_until = now + (self._limits.resume_wait_s if request.attempt else NODES_AWAY_S)
            if request.parked_until is None or now >= request.parked_until:
                self._fail(request, error, effects)
            return
        request.parked_until = None
        request.prefill, request.decode = placement.prefill, placement.decode
        request.occupy()
        first = request.prefiller
        assert first is not None
        effects.sends.append((first.peer, self._generate(request, now)))

    def _generate(self, request: OpenRequest, now: float) -> Generate:
        target = request.decode if request.prefill is not None else None
        return Generate(
            key=to_wire(self._key(request, 0)),
            prompt_ids=request.prompt_ids,
            output_ids=[[] if sequence.is_closed else sequence.ids.copy() for sequence in request.sequences],
            num_sequences=len(request.sequences),
            ended=[index for index, sequence in enumerate(request.sequences) if sequence.is_closed],
            sampling=to_wire(request.sampling),
            seed=request.seed,
            decode_node=target.node_id if target else "",
            decode_epoch=target.hello.epoch if target else 0,
            decode_endpoint=target.hello.node_endpoint if target else "",
            remaining_ms=max(1, int((request.deadline - now) * 1000)),
            adapter=request.adapter,
        )

    def _leave(self, node: RegisteredNode, error: BatonError, effects: Effects) -> None:
        for request in self._journal.served_by(node):
            if node is request.prefill and request.decode is not None and self._is_handed_over(request):
                continue  # the decode node has everything
            self._resume_or_fail(request, error, effects)

    def _resume_or_fail(self, request: OpenRequest, error: BatonError, effects: Effects) -> None:
        """The next attempt goes on behind what was emitted. To be moved off a draining node costs no attempt,
        nor does what this router missed."""
        is_excused = isinstance(error, NodeLost) and effects.now < self._excused_until
        request.num_failed += not is_excused and not any(node.is_draining for node in request.nodes)
        if not can_resume(error):
            self._fail(request, error, effects)
            return
        if request.num_failed >= self._limits.max_attempts:
            self._fail(request, given_up(error, request.num_failed), effects)
            return
        self._withdraw(request, effects)
        effects.num_resumed += 1
        if request.is_done:
            self._forget(request, effects.now)
        else:
            self._start_attempt(request, effects.now, effects)

    def _withdraw(self, request: OpenRequest, effects: Effects) -> None:
        """From its nodes; what follows is the next attempt."""
        self._stop_everywhere(request, effects)
        for node in request.nodes:
            node.breaker.abandoned()
        request.release()
        request.attempt += 1
        request.begun_by_decode.clear()
        self._restart_sequences(request, effects)

    def _restart_sequences(self, request: OpenRequest, effects: Effects) -> None:
        """One whose last token is here, and only the word that it was the last is missing, has ended."""
        for index, sequence in enumerate(request.sequences):
            if sequence.is_closed:
                continue
            sequence.restart()
            reason = sequence.reason_to_end(request.sampling)
            if reason is not None:
                sequence.is_closed = True
                end = SequenceEnd(to_wire(self._key(request, index)), reason.value, len(sequence.ids), 0, "", "")
                effects.news.append(Update(request.rid, index, (), (), end))

    def _avoid(self, request: OpenRequest, *nodes: RegisteredNode | None) -> None:
        request.avoid.update(node.peer for node in nodes if node is not None)

    def _fail(self, request: OpenRequest, error: BatonError, effects: Effects) -> None:
        self._abandon(request, effects)
        effects.news.append(Failure(request.rid, error))

    def _abandon(self, request: OpenRequest, effects: Effects) -> None:
        self._stop_everywhere(request, effects)
        for node in request.nodes:
            node.breaker.abandoned()
        self._forget(request, effects.now)

    def _forget(self, request: OpenRequest, now: float) -> None:
        """Whatever a node still sends for it is dropped without a word."""
        for sequence in request.sequences:
            sequence.is_closed = True
        for node in request.nodes:
            self._told.remember(node.peer, to_wire(self._key(request, 0)), now)
        request.release()
        self._journal.remove(request.rid)

    def _stop_everywhere(self, request: OpenRequest, effects: Effects) -> None:
        key = to_wire(self._key(request, 0))
        for node in request.nodes:
            self._stop(node, key, effects, all_sequences=True)

    def _stop(self, node: RegisteredNode, key: Key, effects: Effects, *, all_sequences: bool) -> None:
        effects.sends.append((node.peer, Abort(key=key, all_sequences=all_sequences)))
        self._told.remember(node.peer, key, effects.now)

    # ---- what comes back

    def _take_run(self, node: RegisteredNode, run: TokenRun, effects: Effects) -> None:
        request = self._find(node, run.key, effects)
        if request is None:
            return
        if run.first_pos < 0 or (run.logprobs and len(run.logprobs) != len(run.ids)):
            effects.alarms.append(Alarm("malformed token run", node.node_id))
            return
        sequence = request.sequences[run.key.seq_index]
        if sequence.is_closed:
            return
        if node is request.decode:
            request.begun_by_decode.add(run.key.seq_index)
        taken = sequence.take(run.first_pos, run.ids, run.logprobs)
        if taken.conflict:
            effects.alarms.append(Alarm("two nodes disagree on a token", node.node_id))
        end = sequence.end if sequence.has_all else None
        if taken.ids or end is not None:
            effects.news.append(Update(request.rid, run.key.seq_index, taken.ids, taken.logprobs, end))
        if end is not None:
            sequence.is_closed = True
        self._after_progress(request, effects)

    def _take_end(self, node: RegisteredNode, end: SequenceEnd, now: float, effects: Effects) -> None:
        request = self._find(node, end.key, effects)
        if request is None:
            return
        sequence = request.sequences[end.key.seq_index]
        if sequence.is_closed:
            return
        error = error_of_end(end, node.node_id)
        if error is not None:
            self._ended_badly(request, node, error, effects)
            return
        node.breaker.succeeded()
        sequence.end = end
        if sequence.has_all:
            sequence.is_closed = True
            effects.news.append(Update(request.rid, end.key.seq_index, (), (), end))
            self._after_progress(request, effects)

    def _ended_badly(self, request: OpenRequest, node: RegisteredNode, error: BatonError, effects: Effects) -> None:
        """The next attempt goes elsewhere: after a failed hand-off to neither of the two, and not to a node that its
        partner calls lost or full."""
        if isinstance(error, NodeDraining):
            node.is_draining = True  # its heartbeat will say so too
        elif is_node_fault(error):
            node.breaker.failed(effects.now)
        if isinstance(error, HandoffFailed):
            self._avoid(request, *request.nodes)
        elif is_partners(error):
            self._avoid(request, *(other for other in request.nodes if other is not node))
        else:
            self._avoid(request, node)
        self._resume_or_fail(request, error, effects)

    def _after_progress(self, request: OpenRequest, effects: Effects) -> None:
        if request.waits_for_prefill and request.has_started:
            request.prompt_done()
            if request.prefill is not None:
                request.prefill.breaker.succeeded()
        if request.is_done:
            for node in request.nodes:
                node.breaker.abandoned()
            self._forget(request, effects.now)

    def _is_handed_over(self, request: OpenRequest) -> bool:
        return all(
            sequence.is_closed or index in request.begun_by_decode for index, sequence in enumerate(request.sequences)
        )

    def _find(self, node: RegisteredNode, wire_key: Key, effects: Effects) -> OpenRequest | None:
        """The open request a key belongs to; who works on anything else is told to stop, now and then."""
        request = self._journal.find(wire_key.rid)
        if (
            request is not None
            and 0 <= wire_key.seq_index < len(request.sequences)
            and key_of(wire_key) == self._key(request, wire_key.seq_index)
            and node in request.nodes
        ):
            return request
        if wire_key.router_id == self._router_id:
            self._stop_stray(node, to_wire(key_of(wire_key).sibling(0)), effects)
        return None

    def _stop_stray(self, node: RegisteredNode, whole: Key, effects: Effects) -> None:
        if not self._told.knows(node.peer, whole):
            effects.alarms.append(Alarm("tokens for a request that is not open", node.node_id))
        if self._told.is_due(node.peer, whole, effects.now):
            self._stop(node, whole, effects, all_sequences=True)

    def _key(self, request: OpenRequest, seq_index: int) -> RequestKey:
        return RequestKey(self._router_id, self._router_epoch, request.rid, request.attempt, seq_index)
