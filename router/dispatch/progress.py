"""Apply nodes' messages to open requests, for the dispatcher. Sans-IO."""

from __future__ import annotations

from router.dispatch.attempts import Attempts
from router.fleet.leaving import By, leaving_also
from router.fleet.registry import RegisteredNode, Registry
from router.requests.abort_log import AbortLog
from router.requests.effects import Alarm, Effects, ScoredPrompt, Update
from router.requests.faults import error_of_end, is_node_fault, is_partners
from router.requests.journal import Journal, OpenRequest
from router.requests.pairs import Pairs
from shared.core.errors import BatonError, HandoffFailed, NodeDraining, NodeLost, PeerUnreachable
from shared.wire.codec import key_of, to_wire
from shared.wire.messages import Begun, Key, Scores, SequenceEnd, TokenRun, Tokens
from shared.wire.parts import Taken

VANISHED_ALARM = "a request vanished on its way to a node"


class Progress:
    def __init__(
        self,
        identity: tuple[str, int],
        registry: Registry,
        journal: Journal,
        attempts: Attempts,
        pairs: Pairs,
        aborts: AbortLog,
    ) -> None:
        self._router_id, self._router_epoch = identity
        self._registry = registry
        self._journal = journal
        self._attempts = attempts
        self._pairs = pairs
        self._aborts = aborts

    def tokens(self, message: Tokens, now: float) -> Effects:
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

    def begun(self, message: Begun, now: float) -> Effects:
        effects = Effects(now)
        node = self._registry.find(message.node_id, message.epoch)
        if node is not None:
            node.last_seen = now
            for key in message.keys:
                request = self._find(node, key, effects)
                if request is not None and node is request.attempt.prefiller:
                    request.attempt.has_begun = True
                    effects.begun.append(request.rid)
        return effects

    def taken(self, node: RegisteredNode, taken: Taken, now: float) -> Effects:
        """Withdraw what never came to this node, and place it anew. The request is not to blame."""
        effects = Effects(now)
        for key in node.unconfirmed.vanished(taken):
            request = self._journal.find(key.rid)
            if request is None or request.attempt.number != key.attempt or request.attempt.has_begun:
                continue
            node.breaker.failed(now)
            effects.alarms.append(Alarm(VANISHED_ALARM, node.node_id))
            self._attempts.avoid(request, node)
            lost = NodeLost(f"node {node.node_id} never took the request")
            self._attempts.resume_or_fail(request, lost, effects, is_free=True)
        return effects

    def scores(self, message: Scores, now: float) -> Effects:
        """Take a prompt's log-probabilities, each once and in order."""
        effects = Effects(now)
        node = self._registry.find(message.node_id, message.epoch)
        request = None if node is None else self._find(node, message.key, effects)
        if node is None or request is None:
            return effects
        node.last_seen = now
        known = len(request.scores) + 1
        if not request.asked.wants_scores or message.first_pos > known:
            effects.alarms.append(Alarm("malformed scores of a prompt", node.node_id))
            return effects
        num_prompt_tokens = len(request.asked.prompt_ids)
        new = message.logprobs[known - message.first_pos : num_prompt_tokens - message.first_pos]
        if new:
            request.scores.extend(new)
            request.lacks_scores = len(request.scores) + 1 < num_prompt_tokens
            effects.news.append(ScoredPrompt(request.rid, new))
        return effects

    def close_sequence(self, rid: str, seq_index: int, now: float) -> Effects:
        """End a sequence in which the router found a stop string."""
        effects = Effects(now)
        request = self._journal.find(rid)
        if request is None or request.sequences[seq_index].is_closed:
            return effects
        request.sequences[seq_index].is_closed = True
        key = to_wire(self._attempts.key(request, seq_index))
        for node in request.attempt.nodes:
            self._attempts.stop(node, key, effects, all_sequences=False)
        self._after_progress(request, effects)
        return effects

    def _take_run(self, node: RegisteredNode, run: TokenRun, effects: Effects) -> None:
        """Take a sequence's tokens of one step. Keep checks few: each token pays for them."""
        key, ids, logprobs = run.key, run.ids, run.logprobs
        request = self._find(node, key, effects)
        if request is None:
            return
        if run.first_pos < 0 or (logprobs and len(logprobs) != len(ids)):
            effects.alarms.append(Alarm("malformed token run", node.node_id))
            return
        sequence = request.sequences[key.seq_index]
        if sequence.is_closed or (request.lacks_scores and self._are_scores_lost(request, node, key, effects)):
            return
        attempt = request.attempt
        if node is attempt.decode:
            attempt.begun_by_decode.add(key.seq_index)
        taken = sequence.take_tokens(run.first_pos, ids, logprobs)
        if taken.conflict:
            effects.alarms.append(Alarm("two nodes disagree on a token", node.node_id))
        end = sequence.end if sequence.end is not None and sequence.has_all else None
        if taken.ids or end is not None:
            effects.news.append(Update(request.rid, key.seq_index, taken.ids, taken.logprobs, end))
        if end is not None:
            sequence.is_closed = True
        if end is not None or attempt.waits_for_prefill:
            self._after_progress(request, effects)

    def _are_scores_lost(self, request: OpenRequest, node: RegisteredNode, key: Key, effects: Effects) -> bool:
        """Return whether scores are lost. If so, resume or fail the request.

        Scores come before the first sequence's tokens. Missing scores were lost with a link, or dropped by a full
        queue."""
        if key.seq_index:
            return False
        lost = NodeLost(f"node {node.node_id}'s log-probabilities of the prompt were lost")
        self._attempts.resume_or_fail(request, lost, effects)
        return True

    def _take_end(self, node: RegisteredNode, end: SequenceEnd, now: float, effects: Effects) -> None:
        request = self._find(node, end.key, effects)
        if request is None:
            return
        sequence = request.sequences[end.key.seq_index]
        error = error_of_end(end, node.node_id)
        # a refused Generate names its first sequence, which may have ended before the others went on elsewhere
        if sequence.is_closed and (error is None or request.attempt.has_begun):
            return
        if error is not None:
            self._ended_badly(request, node, error, effects)
            return
        if request.lacks_scores and self._are_scores_lost(request, node, end.key, effects):
            return
        node.breaker.succeeded()
        sequence.end = end
        if sequence.has_all:
            sequence.is_closed = True
            effects.news.append(Update(request.rid, end.key.seq_index, (), (), end))
            self._after_progress(request, effects)

    def _ended_badly(self, request: OpenRequest, node: RegisteredNode, error: BatonError, effects: Effects) -> None:
        if isinstance(error, NodeDraining) and not is_partners(error):
            node.leaving = leaving_also(node.leaving, By.NODE)  # the node's next heartbeat will say the same
        elif is_node_fault(error):
            node.breaker.failed(effects.now)
        if isinstance(error, PeerUnreachable):
            self._pairs.failed(request.attempt, effects.now)
        elif isinstance(error, HandoffFailed):
            self._attempts.avoid(request, *request.attempt.nodes)
        elif is_partners(error):
            self._attempts.avoid(request, *(other for other in request.attempt.nodes if other is not node))
        else:
            self._attempts.avoid(request, node)
        self._attempts.resume_or_fail(request, error, effects)

    def _after_progress(self, request: OpenRequest, effects: Effects) -> None:
        attempt = request.attempt
        if attempt.waits_for_prefill and request.has_started:
            attempt.prompt_done()
            request.asked.journey.first_token()
            if attempt.prefill is not None:
                attempt.prefill.breaker.succeeded()
        if request.is_done:
            self._attempts.end_answered(request, effects.now)

    def _find(self, node: RegisteredNode, wire_key: Key, effects: Effects) -> OpenRequest | None:
        """Return the open request of a key. If there is none, send the node an Abort, at most once in REPEAT_S."""
        request = self._journal.find(wire_key.rid)
        if (
            request is not None
            and wire_key.attempt == request.attempt.number
            and wire_key.router_epoch == self._router_epoch
            and wire_key.router_id == self._router_id
            and 0 <= wire_key.seq_index < len(request.sequences)
            and (node is request.attempt.decode or node is request.attempt.prefill)
        ):
            return request
        if wire_key.router_id == self._router_id:
            self._stop_stray(node, to_wire(key_of(wire_key).sibling(0)), effects)
        return None

    def _stop_stray(self, node: RegisteredNode, whole: Key, effects: Effects) -> None:
        if not self._aborts.knows(node.peer, whole):
            effects.alarms.append(Alarm("tokens for a request that is not open", node.node_id))
        if self._aborts.is_due(node.peer, whole, effects.now):
            self._attempts.stop(node, whole, effects, all_sequences=True)
