"""The fields of each endpoint's body, in one table per endpoint.

    served    has an effect: a field of the endpoint's struct, with its type and limits
    ignored   is accepted without effect; a response header names the field
    refused   would have an unsupported effect: a 400 names the field, unless its value is harmless

Both the parser and docs/http-api.md use these tables. resolve.py checks configured limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from router.api.fields.cache_hints import ABOUT_KEY, ABOUT_RETENTION, Retention
from shared.core.errors import InvalidRequest
from shared.core.sampling_params import BY_NAME, MAX_GRAMMAR_CHARS, MAX_TOP_LOGPROBS, PARAMETERS


def limits(parameter: str) -> Meta:
    bounds = BY_NAME[parameter].clients
    assert bounds is not None, "not a parameter that requests have"
    return Meta(**asdict(bounds))


Temperature = Annotated[float, limits("temperature")]
TopP = Annotated[float, limits("top_p")]
MinP = Annotated[float, limits("min_p")]
Penalty = Annotated[float, limits("presence_penalty")]
RepetitionPenalty = Annotated[float, limits("repetition_penalty")]
TopK = Annotated[int, limits("top_k")]
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
NO_LIMIT = -1
Longest = Annotated[int, Meta(ge=NO_LIMIT)]  # tokens of an answer; `check_some` refuses 0 where it has no meaning
Bias = Annotated[float, Meta(ge=-100, le=100)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
ShortText = Annotated[str, Meta(max_length=512)]
GrammarText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=512)]
Schema = dict[str, Any]

NOTHING: tuple[object, ...] = (None, False, 0, "", [], {})


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of request bodies and of the objects in them."""


B = TypeVar("B", bound=Body)


def named_in(body: Body) -> dict[str, object]:
    """Return the fields that say something."""
    return {name: value for name, value in msgspec.structs.asdict(body).items() if value}


@dataclass(frozen=True, slots=True)
class RefusedField:
    """`harmless`: values that are accepted, because they have no effect."""

    why: str
    harmless: tuple[object, ...] = NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class FieldTable(Generic[B]):
    """`about`: the effect of each served field, by name. `has_event_ids`: whether a stream can be resumed."""

    path: str
    served: type[B]
    about: Mapping[str, str]
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, RefusedField] = field(default_factory=dict)
    has_event_ids: bool = True

    def check_fields(self) -> None:
        """Raise ValueError for double or undescribed fields."""
        served = set(self.served.__struct_fields__)
        if served != set(self.about):
            raise ValueError(f"{self.path}: only served, or only described: {served ^ set(self.about)}")
        names = Counter([*served, *self.ignored, *self.refused])
        if double := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"{self.path}: in two lists: {double}")


class StreamOptions(Body, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # without effect: our events are never padded


class JsonSchemaFormat(Body, frozen=True, kw_only=True):
    """A schema in OpenAI's form. The answer follows the schema even without `strict`."""

    schema: Schema | None = None
    name: ShortText | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body, frozen=True, kw_only=True):
    """A grammar in vLLM's form. A request sets one of these fields."""

    json: Schema | str | None = None
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: list[str] | None = None
    grammar: GrammarText | None = None


