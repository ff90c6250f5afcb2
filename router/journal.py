"""What each open request has asked for and got so far. Sans-IO; the only memory of a request that outlives a node.

The position rule: a token is taken only at position len(emitted). An earlier one is a duplicate and must be equal;
a later one waits until the gap is closed.

    emitted   [t0 t1 t2]            next position: 3
    run at 1: [t1 t2 t3]     ->     t1, t2 compared, t3 taken
    run at 5: [t5]           ->     waits for 3 and 4
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from router.prefix_index import PromptPages
from router.registry import RegisteredNode
from shared.core.errors import IntegrityError
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from shared.wire.messages import SequenceEnd, TokenLogprob


class Taken(msgspec.Struct, frozen=True):
    """What one run brought. `conflict`: a duplicate differed from what was emitted."""

    ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    conflict: bool


NOTHING_TAKEN = Taken((), (), False)


@dataclass(slots=True)
class SequenceJournal:
    """One sequence. `end` may come before the last tokens; it counts once they are all there."""

    max_tokens: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: SequenceEnd | None = None
    is_closed: bool = False
    _waiting: dict[int, tuple[int, TokenLogprob | None]] = field(default_factory=dict)

    def take(self, first_pos: int, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Taken:
        if first_pos == len(self.ids) and not self._waiting:  # the common case
            room = self.max_tokens - first_pos
            if len(ids) > room:
                ids, logprobs = ids[:room], logprobs[:room]
            self.ids.extend(ids)
            if logprobs:
                self.logprobs.extend(logprobs)
            return Taken(ids, logprobs, False)
        before = len(self.ids)
        conflict = False
        for offset, token in enumerate(ids):
            position = first_pos + offset
            if position < before:
                conflict = conflict or self.ids[position] != token
            elif position < self.max_tokens:
                self._waiting[position] = (token, logprobs[offset] if logprobs else None)
        self._close_gap()
        return Taken(self.ids[before:], self.logprobs[before:] if logprobs else (), conflict)

    def restart(self) -> None:
        """A new attempt goes on behind the emitted tokens; what the old one sent ahead is not trusted."""
        self._waiting.clear()
        self.end = None

    def reason_to_end(self, sampling: SamplingParams) -> FinishReason | None:
        """Why the emitted tokens are all there will be, whether or not the node's word for it has come."""
        if self.ids and self.ids[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.ids) >= self.max_tokens else None

    def _close_gap(self) -> None:
        while (entry := self._waiting.pop(len(self.ids), None)) is not None:
            self.ids.append(entry[0])
            if entry[1] is not None:
                self.logprobs.append(entry[1])

    @property
    def has_all(self) -> bool:
        """Whether the end has come and every token before it."""
        return self.end is not None and len(self.ids) >= min(self.end.num_output_tokens, self.max_tokens)


