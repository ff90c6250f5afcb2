"""Request: the scheduler's record of one sequence. No tensors; prompt and output ids stay apart for ever."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.core.constraint import Constraint
from shared.core.keys import RequestKey
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason

TokenIds = npt.NDArray[np.int64]


class RequestState(enum.Enum):
    """Explicit states; TRANSITIONS is the whole machine."""

    WAITING = "waiting"  # no row, no pages
    PREFILLING = "prefilling"  # row and all pages of the prompt reserved, chunks being computed
    RUNNING = "running"  # decoding
    RESTORING = "restoring"  # row and pages reserved, KV comes back from the cold tier
    GRANTED = "granted"  # decode node: row and pages reserved, KV on its way
    HANDED_OFF = "handed_off"  # prefill node: first token known, pages pinned until Installed
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


@dataclass(slots=True, eq=False)
class Request:
    """Owned by one scheduler. `arrival` is seniority and survives retraction; `incarnation` rises with each one."""

    key: RequestKey
    prompt_ids: TokenIds
    sampling: SamplingParams
    seed: int
    arrival: int
    output_ids: list[int] = field(default_factory=list)
    handoff_to: str | None = None  # decode endpoint; None: decode here
    deadline: float = float("inf")
    adapter: str = ""  # digest of the LoRA adapter it runs with; "": none. Its KV is of no use to any other
    cache_salt: int = 0  # of 64 bits, 0: none. Its KV is of use to requests with the same one only
    constraint: Constraint | None = None  # of sampling.grammar, on its way through the answer
    scored: int = 0  # prompt tokens whose log-probabilities are out, where sampling asks for them

    state: RequestState = RequestState.WAITING
    incarnation: int = 0
    finish_reason: FinishReason | None = None
    row: int = 0  # 0: none
    cached_tokens: int = 0  # prompt tokens that the prefix cache gave (usage)
    lacks_draft_state: bool = False  # its pages came from a node without a draft head: no prefix for anybody else
    computed: int = 0  # tokens of this incarnation whose KV is surely there: a processed step or a hand-off brought it

    def to(self, state: RequestState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"request {self.key}: {self.state.value} -> {state.value} is not a transition")
        self.state = state

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def first_unscored(self) -> int | None:
        """The first prompt position whose log-probability is still wanted; the first token of all has none."""
        position = max(self.scored, 1)
        is_wanted = self.sampling.prompt_logprobs >= 0 and position < len(self.prompt_ids)
        return position if is_wanted else None

    def all_ids(self) -> TokenIds:
        """prompt + output: what a (re-)prefill computes."""
        return np.concatenate([self.prompt_ids, np.asarray(self.output_ids, dtype=np.int64)])

    @property
    def may_begin(self) -> bool:
        """Whether its grammar, if it has one, has been compiled."""
        return self.constraint is None or self.constraint.is_ready

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED
