"""What a request comes down to once every field is checked: prompts, parameters, and how the answer is shown."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from router.tools.call_ids import call_id
from router.tools.declared import Tool
from router.tools.formats import ToolFormat
from router.tools.reasoning import Thought
from shared.core.sampling_params import SamplingParams


class UsageShown(enum.Enum):
    """In which chunks of a stream the usage stands. A whole answer always has it."""

    NEVER = "never"
    LAST = "last"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Contexts:
    """Tokens that prompt and answer may have together: at the largest node, and at every one."""

    largest: int
    common: int


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt of a request; it becomes `num_sequences` sequences of one rid."""

    ids: list[int]
    seed: int
    echo: str  # text shown before the answer, "" unless asked for


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer's text may hold beside content. The model may call `tools`, in the format of `row`."""

    row: ToolFormat | None = None
    tools: tuple[Tool, ...] = ()
    is_named: bool = False  # one tool has to be called: the answer then ends with stop, as OpenAI's do
    thought: Thought | None = None
    markers: Mapping[str, int] = field(default_factory=dict)  # ids of the special tokens around calls and thoughts
    request_id: str = ""  # what the ids of calls are made of

    def call_id(self, call: int, choice: int = 0) -> str:
        return call_id(self.request_id, call, choice=choice, is_short=self.row is not None and self.row.has_short_ids)

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return not self.tools and self.thought is None


PLAIN = AnswerForm()


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """How the answer is cut and written."""

    stops: tuple[str, ...]
    stream: bool
    usage: UsageShown
    return_token_ids: bool
    num_logprobs: int  # -1: none
    prompt_logprobs: int = -1  # of the prompt's tokens, as a field of their own; -1: none
    echoes_logprobs: bool = False  # the prompt's tokens stand before the answer's, with their logprobs
    hides_answer: bool = False  # one token is computed, for there is no request of none, and not shown
    keeps_stop: bool = False  # the text ends with what stopped it
    shows_special: bool = False
    names_tokens_by_id: bool = False  # tokens in logprobs
    form: AnswerForm = PLAIN


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """An HTTP request as the router runs it: len(jobs) * num_sequences choices, choice = job * n + sequence."""

    model: str
    jobs: tuple[PromptJob, ...]
    num_sequences: int
    sampling: SamplingParams
    show: ShowOptions
    adapter: str = ""  # digest; `model` is then its name
    cache_salt: int = 0  # prompts share cached pages with those of the same salt only
