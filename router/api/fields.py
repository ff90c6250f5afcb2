"""What an endpoint does with each field of its body: one table per endpoint, and the fields that several share.

    served    has an effect: a field of the endpoint's struct, typed and limited there
    ignored   is taken, and changes no answer: the response header names it, so nobody believes that it did something
    refused   would change the answer in a way we can't: a 400 names it, unless its value asks for nothing

The parser and docs/http-api.md are made from the tables. Limits of the configuration are checked later (resolve.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from shared.core.sampling_params import MAX_GRAMMAR_CHARS, MAX_TOP_LOGPROBS

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=10)]
TopK = Annotated[int, Meta(ge=-1)]
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
ShortText = Annotated[str, Meta(max_length=512)]
GrammarText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=512)]
Schema = dict[str, Any]

NOTHING: tuple[object, ...] = (None, False, 0, "", [], {})


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all request bodies and of the objects inside them."""


B = TypeVar("B", bound=Body)


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a field can't be served, and those of its values that ask for nothing."""

    why: str
    harmless: tuple[object, ...] = NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class FieldTable(Generic[B]):
    """All that one endpoint knows of its body. `about`: what each served field does, by name."""

    path: str
    served: type[B]
    about: Mapping[str, str]
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ValueError when a field stands in two lists, or is served without a word about it."""
        served = set(self.served.__struct_fields__)
        if served != set(self.about):
            raise ValueError(f"{self.path}: described and served differ by {served ^ set(self.about)}")
        names = Counter([*served, *self.ignored, *self.refused])
        if double := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"{self.path}: in two lists: {double}")


class StreamOptions(Body, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # taken: we never pad


class JsonSchemaFormat(Body, frozen=True, kw_only=True):
    """OpenAI's. `strict` or not, the answer follows the schema."""

    schema: Schema | None = None
    name: ShortText | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body, frozen=True, kw_only=True):
    """vLLM's: one of these."""

    json: Schema | str | None = None
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: list[str] | None = None
    grammar: GrammarText | None = None


class GenerationFields(Body, frozen=True, kw_only=True):
    """What the endpoints that generate text share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    max_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
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
    request_id: ShortText | None = None


ABOUT_GENERATION = {
    "model": "the served model or one of its adapters; the model when absent",
    "stream": "server-sent events instead of one answer",
    "stream_options": "`include_usage`: a last chunk with the usage; `continuous_usage_stats`: usage in every chunk",
    "n": "answers to each prompt",
    "max_tokens": "longest answer",
    "temperature": "0: always the likeliest token",
    "top_p": "keep the likeliest tokens that have this share together",
    "top_k": "draw from this many of the likeliest tokens only; -1 or 0: from all",
    "min_p": "keep tokens with at least this share of the likeliest one's probability",
    "presence_penalty": "subtracted once from the logit of each token that the answer has",
    "frequency_penalty": "subtracted for every time that the answer has the token",
    "repetition_penalty": "divides the logits of tokens that prompt or answer have",
    "logit_bias": "token id -> number that is added to its logit",
    "allowed_token_ids": "no other token is drawn, not even the end of the answer",
    "bad_words": "texts that the answer does not have, as long as it spells them in the usual tokens",
    "seed": "the same seed and request give the same answer, on any node and after any fault",
    "stop": "strings that end the answer",
    "stop_token_ids": "token ids that end the answer",
    "ignore_eos": "the model's own end does not end the answer",
    "min_tokens": "no end before so many tokens",
    "include_stop_str_in_output": "the answer ends with what stopped it",
    "skip_special_tokens": "false: special tokens are shown as text",
    "truncate_prompt_tokens": "keep so many last tokens of the prompt; -1: as many as fit",
    "prompt_logprobs": "how likely each token of the prompt was, and so many likeliest ones; not in streams",
    "return_token_ids": "token ids of prompt and answer too",
    "return_tokens_as_token_ids": "tokens in logprobs are written as token_id:N",
    "response_format": "`json_object`, or `json_schema` with its schema: the answer is such a JSON text, strict or not",
    "structured_outputs": "what the answer is: one of `json` (a schema), `json_object`, `regex`, `choice`, `grammar`",
    "guided_json": "a JSON schema that the answer follows",
    "guided_regex": "a regular expression that the answer matches",
    "guided_choice": "texts, one of which is the answer",
    "guided_grammar": "a grammar that the answer follows, in Lark's form or GBNF",
    "json_schema": "SGLang's name of guided_json",
    "regex": "SGLang's name of guided_regex",
    "ebnf": "SGLang's name of guided_grammar",
    "cache_salt": "only requests with the same one share cached prompts with this",
    "request_id": "returned as X-Request-Id, and named in the router's log",
}
IGNORED_GENERATION = {
    "metadata": "nothing is stored",
    "priority": "requests are served in the order of their arrival",
    "safety_identifier": "nobody is told",
    "service_tier": "there is one",
    "spaces_between_special_tokens": "tokens are written as their bytes",
    "store": "nothing is stored",
    "user": "nobody is told",
    "prompt_cache_key": "every prompt may use the prefix cache",
    "prompt_cache_options": "every prompt may use the prefix cache",
    "prompt_cache_retention": "pages stay as long as there is room",
}
NOT_YET = "it is not served here"
REFUSED_GENERATION = {
    "use_beam_search": Refused("answers are sampled"),
    "length_penalty": Refused("answers are sampled", (None, 1, 1.0)),
    "kv_transfer_params": Refused("the router alone says which nodes hand over"),
    "logits_processors": Refused("code is never taken from a request"),
}


def generation_table(
    path: str,
    served: type[B],
    about: Mapping[str, str],
    ignored: Mapping[str, str],
    refused: Mapping[str, Refused],
) -> FieldTable[B]:
    """Return the table of an endpoint that generates text: the shared fields and its own."""
    return FieldTable(
        path,
        served,
        ABOUT_GENERATION | dict(about),
        IGNORED_GENERATION | dict(ignored),
        REFUSED_GENERATION | dict(refused),
    )
