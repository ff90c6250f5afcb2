"""What the scheduler tells the node after a step. Values; the node turns them into wire messages."""

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
    """Consecutive output tokens; first_pos counts from the request's first output token."""

    key: RequestKey
    first_pos: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """How likely consecutive prompt tokens were; first_pos counts from the prompt's first token."""

    key: RequestKey
    first_pos: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    key: RequestKey
    reason: FinishReason
    num_output_tokens: int
    cached_tokens: int
    error: BatonError | None = None  # set exactly when the reason is ERROR


@dataclass(frozen=True, slots=True)
class ChunkLaunched:
    """A step was launched after which the first num_tokens tokens of a request to hand over have KV; is_last: that is
    all of them. `layers` says how far it is. Told in the round that
    launched it."""

    key: RequestKey
    num_tokens: int
    is_last: bool
    layers: LayerMarks


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """KV of the first num_tokens tokens of a request that will be handed over is final."""

    request: Request
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The last chunk of a request to hand over was processed: `token` goes into its PREBUILT record."""

    request: Request
    token: int
    committed: int
    logprobs: tuple[TokenLogprob, ...]
    draft_state: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GrantRevoked:
    """A granted request lost its reservation (retracted or aborted). Its old row is tagged `held` until the decode
    side knows that no pull writes into its pages, and calls `release_held(row)`."""

    request: Request
    row: int
    retracted: bool  # True: the request lives on here and is prefilled locally


@dataclass(frozen=True, slots=True)
class HandoffUnpinned:
    """A prompt without a grant gave its memory to one that has one. What was said of its KV is void: it is prefilled
    again, and ChunkReady and PrefillDone come again."""

    request: Request


SchedEvent = ChunkLaunched | Emitted | Scored | Ended | ChunkReady | PrefillDone | GrantRevoked | HandoffUnpinned


@dataclass(slots=True)
class SchedCounters:
    """Totals since the scheduler was made, for the node's metrics."""

    retractions: int = 0
    prompt_tokens: int = 0  # computed here
    cached_prompt_tokens: int = 0
    mixed_steps: int = 0  # of running rows, with prompts in them
    mixed_prompt_tokens: int = 0  # of these steps
    output_tokens: int = 0
    offloaded_pages: int = 0  # copied into the cold tier
    restored_pages: int = 0  # copied back
    readmissions: int = 0  # requests that went on by stash, with all their KV from the cold tier
    offload_failures: int = 0  # restores that brought other bytes than were stored; the KV was computed instead
    spec_steps: int = 0  # verifies, one per request and step
    spec_accepted_tokens: int = 0  # without the bonus token
    spec_accepted_at: list[int] = field(default_factory=list)  # the same by depth of the draft, from 1 on
    spec_draft_seconds: float = 0.0  # plain steps of a drafter count too: they keep its state current
    spec_verify_seconds: float = 0.0  # the rest of the steps that had drafts, chunks of prompts in them included

    def count_run(self, result: StepResult, index: int, num_kept: int) -> None:
        """Row `index` emitted; a stop in its run may have cut it."""
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
        """Of any step."""
        if 0 < result.num_prefill < len(result.row_ids):
            self.mixed_steps += 1
            self.mixed_prompt_tokens += result.prompt_tokens

    def count_times(self, result: StepResult) -> None:
        self.spec_draft_seconds += result.draft_seconds
        if result.width > 1 and result.num_prefill < len(result.row_ids):
            self.spec_verify_seconds += result.verify_seconds

    def totals(self) -> dict[str, float]:
        """By the short names of metrics."""
        by_depth = {f"{SPEC_DEPTH_PREFIX}{depth}": count for depth, count in enumerate(self.spec_accepted_at, 1)}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "spec_accepted_at"} | by_depth
