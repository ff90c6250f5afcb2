"""The table of sampling parameters: each field of `SamplingParams` is a row.

Checks, messages, requests' fields, the samplers' arrays and tests derive from it
(docs/adding-a-sampling-parameter.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from operator import attrgetter
from typing import Any, TypeVar, get_type_hints

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128  # limit on token sequences; one bad word has several sequences
MAX_BAD_WORD_TOKENS = 32  # limit on the tokens of one such sequence
MAX_GRAMMAR_CHARS = 1 << 18
MAX_INT32 = (1 << 31) - 1

T = TypeVar("T")
ROW = "row"


class Step(Enum):
    """The kernels that read a parameter: one of torch, one of numba, one of Triton."""

    NONE = auto()
    EDIT = auto()  # single logits
    FILTER = auto()
    DRAW = auto()


@dataclass(frozen=True, slots=True)
class Bounds:
    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    def hold(self, value: float) -> bool:
        above = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        return above and (self.le is None or value <= self.le)


@dataclass(frozen=True, slots=True)
class Parameter:
    """`nodes`, `clients`: values that nodes take, and that requests may have; None: requests lack the field.

    other: a value with an effect, if kernels read the number. as_log: kernels read the logarithm.
    """

    neutral: Any = None
    nodes: Bounds = Bounds()
    clients: Bounds | None = None
    about: str = ""
    step: Step = Step.NONE
    other: Any = None
    needs_history: bool = False
    as_log: bool = False
    name: str = ""
    kind: Any = None

    @property
    def array(self) -> str:
        return f"log_{self.name}" if self.as_log else self.name


def listed(names: Sequence[str], word: str) -> str:
    return f"{', '.join(names[:-1])} {word} {names[-1]}"


def parameter(neutral: T, **row: Any) -> T:
    return field(default=neutral, metadata={ROW: Parameter(neutral, **row)})


@dataclass(frozen=True, slots=True)
class SamplingValues:
    """The parameters for which a model may have defaults. Without arguments: neutral, so no probability changes."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # for tokens in the prompt or the output


NEUTRAL = SamplingValues()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's parameters, in the order of the wire.

    - stop_token_ids: include the model's EOS ids, unless the client set ignore_eos. Stop strings stay in the router.
    - allowed_token_ids: only these ids may be drawn; () allows all ids.
    - bad_words: runs of token ids. A run's last id isn't drawn after the run's other ids, unless no other id is
      allowed.
    - num_logprobs: with -1, no log-probabilities are returned; with 0, the sampled token's; with k, also those of the k
      likeliest tokens.
    """

    max_tokens: int = field(metadata={ROW: Parameter(nodes=Bounds(ge=1, le=MAX_INT32))})
    temperature: float = parameter(
        NEUTRAL.temperature,
        nodes=Bounds(ge=0),
        clients=Bounds(ge=0, le=2),
        about="0: always the likeliest token; default: the model's, else 1",
        step=Step.DRAW,
        other=0.8,
    )
    top_k: int = parameter(
        NEUTRAL.top_k,
        nodes=Bounds(ge=0, le=MAX_INT32),
        clients=Bounds(ge=-1),
        about="draw only from this many of the likeliest tokens; -1 or 0: from all; default: the model's, else 0",
        step=Step.FILTER,
        other=8,
    )
    top_p: float = parameter(
        NEUTRAL.top_p,
        nodes=Bounds(gt=0, le=1),
        clients=Bounds(ge=0, le=1),
        about="draw only from the likeliest tokens that together have this probability; 0: only from the likeliest; "
        "default: the model's, else 1",
        step=Step.FILTER,
        other=0.9,
    )
    min_p: float = parameter(
        NEUTRAL.min_p,
        nodes=Bounds(ge=0, le=1),
        clients=Bounds(ge=0, le=1),
        about="draw only from tokens with this share of the likeliest one's probability; default: the model's, else 0",
        step=Step.FILTER,
        other=0.01,
        as_log=True,
    )
    repetition_penalty: float = parameter(
        NEUTRAL.repetition_penalty,
        nodes=Bounds(gt=0),
        clients=Bounds(gt=0, le=10),
        about="divides logits of tokens that are in the prompt or the answer; default: the model's, else 1",
        step=Step.EDIT,
        other=1.1,
        needs_history=True,
    )
    presence_penalty: float = parameter(
        0.0,
        clients=Bounds(ge=-2, le=2),
        about="subtracted once from the logit of each token that is in the answer; default: 0",
        step=Step.EDIT,
        other=0.1,
        needs_history=True,
    )
    frequency_penalty: float = parameter(
        0.0,
        clients=Bounds(ge=-2, le=2),
        about="subtracted for each time that the token is in the answer; default: 0",
        step=Step.EDIT,
        other=0.1,
        needs_history=True,
    )
    logit_bias: tuple[tuple[int, float], ...] = parameter((), step=Step.EDIT)
    allowed_token_ids: tuple[int, ...] = parameter((), step=Step.EDIT)
    bad_words: tuple[tuple[int, ...], ...] = parameter((), step=Step.EDIT)  # of several tokens: needs the history
    min_tokens: int = parameter(0, nodes=Bounds(ge=0, le=MAX_INT32), step=Step.EDIT, other=1)
    stop_token_ids: tuple[int, ...] = parameter((), step=Step.EDIT)
    grammar: str = parameter("")  # the answer's grammar, as text for llguidance; "": no grammar
    num_logprobs: int = parameter(-1, nodes=Bounds(ge=-1, le=MAX_TOP_LOGPROBS))
    prompt_logprobs: int = parameter(-1, nodes=Bounds(ge=-1, le=MAX_TOP_LOGPROBS))  # as num_logprobs, for the prompt

    @property
    def needs_history(self) -> bool:
        has_penalty: bool = _penalties(self) != _NO_PENALTIES
        return has_penalty or bool(self.bad_words and max(map(len, self.bad_words)) > 1)

    @property
    def values(self) -> SamplingValues:
        return SamplingValues(*_values(self))


_hints = get_type_hints(SamplingParams)
PARAMETERS: tuple[Parameter, ...] = tuple(
    replace(one.metadata[ROW], name=one.name, kind=_hints[one.name]) for one in fields(SamplingParams)
)
BY_NAME = {one.name: one for one in PARAMETERS}
NUMBERS = tuple(one for one in PARAMETERS if one.step is not Step.NONE and one.kind in (int, float))
FILTERS = tuple(one for one in NUMBERS if one.step is Step.FILTER)
PENALTIES = tuple(one for one in NUMBERS if one.needs_history)
_values = attrgetter(*(one.name for one in fields(SamplingValues)))
_penalties = attrgetter(*(one.name for one in PENALTIES))
_NO_PENALTIES = tuple(one.neutral for one in PENALTIES)
