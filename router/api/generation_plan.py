"""A checked request: prompts, parameters and display of the answer. Endpoints make it for Generation."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from router.journal import cost_of
from router.tools.call_ids import call_id
from router.tools.declared import Tool
from router.tools.formats import ToolFormat
from router.tools.reasoning import Thought
from shared.core.sampling_params import SamplingParams


class UsageShown(enum.Enum):
    """Which chunks of a stream show the usage. Whole answers always show the usage."""

    NEVER = "never"
    LAST = "last"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Contexts:
    """Limits of the tokens of prompt and answer together: on the largest node, and on every node."""

    largest: int
    common: int


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt: `num_sequences` sequences of one rid."""

    ids: list[int]
    seed: int
    echo: str  # text to show before the answer, or ""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Which parts an answer may have besides content: calls of `tools` in the format `row`, and reasoning."""

    row: ToolFormat | None = None
    tools: tuple[Tool, ...] = ()
    is_named: bool = False  # whether the request forces a named tool; finish_reason is then `stop`, like OpenAI's
    thought: Thought | None = None
    markers: Mapping[str, int] = field(default_factory=dict)  # ids of special tokens around calls and reasoning
    request_id: str = ""  # base of the calls' ids

    def call_id(self, call: int, choice: int = 0) -> str:
        return call_id(self.request_id, call, choice=choice, is_short=self.row is not None and self.row.has_short_ids)

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return not self.tools and self.thought is None


PLAIN = AnswerForm()


@dataclass(frozen=True, slots=True)
class ShowOptions:
    stops: tuple[str, ...]
    stream: bool
    usage: UsageShown
    return_token_ids: bool
    num_logprobs: int  # number of likeliest tokens to show for each token; -1 shows no log-probabilities
    prompt_logprobs: int = -1  # the same for the prompt, in a separate field
    echoes_logprobs: bool = False  # whether logprobs begin with the prompt's tokens
    hides_answer: bool = False  # whether to hide the answer's only token; no request can compute 0 tokens
    keeps_stop: bool = False  # whether to show the stop string or token that ended the text
    shows_special: bool = False
    names_tokens_by_id: bool = False  # whether logprobs show tokens as ids
    form: AnswerForm = PLAIN


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """An HTTP request as the router runs it. It has len(jobs) * num_sequences choices.

    A choice's index is job * num_sequences + sequence.
    """

    model: str
    jobs: tuple[PromptJob, ...]
    num_sequences: int
    sampling: SamplingParams
    show: ShowOptions
    adapter: str = ""  # the adapter's digest; `model` is then its name
    cache_salt: int = 0  # only prompts with the same salt share cached pages

    @property
    def cost(self) -> int:
        """Tokens of prompts and longest answers, charged until the real use is known."""
        return sum(cost_of(len(job.ids), self.num_sequences, self.sampling) for job in self.jobs)
