"""What a client asks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.fleet.registry import Needs
from router.requests.journey import UNTRACED, Untraced
from router.tenants.tenant import EVERYBODY, Tenant
from shared.core.sampling_params import SamplingParams
from shared.wire.sampling import version_for


@dataclass(frozen=True, slots=True)
class NewRequest:
    prompt_ids: list[int]
    num_sequences: int
    sampling: SamplingParams
    seed: int
    adapter: str = ""  # the adapter's digest, because a name may pass to another adapter
    cache_salt: int = 0
    affinity: str = ""
    tenant: Tenant = EVERYBODY
    within_s: float | None = None  # how long the client waits for the whole answer
    rank: int = 0  # among the tenant's waiting requests: lower ranks start first
    trace: str = ""  # the client's W3C traceparent, or that of its answer's span; "": none
    journey: Untraced = UNTRACED

    def cost(self, expected_answer: float) -> int:
        return cost_of(len(self.prompt_ids), self.num_sequences, self.sampling, expected_answer)

    @property
    def most_tokens(self) -> int:
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def needs(self) -> Needs:
        """The version is the first one that knows all of the request's parameters."""
        return Needs(self.adapter, version_for(self.sampling), bool(self.sampling.grammar))

    @property
    def wants_scores(self) -> bool:
        return self.sampling.prompt_logprobs >= 0


def cost_of(prompt_tokens: int, num_sequences: int, sampling: SamplingParams, expected_answer: float = math.inf) -> int:
    return prompt_tokens + num_sequences * math.ceil(min(sampling.max_tokens, expected_answer))
