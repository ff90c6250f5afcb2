"""Record each open request and its tokens. Only this record outlives a node. Sans-IO.

The position rule: a token is taken only at position len(emitted). An earlier token must equal the emitted one, and a
later token waits.

    emitted   [t0 t1 t2]            next position: 3
    run at 1: [t1 t2 t3]     ->     t1, t2 compared, t3 taken
    run at 5: [t5]           ->     waits for 3 and 4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from router.fleet.prefix_index import PromptPages
from router.fleet.registry import RegisteredNode
from router.requests.attempt import Attempt
from router.requests.new_request import NewRequest
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from shared.wire.messages import SequenceEnd, TokenLogprob


class NewRun(msgspec.Struct, frozen=True):
    """New tokens of one run. `conflict`: whether a duplicate differed from the emitted token."""

    ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    conflict: bool


@dataclass(slots=True)
class SequenceJournal:
    """`end` takes effect when all tokens before it have arrived."""

    max_tokens: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: SequenceEnd | None = None
    is_closed: bool = False
    _waiting: dict[int, tuple[int, TokenLogprob | None]] = field(default_factory=dict)

    def take_tokens(self, first_pos: int, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> NewRun:
        if first_pos == len(self.ids) and not self._waiting:  # the common case
            room = self.max_tokens - first_pos
            if len(ids) > room:
                ids, logprobs = ids[:room], logprobs[:room]
            self.ids.extend(ids)
            if logprobs:
                self.logprobs.extend(logprobs)
            return NewRun(ids, logprobs, False)
        before = len(self.ids)
        conflict = False
        for offset, token in enumerate(ids):
            position = first_pos + offset
            if position < before:
                conflict = conflict or self.ids[position] != token
            elif position < self.max_tokens:
                self._waiting[position] = (token, logprobs[offset] if logprobs else None)
        self._close_gap()
        return NewRun(self.ids[before:], self.logprobs[before:] if logprobs else (), conflict)

    def restart(self) -> None:
        self._waiting.clear()
        self.end = None

    def reason_to_end(self, sampling: SamplingParams) -> FinishReason | None:
        """Return the finish reason if the emitted tokens already end the sequence."""
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
        return self.end is not None and len(self.ids) >= min(self.end.num_output_tokens, self.max_tokens)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The death of a node that ran a request with `num_emitted` emitted tokens."""

    peer: str
    num_emitted: int


@dataclass(slots=True, eq=False)
class OpenRequest:
    """The record of one rid: one prompt, and n sequences on the same nodes."""

    rid: str
    asked: NewRequest
    deadline: float
    pages: PromptPages | None = None
    expected_answer: float = math.inf  # in tokens
    sequences: list[SequenceJournal] = field(init=False)
    scores: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens after the first
    lacks_scores: bool = field(init=False)
    queued_at: float = 0.0
    started_at: float | None = None
    num_failed: int = 0  # attempts that count against max_attempts
    num_excused: int = 0  # failed attempts that don't count, at most MAX_EXCUSED
    num_moves: int = 0
    # peers that failed the request; used only if there are no other peers
    avoid: set[str] = field(default_factory=set)
    attempt: Attempt = field(init=False)
    suspicion: Suspicion | None = None  # by the last such death

    def __post_init__(self) -> None:
        asked = self.asked
        self.sequences = [SequenceJournal(asked.sampling.max_tokens) for _ in range(asked.num_sequences)]
        self.lacks_scores = asked.wants_scores and len(asked.prompt_ids) > 1
        self.attempt = Attempt(asked, self.pages)

    def begin_next_attempt(self) -> None:
        last = self.attempt
        ran_on = next((node.peer for node in last.nodes if self.runs_on(node)), "")
        last.release()
        self.attempt = Attempt(self.asked, self.pages, last.number + 1, ran_on)

    @property
    def num_emitted(self) -> int:
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def is_decoded(self) -> bool:
        begun = self.attempt.begun_by_decode
        return bool(begun) and any(not self.sequences[index].is_closed for index in begun)

    @property
    def is_handed_over(self) -> bool:
        begun = self.attempt.begun_by_decode
        return all(sequence.is_closed or index in begun for index, sequence in enumerate(self.sequences))

    def runs_on(self, node: RegisteredNode) -> bool:
        """Return whether the node is known to compute this request's prompt or tokens now."""
        attempt = self.attempt
        if node is attempt.decode and self.is_decoded:
            return True
        return node is attempt.prefiller and attempt.has_begun and (node is attempt.runner or attempt.waits_for_prefill)

    @property
    def num_tokens(self) -> int:
        """The number of tokens for which a new attempt needs KV: the prompt and the longest open sequence."""
        emitted = (len(sequence.ids) for sequence in self.sequences if not sequence.is_closed)
        return len(self.asked.prompt_ids) + max(emitted, default=0)

    @property
    def cost(self) -> int:
        """The expected tokens. They never change, so that sums over requests stay right."""
        return self.asked.cost(self.expected_answer)

    @property
    def num_used(self) -> int:
        return len(self.asked.prompt_ids) + self.num_emitted

    @property
    def is_done(self) -> bool:
        return all(sequence.is_closed for sequence in self.sequences)

    @property
    def has_started(self) -> bool:
        return all(sequence.ids or sequence.is_closed for sequence in self.sequences)


class Journal:
    """All open requests by rid. `nonce` makes rids unguessable, so a node knows only the rids of its own requests."""

    def __init__(self, nonce: Callable[[], str]) -> None:
        self._nonce = nonce
        self._open: dict[str, OpenRequest] = {}
        self._last_rid = 0

    def __len__(self) -> int:
        return len(self._open)

    def new_rid(self) -> str:
        self._last_rid += 1
        return f"{self._last_rid:x}.{self._nonce()}"

    def add_request(self, request: OpenRequest) -> None:
        self._open[request.rid] = request

    def find(self, rid: str) -> OpenRequest | None:
        return self._open.get(rid)

    def remove(self, rid: str) -> None:
        self._open.pop(rid, None)

    def served_by(self, node: RegisteredNode) -> list[OpenRequest]:
        return [request for request in self._open.values() if node in request.attempt.nodes]

    def overdue(self, now: float) -> list[OpenRequest]:
        return [request for request in self._open.values() if now >= request.deadline]

    def parked(self) -> list[OpenRequest]:
        return [request for request in self._open.values() if request.attempt.parked_until is not None]

    def all(self) -> list[OpenRequest]:
        return list(self._open.values())
