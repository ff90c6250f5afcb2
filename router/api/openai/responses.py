"""POST /v1/responses, without stored state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.answer.writer import AnswerFacts, Writer
from router.api.ask.resolve import Resolver
from router.api.fields.cache_hints import ABOUT_KEY, ABOUT_RETENTION, Retention
from router.api.fields.fields import (
    ABOUT_GENERATION,
    ABOUT_PRIORITY,
    NO_LIMIT,
    NOT_YET,
    NOTHING,
    Body,
    CacheSalt,
    FieldTable,
    GenerationFields,
    JsonSchemaFormat,
    Longest,
    Priority,
    RefusedField,
    ResponseFormat,
    Schema,
    ShortText,
    Temperature,
    TopP,
    check_some,
    sampling_fields_of,
)
from router.api.openai.chat_messages import thinking_kwargs
from router.api.openai.chat_task import ChatTask, named_as, plan_of
from router.api.openai.responses_input import InputItem, turns_of
from router.api.openai.responses_writer import ResponsesWriter
from router.text.chat.conversation import Conversation
from router.tools.schemas.choice import parse_tool_choice
from router.tools.schemas.declared import parse_tools, skipped_tools
from shared.core.errors import InvalidRequest
from shared.core.sampling_params import SamplingParams

OWN_NAMES = {"response_format": "text.format", "max_tokens": "max_output_tokens", "messages": "input"}
FUNCTIONS = ("function",)
LOGPROBS = "message.output_text.logprobs"
ALONE = "answers are not stored; send the whole conversation as input"


class TextFormat(Body, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    schema: Schema | None = None
    name: ShortText | None = None
    description: str | None = None
    strict: bool | None = None


class TextFields(Body, frozen=True, kw_only=True):
    verbosity: Any = None  # without effect: the served models have no such setting
    format: TextFormat | None = None


class ReasoningFields(Body, frozen=True, kw_only=True):
    """All reasoning is shown, so there is never a summary."""

    effort: ShortText | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponsesRequest(Body, frozen=True, kw_only=True):
    """The body of a request. It has many fields because each is a key of the API's JSON."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Longest | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    seed: int | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Retention | None = None
    request_id: ShortText | None = None


RESPONSES = FieldTable(
    "/v1/responses",
    ResponsesRequest,
    about={
        "model": "the served model or one of its adapters; default: the model",
        "input": "a text, or the conversation as items: messages, reasoning, calls and their outputs",
        "instructions": "text before the conversation",
        "max_output_tokens": "longest answer, at most the rest of the context, which is the default; -1: no limit",
        "stream": "server-sent events instead of one answer",
        "temperature": ABOUT_GENERATION["temperature"],
        "top_p": ABOUT_GENERATION["top_p"],
        "tools": "functions that the model may call; tools of other types are skipped, and the header names them",
        "tool_choice": "`none`, `auto`, `required`, or the one function that must be called",
        "parallel_tool_calls": "false: one call at most",
        "text": "`format`: `json_object`, or `json_schema` with its schema: the form of the answer",
        "reasoning": "`effort`: the variable reasoning_effort of the model's template; `none`: thinking is off",
        "include": "more to show: has no effect, and logprobs are refused",
        "metadata": "returned unchanged",
        "seed": "beyond OpenAI's: the same seed and request give the same answer, on any node and after any fault",
        "cache_salt": "beyond OpenAI's: only requests with the same salt share cached prompts",
        "priority": f"beyond OpenAI's: {ABOUT_PRIORITY}",
        "prompt_cache_key": ABOUT_KEY,
        "prompt_cache_retention": ABOUT_RETENTION,
        "request_id": "beyond OpenAI's: returned as X-Request-Id, and named in the router's log",
    },
    ignored={
        "access_programs": "it is not passed on",
        "max_tool_calls": "the client runs the calls",
        "prompt_cache_options": "every prompt may use the prefix cache",
        "safety_identifier": "it is not passed on",
        "service_tier": "there is only one tier",
        "store": "answers are not stored, and say so",
        "stream_options": "streams are never padded",
        "user": "it is not passed on",
    },
    refused={
        "background": RefusedField(ALONE),
        "context_management": RefusedField("conversations are never shortened"),
        "conversation": RefusedField(ALONE),
        "image": RefusedField("this model reads text only"),
        "moderation": RefusedField(NOT_YET),
        "previous_response_id": RefusedField(ALONE),
        "prompt": RefusedField("prompts are not stored"),
        "top_logprobs": RefusedField("ask /v1/chat/completions"),
        "truncation": RefusedField("conversations are never shortened", (*NOTHING, "disabled")),
    },
)


class Responses:
    """See `router.api.ask.generation_api.GenerationApi`."""

    table = RESPONSES

    def plan(self, body: ResponsesRequest, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
        check_some(body, "max_output_tokens")
        if LOGPROBS in (body.include or ()):
            raise InvalidRequest(f"include: {LOGPROBS} is not served here; ask /v1/chat/completions", param="include")
        tools = parse_tools(body.tools).tools
        parts = resolver.parts()
        conversation = Conversation(
            turns_of(body.instructions, body.input, parts),
            tools=[tool.for_template() for tool in tools] or None,
            kwargs=thinking_kwargs(body.reasoning.effort if body.reasoning is not None else None),
        )
        fields = GenerationFields(
            model=body.model,
            stream=body.stream,
            **sampling_fields_of(body),
            seed=body.seed,
            response_format=format_of(body.text),
            cache_salt=body.cache_salt,
            priority=body.priority,
            prompt_cache_key=body.prompt_cache_key,
            prompt_cache_retention=body.prompt_cache_retention,
            request_id=body.request_id,
        )
        task = ChatTask(
            conversation,
            parse_tool_choice(body.tool_choice, tools),
            allows_parallel=body.parallel_tool_calls is not False,
            max_tokens=body.max_output_tokens,
            max_tokens_field="max_output_tokens",
            prompt_field="input",
            parts=parts,
        )
        with named_as(OWN_NAMES):
            return plan_of(task, fields, resolver, contexts)

    def skipped(self, body: ResponsesRequest) -> Sequence[str]:
        return skipped_tools(body.tools, FUNCTIONS)

    def writer(self, body: ResponsesRequest, facts: AnswerFacts) -> Writer:
        return ResponsesWriter(facts, echo_of(body, facts.plan.sampling))


def format_of(text: TextFields | None) -> ResponseFormat | None:
    wanted = text.format if text is not None else None
    if wanted is None:
        return None
    described = JsonSchemaFormat(schema=wanted.schema, strict=wanted.strict) if wanted.schema is not None else None
    return ResponseFormat(type=wanted.type, json_schema=described)


def echo_of(body: ResponsesRequest, sampling: SamplingParams) -> dict[str, object]:
    effort = body.reasoning.effort if body.reasoning is not None else None
    wanted = body.text.format if body.text is not None else None
    shown = {name: value for name in TextFormat.__struct_fields__ if (value := getattr(wanted, name, None)) is not None}
    return {
        "instructions": body.instructions,
        "max_output_tokens": None if body.max_output_tokens == NO_LIMIT else body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": None},
        "temperature": sampling.temperature,
        "text": {"format": shown or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool for tool in body.tools or () if tool.get("type") in FUNCTIONS],
        "top_p": sampling.top_p,
    }
