"""Defines the scheduler's counters, and its events, which the node turns into wire messages."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch

from shared.core.errors import BatonError
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.core.states import FinishReason
from shared.engine.plan import StepResult
from shared.model.interface import LayerMarks
from shared.observe.metric_names import SPEC_DEPTH_PREFIX
from shared.wire.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class Emitted:
    """Carries output tokens. first_pos counts from the request's first output token."""

    key: RequestKey
    first_pos: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """Carries log-probabilities of prompt tokens. first_pos counts from the prompt's first token."""

    key: RequestKey
    first_pos: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    key: RequestKey
    reason: FinishReason
    num_output_tokens: int
    cached_tokens: int
    error: BatonError | None = None  # set if and only if the reason is ERROR


@dataclass(frozen=True, slots=True)
class ChunkLaunched:
    """A launched step will complete the KV of a hand-off's first num_tokens tokens. `is_last`: these are all
    tokens of the hand-off. The event comes in the round that launches the step. `layers` shows the step's progress.
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
    """A hand-off's last chunk was processed. `token` goes into the PREBUILT record of the decode node."""

    request: Request
    token: int
    committed: int
    logprobs: tuple[TokenLogprob, ...]
    draft_state: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GrantRevoked:
    """A granted request was retracted or aborted.

    Its old row stays `held` until `release_held(row)` is called, which happens when no pull can write the row's pages
    any more.
    """

    request: Request
    row: int
    retracted: bool  # whether the request will be prefilled on this node


@dataclass(frozen=True, slots=True)
class HandoffUnpinned:
    """An ungranted hand-off lost its memory. ChunkReady and PrefillDone will come again."""

    request: Request


@dataclass(frozen=True, slots=True)
class PullGaveWay:
    """Other requests need the memory of a prefix pull. So the pull's prompt will be computed on this node. The pull's
    row stays held, like a row after a revoked grant.
    """

    row: int


@dataclass(frozen=True, slots=True)
class LoanGaveWay:
    """Requests of this node need the memory of cached pages that were lent to another node. These pages are no longer
    pinned."""

    name: tuple[str, int]


SchedEvent = (
    ChunkLaunched
    | Emitted
    | Scored
    | Ended
    | ChunkReady
    | PrefillDone
    | GrantRevoked
    | HandoffUnpinned
    | PullGaveWay
    | LoanGaveWay
)


@dataclass(slots=True)
class SchedCounters:
    retractions: int = 0
    prompt_tokens: int = 0  # prompt tokens computed on this node
    cached_prompt_tokens: int = 0
    mixed_steps: int = 0  # number of steps with prompts and running rows
    mixed_prompt_tokens: int = 0  # prompt tokens in mixed steps
    output_tokens: int = 0
    offloaded_pages: int = 0  # pages copied to the cold tier
    restored_pages: int = 0  # pages copied back from the cold tier
    readmissions: int = 0  # requests that resumed by stash, because all their KV was restored
    offload_failures: int = 0  # number of restores that found damaged bytes
    spec_steps: int = 0  # number of verifies: one per request and step
    spec_accepted_tokens: int = 0  # accepted drafts, without the bonus token
    spec_accepted_at: list[int] = field(default_factory=list)  # accepted drafts by depth, from 1
    spec_draft_seconds: float = 0.0  # time spent on drafting, also in plain steps, which keep the drafter current
    spec_verify_seconds: float = 0.0  # the rest of the time of steps with drafts, prompt chunks included

    def count_run(self, result: StepResult, index: int, num_kept: int) -> None:
        """Count one row's run, which a stop may have cut to `num_kept` tokens."""
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