@dataclass(frozen=True, slots=True)
class Death:
    """Of a node while it ran a request: who it was, and how many tokens had come by then."""

    peer: str
    num_emitted: int


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One rid: one prompt, n sequences, one attempt at a time. With one node only, that one runs all of it."""

    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int
    deadline: float
    sequences: list[SequenceJournal]
    scores: list[TokenLogprob] = field(default_factory=list)  # of the prompt, from its second token on
    lacks_scores: bool = False  # they were asked for, and some have not come
    adapter: str = ""  # digest; it stays the same when the name is given to another one
    cache_salt: int = 0
    pages: PromptPages | None = None
    affinity: str = ""  # what its client calls itself, or its session
    attempt: int = 0
    num_failed: int = 0  # attempts; those that left a draining node do not count
    num_excused: int = 0  # attempts that ended by nobody's fault; a few are free
    avoid: set[str] = field(default_factory=set)  # peers that failed it: the next attempt goes elsewhere if it can
    parked_until: float | None = None  # no node could take the next attempt
    sent_at: float = 0.0  # when this attempt left
    prefill: RegisteredNode | None = None
    decode: RegisteredNode | None = None
    waits_since: float | None = None  # for memory of its decode node, as seen by the ticks
    num_moves: int = 0  # from a decode node without memory to one with room
    waits_for_prefill: bool = False  # whether its prompt counts as work before `prefiller`
    begun_by_decode: set[int] = field(default_factory=set)  # sequences the decode node has begun
    has_begun: bool = False  # whether `prefiller` has begun its prompt
    ran_on: str = ""  # parked: the peer that had begun it, and was left a moment ago
    death: Death | None = None  # the last one under it, see suspects.py
    is_alone: bool = False  # as a suspect, on a node with nothing else of ours

    @property
    def nodes(self) -> tuple[RegisteredNode, ...]:
        return tuple(node for node in (self.prefill, self.decode) if node is not None)

    @property
    def prefiller(self) -> RegisteredNode | None:
        return self.prefill or self.decode

    @property
    def runner(self) -> RegisteredNode | None:
        return self.decode or self.prefill

    @property
    def num_emitted(self) -> int:
        """Of all sequences."""
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def is_decoded(self) -> bool:
        """Whether its decode node has begun a sequence that is still open."""
        begun = self.begun_by_decode
        return bool(begun) and any(not self.sequences[index].is_closed for index in begun)

    def runs_on(self, node: RegisteredNode) -> bool:
        """Whether a node is known to compute for it now: its prompt, or the tokens behind it. One that waits there, or
        has handed over, does not."""
        if node is self.decode and self.is_decoded:
            return True
        return node is self.prefiller and self.has_begun and (node is self.runner or self.waits_for_prefill)

    @property
    def num_tokens(self) -> int:
        """Prompt and what was emitted of open sequences: whose KV an attempt that begins now needs."""
        emitted = (len(sequence.ids) for sequence in self.sequences if not sequence.is_closed)
        return len(self.prompt_ids) + max(emitted, default=0)

    @property
    def most_tokens(self) -> int:
        """Prompt and longest answer."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of the prompt were asked for."""
        return self.sampling.prompt_logprobs >= 0

    @property
    def is_done(self) -> bool:
        return all(sequence.is_closed for sequence in self.sequences)

    @property
    def has_started(self) -> bool:
        """Whether every sequence has its first token: then the prompt no longer waits anywhere."""
        return all(sequence.ids or sequence.is_closed for sequence in self.sequences)

    def occupy(self) -> None:
        """Book the work with the nodes that now have it before them; policies choose by these counts."""
        prefiller, runner = self.prefiller, self.runner
        assert prefiller is not None and runner is not None
        prefiller.open_prompt_tokens += len(self.prompt_ids)
        runner.open_sequences += len(self.sequences)
        self.waits_for_prefill = True
        for node in self.nodes:
            node.dispatched += 1
            node.breaker.sent()

    def prompt_done(self) -> None:
        """Take the prompt off its node's books: its first tokens are here, or nobody waits for them."""
        if self.waits_for_prefill and self.prefiller is not None:
            self.prefiller.open_prompt_tokens -= len(self.prompt_ids)
        self.waits_for_prefill = False

    def release(self) -> None:
        """The nodes are done with it, or no longer wanted."""
        self.prompt_done()
        if self.runner is not None:
            self.runner.open_sequences -= len(self.sequences)
        self.prefill = self.decode = None


class Journal:
    """All open requests by rid. `nonce` makes rids that nobody can guess: a node knows those of its own requests only,
    and so can't speak of others'."""

    def __init__(self, nonce: Callable[[], str]) -> None:
        self._nonce = nonce
        self._open: dict[str, OpenRequest] = {}
        self._last_rid = 0

    def __len__(self) -> int:
        return len(self._open)

    def new_rid(self) -> str:
        self._last_rid += 1
        return f"{self._last_rid:x}.{self._nonce()}"

    def add(self, request: OpenRequest) -> None:
        self._open[request.rid] = request

    def find(self, rid: str) -> OpenRequest | None:
        return self._open.get(rid)

    def remove(self, rid: str) -> None:
        self._open.pop(rid, None)

    def served_by(self, node: RegisteredNode) -> list[OpenRequest]:
        return [request for request in self._open.values() if node in request.nodes]

    def overdue(self, now: float) -> list[OpenRequest]:
        return [request for request in self._open.values() if now >= request.deadline]

    def parked(self) -> list[OpenRequest]:
        return [request for request in self._open.values() if request.parked_until is not None]

    def all(self) -> list[OpenRequest]:
        return list(self._open.values())

    def check_integrity(self) -> None:
        """A request whose sequences are all closed must not be here."""
        done = [request.rid for request in self._open.values() if request.is_done]
        if done:
            raise IntegrityError(f"finished requests still in the journal: {', '.join(done)}")
