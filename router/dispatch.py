"""Runs requests on nodes: attempts, tokens, aborts, lost nodes, deadlines. Sans-IO: every call returns Effects.

    open --Generate--> first node ... Tokens -> Update ... last SequenceEnd: forgotten
      |                     |lost, drained, refused or failed: the next attempt (attempts.py)
      '--client gone, stop string, deadline: Abort to every node that has a part in it

What nodes send back is taken in progress.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.abort_log import AbortLog
from router.attempts import Attempts
from router.effects import Alarm, Effects
from router.journal import Journal, OpenRequest, SequenceJournal
from router.moves import Moves
from router.pairs import ALARM, BrokenPair
from router.placement import Placer
from router.prefix_index import PromptPages
from router.progress import Progress
from router.registry import RegisteredNode, Registry
from router.suspects import Suspects
from router.tickets import Tickets
from shared.config.silence import link_silence
from shared.core.errors import BatonError, DeadlineExceeded, NodeDraining, NodeLost, NoNodes, Overloaded
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Begun, Drain, Generate, Message, Scores, Tokens


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
    cache_salt: int = 0
    affinity: str = ""


class Dispatcher:
    """Owned by the router's loop. `now` is a monotonic clock in seconds."""

    def __init__(
        self, identity: tuple[str, int], registry: Registry, placer: Placer, journal: Journal, limits: DispatchLimits
    ) -> None:
        self._registry = registry
        self._placer = placer
        self._journal = journal
        self._limits = limits
        told, suspects, self.tickets = AbortLog(), Suspects(registry), Tickets()
        self._attempts = Attempts(
            identity,
            placer,
            journal,
            told,
            suspects,
            self.tickets,
            max_attempts=limits.max_attempts,
            resume_wait_s=limits.resume_wait_s,
        )
        self._moves = Moves(registry, placer, suspects)
        self._progress = Progress(identity, registry, journal, self._attempts, placer.pairs, told)

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
            self._attempts.start(request, now, effects)
        return [request.rid for request in requests], effects

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
            cache_salt=new.cache_salt,
            pages=PromptPages(new.prompt_ids, new.adapter, new.cache_salt),
            affinity=new.affinity,
            lacks_scores=new.sampling.prompt_logprobs >= 0 and len(new.prompt_ids) > 1,
        )

    def cancel(self, rids: Iterable[str], now: float) -> Effects:
        """The client is gone, or wants no more of any of it."""
        effects = Effects(now)
        for request in filter(None, map(self._journal.find, rids)):
            self._attempts.abandon(request, effects)
        return effects

    def close_sequence(self, rid: str, seq_index: int, now: float) -> Effects:
        """The router itself found the end of one sequence (a stop string)."""
        return self._progress.close_sequence(rid, seq_index, now)

    def tokens(self, message: Tokens, now: float) -> Effects:
        """What a step of some node brought. Runs come before ends."""
        return self._progress.tokens(message, now)

    def node_lost(self, node: RegisteredNode, reason: str, now: float, *, has_died: bool = False) -> Effects:
        """Its connection closed, it fell silent, or it restarted. `has_died`: not merely silent, nor by its own word.
        One that had been mute for as long as a link waits was cut off, or lost its machine: no request does that."""
        effects = Effects(now)
        node.breaker.failed(now)
        self._placer.pairs.forget(node)
        error = NodeLost(f"node {node.node_id} is lost: {reason}")
        if has_died and now - node.last_seen < link_silence(self._registry.silence_s).shortest_s:
            self._attempts.bury(node, error, effects)
        else:
            self._attempts.leave(node, error, effects)
        return effects

    def begun(self, message: Begun, now: float) -> Effects:
        """A node computes the prompts of these requests from now on."""
        return self._progress.begun(message, now)

    def scores(self, message: Scores, now: float) -> Effects:
        """How likely some tokens of a prompt were."""
        return self._progress.scores(message, now)

    def unwelcome(self, node: RegisteredNode, now: float) -> Effects:
        """It serves another router: what was sent there goes on elsewhere, at no cost."""
        effects = Effects(now)
        self._placer.pairs.forget(node)
        node.is_draining = True
        self._attempts.leave(node, NodeDraining(f"node {node.node_id} serves another router of this name"), effects)
        return effects

    def was_away(self, excused_until: float) -> None:
        """The router was frozen: its nodes gave it up meanwhile, of which it will hear one by one."""
        self._attempts.excuse(excused_until)

    def drain(self, node: RegisteredNode, drain: Drain, move_after_s: float, now: float) -> Effects:
        """It gets nothing new. What still runs there when the time is over goes on elsewhere; the node tells other
        routers how long that is."""
        effects = Effects(now)
        node.is_draining, node.drain = True, drain
        node.move_at = now + move_after_s
        effects.sends.append((node.peer, node.drain_now(drain, now)))
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
                self._attempts.avoid(request, request.prefiller)
                if request.attempt:  # what never left is no failed attempt; the next tick tries again
                    self._attempts.withdraw(request, effects)
                    request.parked_until = now + self._limits.resume_wait_s
                else:
                    self._attempts.resume_or_fail(request, NodeLost(f"node {peer} takes no messages"), effects)
        return effects

    def tick(self, now: float) -> Effects:
        """Deadlines, drains that take too long, requests that wait for a node. Called a few times a second."""
        effects = Effects(now)
        self._placer.is_possible(now)  # it remembers when
        for request in self._journal.overdue(now):
            self._attempts.fail(request, DeadlineExceeded("the request took longer than this server allows"), effects)
        for node in self._registry:
            if node.is_draining and now >= node.move_at:
                self._attempts.leave(node, NodeDraining(f"node {node.node_id} is drained"), effects)
        for request in self._journal.parked():
            self._attempts.start(request, now, effects)
        self._look_at_pairs(effects)
        for move in self._moves.due(self._journal.all(), now):
            self._attempts.move(move.request, move.decode, effects)
        return effects

    def _look_at_pairs(self, effects: Effects) -> None:
        """What broke is told a tick later: by then a node that died is known to be dead, and its pairs are gone."""
        pairs = self._placer.pairs
        pairs.look(self._journal.find)
        effects.alarms.extend(Alarm(ALARM, pair.name) for pair in pairs.take_news())

    def broken_pairs(self) -> list[BrokenPair]:
        """Pairs of nodes that can't reach each other, as far as is known."""
        return self._placer.pairs.all()

    def fail_all(self, error: BatonError, now: float) -> Effects:
        """The router stops."""
        effects = Effects(now)
        for request in self._journal.all():
            self._attempts.fail(request, error, effects)
        return effects