class AnswerFields(Body, frozen=True, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    max_tokens: Longest | None = None


# digests of streams depend on the order; new parameters come last
ORDER = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
REQUESTED = tuple(
    sorted(
        (one for one in PARAMETERS if one.clients),
        key=lambda one: ORDER.index(one.name) if one.name in ORDER else len(ORDER),
    )
)
if TYPE_CHECKING:

    class SamplingFields(AnswerFields, frozen=True, kw_only=True):
        """Numbers or None."""

else:
    SamplingFields = msgspec.defstruct(
        "SamplingFields",
        [(one.name, Annotated[one.kind, limits(one.name)] | None, None) for one in REQUESTED],
        bases=(AnswerFields,),
        frozen=True,
        kw_only=True,
        module=__name__,
    )


def check_some(body: Body, *names: str) -> None:
    """Raise InvalidRequest if one of these limits on the answer leaves no token of it."""
    for name in names:
        if getattr(body, name) == 0:
            raise InvalidRequest(f"{name}: Expected `int` >= 1, or -1 for no limit", param=name)


def sampling_fields_of(body: Body) -> dict[str, Any]:
    """Return the sampling parameters that the body's kind has, by name."""
    return {one.name: getattr(body, one.name) for one in REQUESTED if one.name in body.__struct_fields__}


class GenerationFields(SamplingFields, frozen=True, kw_only=True):
    """What a request may set besides sampling parameters.

    It has many fields because each is a key of the API's JSON.
    """

    logit_bias: dict[str, Bias] | None = None
    allowed_token_ids: list[NotNegative] | None = None
    bad_words: list[ShortText] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[NotNegative] | None = None
    ignore_eos: bool | None = None
    min_tokens: NotNegative | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: GrammarText | None = None
    guided_choice: list[str] | None = None
    guided_grammar: GrammarText | None = None
    json_schema: Schema | str | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Retention | None = None
    request_id: ShortText | None = None
    certificate: bool | None = None


ABOUT_PRIORITY = "of this tenant's waiting requests, those with lower numbers start first; default: 0"
ABOUT_GENERATION = {
    "model": "the served model or one of its adapters; default: the model",
    "stream": "server-sent events instead of one answer",
    "stream_options": "`include_usage`: a last chunk with the usage; `continuous_usage_stats`: usage in every chunk",
    "n": "answers to each prompt; default: 1",
    "max_tokens": "longest answer; default and -1: the rest of the context",
    **{one.name: one.about for one in REQUESTED},
    "logit_bias": "token id -> number added to its logit",
    "allowed_token_ids": "no other token is drawn, not even the end of the answer",
    "bad_words": "texts that the answer must not contain, as far as it spells them in the usual tokens",
    "seed": "the same seed and request give the same answer, on any node and after any fault",
    "stop": "strings that end the answer",
    "stop_token_ids": "token ids that end the answer",
    "ignore_eos": "the model's own end does not end the answer",
    "min_tokens": "the answer does not end before this many tokens",
    "include_stop_str_in_output": "the answer includes the stop that ended it",
    "skip_special_tokens": "false: special tokens are shown as text",
    "truncate_prompt_tokens": "keep this many last tokens of the prompt; -1: as many as fit",
    "prompt_logprobs": "log-probabilities of the prompt's tokens, and of this many likeliest ones; not in streams",
    "return_token_ids": "also return token ids of prompt and answer",
    "return_tokens_as_token_ids": "tokens in logprobs are written as token_id:N",
    "response_format": "`json_object`, or `json_schema` with its schema: the form of the answer, `strict` or not",
    "structured_outputs": "the answer's form: one of `json` (a schema), `json_object`, `regex`, `choice`, `grammar`",
    "guided_json": "a JSON schema that the answer follows",
    "guided_regex": "a regular expression that the answer matches",
    "guided_choice": "the answer is one of these texts",
    "guided_grammar": "a grammar that the answer follows, in Lark's form or GBNF",
    "json_schema": "SGLang's name for guided_json",
    "regex": "SGLang's name for guided_regex",
    "ebnf": "SGLang's name for guided_grammar",
    "cache_salt": "only requests with the same salt share cached prompts",
    "priority": ABOUT_PRIORITY,
    "prompt_cache_key": ABOUT_KEY,
    "prompt_cache_retention": ABOUT_RETENTION,
    "request_id": "returned as X-Request-Id, and named in the router's log",
    "certificate": "each choice ends with a signed record of what computed it; the header `X-Certificate` asks for it, "
    "too",
}
IGNORED_GENERATION = {
    "metadata": "nothing is stored",
    "safety_identifier": "it is not passed on",
    "service_tier": "there is only one tier",
    "spaces_between_special_tokens": "tokens are written as their bytes",
    "store": "nothing is stored",
    "user": "it is not passed on",
    "prompt_cache_options": "every prompt may use the prefix cache",
}
NOT_YET = "it is not served here"
REFUSED_GENERATION = {
    "use_beam_search": RefusedField("answers are sampled"),
    "length_penalty": RefusedField("answers are sampled", (None, 1, 1.0)),
    "kv_transfer_params": RefusedField("only the router chooses the nodes of a hand-off"),
    "logits_processors": RefusedField("requests can't bring code"),
}


def generation_table(
    path: str,
    served: type[B],
    about: Mapping[str, str],
    ignored: Mapping[str, str],
    refused: Mapping[str, RefusedField],
) -> FieldTable[B]:
    return FieldTable(
        path,
        served,
        ABOUT_GENERATION | dict(about),
        IGNORED_GENERATION | dict(ignored),
        REFUSED_GENERATION | dict(refused),
    )
