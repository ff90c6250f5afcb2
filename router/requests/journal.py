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

from router.fleet.prefix_index import ComingPages, PromptPages
from router.fleet.registry import RegisteredNode
from router.tenants.tenant import EVERYBODY, Tenant
from shared.core.errors import IntegrityError
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from shared.wire.messages import SequenceEnd, TokenLogprob


class Taken(msgspec.Struct, frozen=True):
    """New tokens of one run. `conflict`: whether a duplicate differed from the emitted token."""

    ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    conflict: bool


NOTHING_TAKEN = Taken((), (), False)


@dataclass(slots=True)
class SequenceJournal:
    """`end` takes effect when all tokens before it have arrived."""

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
class Death:
    """The death of a node that ran a request with `num_emitted` emitted tokens."""

    peer: str
    num_emitted: int


def cost_of(prompt_tokens: int, num_sequences: int, sampling: SamplingParams, expected_answer: float = math.inf) -> int:
    return prompt_tokens + num_sequences * math.ceil(min(sampling.max_tokens, expected_answer))


@dataclass(slots=True, eq=False)
class OpenRequest:
    """The record of one rid: one prompt, and n sequences on the same nodes."""

    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int
    deadline: float
    sequences: list[SequenceJournal]
    scores: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens after the first
    lacks_scores: bool = False
    adapter: str = ""  # the adapter's digest, because a name may pass to another adapter
    cache_salt: int = 0
    pages: PromptPages | None = None
    affinity: str = ""
    tenant: Tenant = EVERYBODY
    rank: int = 0  # among the tenant's waiting requests: lower ranks start first
    expected_answer: float = math.inf  # in tokens
    queued_at: float = 0.0
    started_at: float | None = None
    attempt: int = 0
    num_failed: int = 0  # attempts that count against max_attempts
    num_excused: int = 0  # failed attempts that don't count, at most MAX_EXCUSED
    # peers that failed the request; used only if there are no other peers
    avoid: set[str] = field(default_factory=set)
    parked_until: float | None = None  # end of the wait for a usable node
    sent_at: float = 0.0
    prefill: RegisteredNode | None = None
    decode: RegisteredNode | None = None
    waits_since: float | None = None  # when the request began to wait for the decode node's memory
    num_moves: int = 0
    waits_for_prefill: bool = False  # whether the prompt counts as work of `prefiller`
    prompt_work: int = 0  # prompt tokens that `prefiller` had not cached
    coming: list[tuple[ComingPages, list[bytes]]] = field(default_factory=list)  # what this prompt brings to nodes
    begun_by_decode: set[int] = field(default_factory=set)  # indices of sequences
    has_begun: bool = False  # whether `prefiller` has begun the prompt
    ran_on: str = ""  # while parked: the peer that had begun the last attempt, if any
    death: Death | None = None  # the last death of a node that ran this request
    is_alone: bool = False  # whether this suspect runs on a node without other requests of ours

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
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def is_decoded(self) -> bool:
        begun = self.begun_by_decode
        return bool(begun) and any(not self.sequences[index].is_closed for index in begun)

    def runs_on(self, node: RegisteredNode) -> bool:
        """Return whether the node is known to compute this request's prompt or tokens now."""
        if node is self.decode and self.is_decoded:
            return True
        return node is self.prefiller and self.has_begun and (node is self.runner or self.waits_for_prefill)

    @property
    def num_tokens(self) -> int:
        """The number of tokens for which a new attempt needs KV: the prompt and the longest open sequence."""
        emitted = (len(sequence.ids) for sequence in self.sequences if not sequence.is_closed)
        return len(self.prompt_ids) + max(emitted, default=0)

    @property
    def cost(self) -> int:
        """The expected tokens. They never change, so that sums over requests stay right."""
        return self.cost_if(self.expected_answer)

    def cost_if(self, expected_answer: float) -> int:
        return cost_of(len(self.prompt_ids), len(self.sequences), self.sampling, expected_answer)

    @property
    def num_used(self) -> int:
        return len(self.prompt_ids) + self.num_emitted

    @property
    def most_tokens(self) -> int:
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def wants_scores(self) -> bool:
        return self.sampling.prompt_logprobs >= 0

    @property
    def is_done(self) -> bool:
        return all(sequence.is_closed for sequence in self.sequences)

    @property
    def has_started(self) -> bool:
        return all(sequence.ids or sequence.is_closed for sequence in self.sequences)

    def occupy(self) -> None:
        prefiller, runner = self.prefiller, self.runner
        assert prefiller is not None and runner is not None
        self.prompt_work = self._lacking(prefiller)
        self._expect(prefiller.pages.computing, prefiller)
        if runner is not prefiller:
            self._expect(runner.pages.arriving, runner)
        prefiller.open_prompt_tokens += len(self.prompt_ids)
        prefiller.open_prompt_work += self.prompt_work
        runner.open_sequences += len(self.sequences)
        prefiller.sent_prompt_work += self.prompt_work
        runner.sent_sequences += len(self.sequences)
        self.waits_for_prefill = True
        for node in self.nodes:
            node.dispatched += 1
            node.breaker.sent()

    def _lacking(self, node: RegisteredNode) -> int:
        cached = 0 if self.pages is None else self.pages.cached_tokens(node.pages, node.hello)
        return len(self.prompt_ids) - cached

    def _expect(self, coming: ComingPages, node: RegisteredNode) -> None:
        """Until the prompt is done. Then the node tells what it has cached."""
        if self.pages is not None:
            names = self.pages.names(node.hello)
            coming.add(names)
            self.coming.append((coming, names))

    def prompt_done(self) -> None:
        for coming, names in self.coming:
            coming.remove(names)
        self.coming.clear()
        if self.waits_for_prefill and self.prefiller is not None:
            self.prefiller.open_prompt_tokens -= len(self.prompt_ids)
            self.prefiller.open_prompt_work -= self.prompt_work
        self.waits_for_prefill = False

    def release(self) -> None:
        self.prompt_done()
        if self.runner is not None:
            self.runner.open_sequences -= len(self.sequences)
        self.prefill = self.decode = None


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
        """Raise IntegrityError for a finished request."""
        done = [request.rid for request in self._open.values() if request.is_done]
        if done:
            raise IntegrityError(f"finished requests still in the journal: {', '.join(done)}")
