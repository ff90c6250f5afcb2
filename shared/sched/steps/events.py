"""Define the scheduler's counters and events."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch

from shared.core.errors import BatonError
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.core.states import FinishReason
from shared.engine.plan import StepResult
from shared.model.math.interface import LayerMarks
from shared.observe.metric_names import SPEC_DEPTH_PREFIX
from shared.wire.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class Emitted:
    """`first_pos` counts from the request's first output token."""

    key: RequestKey
    first_pos: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of prompt tokens. `first_pos` counts from the prompt's first token."""

    key: RequestKey
    first_pos: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    key: RequestKey
    reason: FinishReason
    num_output_tokens: int
    cached_tokens: int
    error: BatonError | None = None  # set only with reason ERROR


@dataclass(frozen=True, slots=True)
class ChunkLaunched:
    """A launched step will complete the KV of a hand-off's first num_tokens tokens.

    `is_last`: the hand-off has no more tokens. The event comes in the round of the launch. `layers` shows the step's
    progress.
    """

    key: RequestKey
    num_tokens: int
    is_last: bool
    layers: LayerMarks


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """The KV of a hand-off's first num_tokens tokens is final."""

    request: Request
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """A hand-off's last chunk was processed. `token` goes into the decode node's PREBUILT record."""

    request: Request
    token: int
    committed: int
    logprobs: tuple[TokenLogprob, ...]
    draft_state: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GrantRevoked:
    """A granted request was retracted or aborted.

    Its old row stays held. Call `release_held(row)` when no pull can write the row's pages any more.
    """

    request: Request
    row: int
    retracted: bool  # whether this node will prefill the request


@dataclass(frozen=True, slots=True)
class HandoffUnpinned:
    """An ungranted hand-off lost its memory. ChunkReady and PrefillDone will come again."""

    request: Request


@dataclass(frozen=True, slots=True)
class PullPreempted:
    """A prefix pull gave its memory to other requests. This node will compute the prompt. The pull's row stays held."""

    row: int


@dataclass(frozen=True, slots=True)
class LoanPreempted:
    """Local requests need the memory of cached pages that were lent to another node. The pages are unpinned."""

    name: tuple[str, int]


@dataclass(frozen=True, slots=True)
class ContextOutgrown:
    """A text has grown beyond the model's short context, so all its KV is computed again."""

    key: RequestKey


SchedEvent = (
    ChunkLaunched
    | Emitted
    | Scored
    | Ended
    | ChunkReady
    | PrefillDone
    | GrantRevoked
    | HandoffUnpinned
    | PullPreempted
    | LoanPreempted
    | ContextOutgrown
)


@dataclass(slots=True)
class SchedCounters:
    """See NODE_COUNTERS in metric_names.py."""

    retractions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    kept_prefix_tokens: int = 0
    mixed_steps: int = 0
    mixed_prompt_tokens: int = 0
    output_tokens: int = 0
    offloaded_pages: int = 0
    restored_pages: int = 0
    readmissions: int = 0
    offload_failures: int = 0
    spec_steps: int = 0
    spec_accepted_tokens: int = 0
    spec_accepted_at: list[int] = field(default_factory=list)  # accepted drafts by depth; entry 0 is depth 1
    spec_draft_seconds: float = 0.0  # drafting time of all steps; plain steps also update the drafter's state
    spec_verify_seconds: float = 0.0  # time of steps with drafts, including prompt chunks, minus drafting time

    def count_run(self, result: StepResult, index: int, num_kept: int) -> None:
        """A stop may have cut the run to `num_kept` tokens."""
        self.output_tokens += num_kept
        if result.stepped(index) <= 1:
            return
        num_accepted = int(result.accept_lens[index]) - 1
        self.spec_steps += 1
        self.spec_accepted_tokens += num_accepted
        self.spec_accepted_at += [0] * (num_accepted - len(self.spec_accepted_at))
        for depth in range(num_accepted):
            self.spec_accepted_at[depth] += 1

    def count_mixed(self, result: StepResult) -> None:
        if 0 < result.num_prefill < len(result.row_ids):
            self.mixed_steps += 1
            self.mixed_prompt_tokens += result.prompt_tokens

    def count_times(self, result: StepResult) -> None:
        self.spec_draft_seconds += result.draft_seconds
        if result.width > 1 and result.num_prefill < len(result.row_ids):
            self.spec_verify_seconds += result.verify_seconds

    def totals(self) -> dict[str, float]:
        by_depth = {f"{SPEC_DEPTH_PREFIX}{depth}": count for depth, count in enumerate(self.spec_accepted_at, 1)}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "spec_accepted_at"} | by_depth
