"""What a request comes down to once every field is checked: prompts, parameters, and how the answer is shown."""

from __future__ import annotations

from dataclasses import dataclass

from shared.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt of a request; it becomes `num_sequences` sequences of one rid."""

    ids: list[int]
    seed: int
    echo: str  # text shown before the answer, "" unless asked for


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """How the answer is cut and written."""

    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    num_logprobs: int  # -1: none


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """An HTTP request as the router runs it: len(jobs) * num_sequences choices, choice = job * n + sequence."""

    model: str
    jobs: tuple[PromptJob, ...]
    num_sequences: int
    sampling: SamplingParams
    show: ShowOptions
    adapter: str = ""  # digest; `model` is then its name
