"""Request bodies as data: every field, its type and its fixed limits. Limits from the configuration come later.

Fields we can't serve are declared too, as raw JSON, so that the answer can name them and harmless values pass.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from shared.core.sampling_params import MAX_TOP_LOGPROBS

# a field we don't serve; which of its values change nothing is said in `unsupported.py`
Unserved = Raw | UnsetType

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


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all request bodies and of the objects inside them."""


class StreamOptions(Body, frozen=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted: we never pad


class TextPart(Body, frozen=True, kw_only=True):
    type: Literal["text"]
    text: str


class ChatMessage(Body, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: ShortText | None = None
    refusal: Unserved = UNSET
    annotations: Unserved = UNSET
    audio: Unserved = UNSET
    function_call: Unserved = UNSET
    tool_calls: Unserved = UNSET


class GenerationFields(Body, frozen=True, kw_only=True):
    """What both generation APIs share."""

    model: str
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
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[NotNegative] | None = None
    ignore_eos: bool | None = None
    min_tokens: NotNegative | None = None
    return_token_ids: bool | None = None
    user: ShortText | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    tools: Unserved = UNSET
    tool_choice: Unserved = UNSET
    parallel_tool_calls: Unserved = UNSET
    functions: Unserved = UNSET
    function_call: Unserved = UNSET
    response_format: Unserved = UNSET
    modalities: Unserved = UNSET
    audio: Unserved = UNSET
    prediction: Unserved = UNSET
    reasoning_effort: Unserved = UNSET
    verbosity: Unserved = UNSET
    service_tier: Unserved = UNSET
    web_search_options: Unserved = UNSET
    chat_template: Unserved = UNSET
    chat_template_kwargs: Unserved = UNSET


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | NotNegative | list[NotNegative]]
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Positive | None = None
    suffix: Unserved = UNSET


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /tokenize: one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[NotNegative]
