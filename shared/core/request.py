"""The scheduler's record of one sequence, without tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.core.constraint import Constraint
from shared.core.keys import RequestKey
from shared.core.sampling_params import SamplingParams

TokenIds = npt.NDArray[np.int64]


class RequestState(enum.Enum):
    WAITING = "waiting"  # no row and no pages
    PREFILLING = "prefilling"  # the row and all pages of the prompt are reserved
    RUNNING = "running"  # decoding
    RESTORING = "restoring"  # row and pages are reserved; KV is coming from the cold tier
    GRANTED = "granted"  # decode node: row and pages are reserved; KV is coming
    HANDED_OFF = "handed_off"  # prefill node: the first token is known; pages stay pinned until Installed
    FINISHED = "finished"


S = RequestState
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    S.WAITING: frozenset({S.PREFILLING, S.RESTORING, S.GRANTED, S.FINISHED}),
    S.PREFILLING: frozenset({S.RUNNING, S.HANDED_OFF, S.WAITING, S.FINISHED}),
    S.RUNNING: frozenset({S.WAITING, S.FINISHED}),
    S.RESTORING: frozenset({S.PREFILLING, S.RUNNING, S.WAITING, S.FINISHED}),
    S.GRANTED: frozenset({S.RUNNING, S.WAITING, S.FINISHED}),
    S.HANDED_OFF: frozenset({S.WAITING, S.FINISHED}),
    S.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True, eq=False)
class NodeAsk:
    """What a client asks of a node, for one sequence. A hand-off copies it."""

    prompt_ids: TokenIds
    sampling: SamplingParams
    seed: int
    adapter: str = ""  # LoRA adapter's digest, or LONG of page_identity.py; "": neither
    cache_salt: int = 0  # 64 bits; 0 means no salt
    tenant: int = 0  # whose answer lengths to learn; 0: unknown
    trace: str = ""  # a W3C traceparent, or ""


@dataclass(slots=True, eq=False)
class Request:
    """Owned by one scheduler. A retraction raises `incarnation`, but keeps `arrival`, which tells the request's age."""

    key: RequestKey
    ask: NodeAsk
    arrival: int
    output_ids: list[int] = field(default_factory=list)
    handoff_to: str | None = None  # decode endpoint; None: decode here
    deadline: float = float("inf")
    constraint: Constraint | None = None  # enforces sampling.grammar
    scored: int = 0  # prompt tokens whose log-probabilities were reported
    page_names: list[bytes] | None = None  # identities of the prompt's full pages, once somebody asked

    state: RequestState = RequestState.WAITING
    incarnation: int = 0
    row: int = 0  # 0: no row
    awaits_prefix: bool = False  # another node is sending pages of this prompt
    cached_tokens: int = 0  # prompt tokens found in the prefix cache, for `usage`
    lacks_draft_state: bool = False  # the pages have no draft KV, so no other request can use them
    computed: int = 0  # tokens with KV in this incarnation, from processed steps or a hand-off

    def to(self, state: RequestState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"request {self.key}: {self.state.value} -> {state.value} is not a transition")
        self.state = state

    @property
    def num_tokens(self) -> int:
        return len(self.ask.prompt_ids) + len(self.output_ids)

    @property
    def first_unscored(self) -> int | None:
        """Return the first prompt position whose wanted log-probability is not reported yet.

        Position 0 has no log-probability.
        """
        position = max(self.scored, 1)
        is_wanted = self.ask.sampling.prompt_logprobs >= 0 and position < len(self.ask.prompt_ids)
        return position if is_wanted else None

    def all_ids(self) -> TokenIds:
        """Return the tokens whose KV a (repeated) prefill computes: prompt and output."""
        return np.concatenate([self.ask.prompt_ids, np.asarray(self.output_ids, dtype=np.int64)])

    @property
    def may_begin(self) -> bool:
        return not self.awaits_prefix and (self.constraint is None or self.constraint.is_ready)

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED
