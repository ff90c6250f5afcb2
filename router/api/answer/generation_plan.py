"""A checked request, which an endpoint makes for Generation."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from router.requests.new_request import cost_of
from router.tools.calls.call_ids import call_id
from router.tools.calls.format_row import CallIds, ToolFormat
from router.tools.reasoning import Thought
from router.tools.response_template import ResponseTemplate
from router.tools.schemas.declared import Tool
from shared.core.sampling_params import SamplingParams


class UsageShown(enum.Enum):
    """Which chunks of a stream show the usage. Whole answers always show it."""

    NEVER = "never"
    LAST = "last"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Contexts:
    """The nodes' largest and smallest limits on prompt plus answer tokens."""

    largest: int
    common: int


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt, for one rid with `num_sequences` sequences."""

    ids: list[int]
    seed: int
    echo: str  # text before the answer, or ""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """`template`: the model's own description of its answers, instead of `row`. `thought` is then what grammars need
    of it, if it can be said by tags. `opened`: what the prompt holds of the answer."""

    row: ToolFormat | None = None
    tools: tuple[Tool, ...] = ()
    is_named: bool = False  # the client forces one tool by name; finish_reason is then `stop`, as at OpenAI
    thought: Thought | None = None
    markers: Mapping[str, int] = field(default_factory=dict)  # ids of special tokens around calls and reasoning
    request_id: str = ""  # call ids are made from this id
    num_calls_before: int = 0  # in the conversation; only ids that show a call's number need it
    template: ResponseTemplate | None = None
    opened: str = ""
    is_in_thought: bool = False  # whether the answer begins inside a thought

    def call_id(self, call: int, name: str, choice: int = 0) -> str:
        kind = self.row.ids if self.row is not None else CallIds.LONG
        number = call + self.num_calls_before if kind is CallIds.NAMED else call
        return call_id(self.request_id, number, choice=choice, kind=kind, name=name)

    @property
    def is_plain(self) -> bool:
        """Whether all text is content: no reasoning, no calls."""
        return not self.tools and not self.thinks and self.template is None

    @property
    def thinks(self) -> bool:
        return self.thought is not None or (self.template is not None and self.template.thinks)


PLAIN = AnswerForm()


@dataclass(frozen=True, slots=True)
class ShowOptions:
    stops: tuple[str, ...]
    stream: bool
    usage: UsageShown
    return_token_ids: bool
    num_logprobs: int  # likeliest tokens to show for each token; -1 shows no log-probabilities
    prompt_logprobs: int = -1  # the same for prompt tokens, shown in a separate field
    echoes_logprobs: bool = False  # logprobs begin with the prompt's tokens
    hides_answer: bool = False  # hide the one computed token of an answer of 0 tokens
    keeps_stop: bool = False  # show the stop string or token
    shows_special: bool = False
    names_tokens_by_id: bool = False  # logprobs show tokens as ids
    form: AnswerForm = PLAIN


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """One HTTP request, with len(jobs) * num_sequences choices. Choice index = job * num_sequences + sequence."""

    model: str
    jobs: tuple[PromptJob, ...]
    num_sequences: int
    sampling: SamplingParams
    show: ShowOptions
    adapter: str = ""  # an adapter's digest, if `model` is an adapter's name
    cache_salt: int = 0  # only prompts of one salt share cached pages
    rank: int = 0  # among the tenant's waiting requests: lower ranks start first
    headers: Mapping[bytes, bytes] = field(default_factory=dict)  # of the response: what was changed in the request
    unenforced: tuple[str, ...] = ()  # what the answer need not follow, because no node follows grammars
    session: str = ""  # the client's name for requests that belong together, if no header has one
    keep_s: float = 0.0  # how long the client asks to keep the prompt's pages cached
    is_certified: bool = False  # whether each choice ends with a certificate

    @property
    def cost(self) -> int:
        """The largest possible number of prompt and answer tokens. The tenant pays for it until the real number is
        known."""
        return sum(cost_of(len(job.ids), self.num_sequences, self.sampling) for job in self.jobs)
