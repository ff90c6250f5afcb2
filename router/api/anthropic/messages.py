"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.answer.writer import AnswerFacts, Writer
from router.api.anthropic.messages_history import Block, HistoryMessage, goes_on, turns_of
from router.api.anthropic.messages_writer import MessagesWriter
from router.api.ask.parts import Parts
from router.api.ask.resolve import Resolver
from router.api.fields.cache_hints import ABOUT_CONTROL, asked_s, marks_of, marks_of_messages
from router.api.fields.fields import (
    ABOUT_GENERATION,
    ABOUT_PRIORITY,
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
    TopK,
    TopP,
    sampling_fields_of,
)
from router.api.openai.chat_messages import thinking_kwargs
from router.api.openai.chat_task import ChatTask, form_headers, named_as, plan_of
from router.text.chat.conversation import Conversation
from router.tools.schemas.choice import ToolChoice, parse_tool_choice
from router.tools.schemas.declared import Tool, check_number, check_together, make_tool, skipped_tools

FUNCTIONS = (None, "custom")  # Anthropic's other tool types need its own models
MODES = {"auto": "auto", "any": "required", "none": "none"}  # tool_choice's type -> the name in chats
THINKING = {"enabled": True, "disabled": False}  # other types leave the choice to the template
OWN_NAMES = {"stop": "stop_sequences", "continue_final_message": "messages"}


class Thinking(Body, frozen=True, kw_only=True):
    """Only `type` has an effect: templates can't limit reasoning, and answers always show it."""

    type: ShortText
    budget_tokens: Any = None
    display: Any = None


class OutputFormat(Body, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(Body, frozen=True, kw_only=True):
    effort: ShortText | None = None
    format: OutputFormat | None = None


class MessagesToolChoice(Body, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ShortText | None = None
    disable_parallel_tool_use: bool | None = None


class PromptFields(Body, frozen=True, kw_only=True):
    model: str | None = None
    messages: Annotated[list[HistoryMessage], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(PromptFields, frozen=True, kw_only=True):
    max_tokens: Longest
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None
    cache_control: Any = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    request_id: ShortText | None = None


ABOUT_PROMPT = {
    "model": "the served model or one of its adapters; default: the model",
    "messages": "the conversation, with tool calls and their results; if the last message is the assistant's, "
    "the answer continues it",
    "system": "text before the conversation",
    "tools": "functions that the model may call; calls follow the function's input_schema",
    "tool_choice": "`auto`, `any`, `none`, or the one `tool` that must be called; "
    "`disable_parallel_tool_use`: one call at most",
    "thinking": "`enabled` or `disabled`: the variable enable_thinking of the model's template; "
    "budget_tokens has no effect",
    "output_config": "`format`: a JSON schema that the answer follows; `effort`: the variable reasoning_effort",
    "output_format": "the older name of output_config.format",
}
IGNORED_PROMPT = {
    "context_management": "the conversation is never edited",
    "speed": "there is only one",
}
REFUSED_PROMPT = {
    "mcp_servers": RefusedField("this server never asks other servers"),
    "container": RefusedField("nothing is run here"),
    "thread": RefusedField("nothing is stored"),
}
MESSAGES = FieldTable(
    "/v1/messages",
    MessagesRequest,
    about=ABOUT_PROMPT
    | {
        "max_tokens": "longest answer, at most the rest of the context; 0: only read the prompt; -1: no limit",
        "stream": "server-sent events instead of one answer",
        "temperature": ABOUT_GENERATION["temperature"],
        "top_p": ABOUT_GENERATION["top_p"],
        "top_k": ABOUT_GENERATION["top_k"],
        "stop_sequences": "strings that end the answer",
        "seed": "beyond Anthropic's: the same seed and request give the same answer, on any node and after any fault",
        "cache_control": ABOUT_CONTROL,
        "cache_salt": "beyond Anthropic's: only requests with the same salt share cached prompts",
        "priority": f"beyond Anthropic's: {ABOUT_PRIORITY}",
        "request_id": "beyond Anthropic's: returned as X-Request-Id, and named in the router's log",
    },
    ignored=IGNORED_PROMPT
    | {
        "billing_policy": "nothing is billed",
        "diagnostics": "see the router's metrics",
        "fallback_credit_token": "nothing is billed",
        "fallbacks": "only one model is served",
        "inference_geo": "it runs where the nodes are",
        "metadata": "it is not passed on",
        "service_tier": "there is only one tier",
    },
    refused=REFUSED_PROMPT | {"compaction": RefusedField("conversations are never shortened")},
)


class CountTokensRequest(PromptFields, frozen=True, kw_only=True):
    pass


COUNT_TOKENS = FieldTable(
    "/v1/messages/count_tokens",
    CountTokensRequest,
    about=ABOUT_PROMPT,
    ignored=IGNORED_PROMPT | {"cache_control": "nothing is computed"},
    refused=REFUSED_PROMPT,
)


class Messages:
    """See `router.api.ask.generation_api.GenerationApi`."""

    table = MESSAGES

    def plan(self, body: MessagesRequest, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
        fields = GenerationFields(
            model=body.model,
            stream=body.stream,
            **sampling_fields_of(body),
            stop=body.stop_sequences,
            seed=body.seed,
            response_format=format_of(body),
            cache_salt=body.cache_salt,
            priority=body.priority,
            request_id=body.request_id,
        )
        tools = tools_of(body.tools)
        parts = resolver.parts()
        task = ChatTask(
            conversation_of(body, tools, parts),
            choice_of(body.tool_choice, tools),
            allows_parallel=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
            max_tokens=body.max_tokens,
            parts=parts,
        )
        own_format = "output_format" if body.output_format is not None else "output_config.format"
        keep_s = asked_s(cache_marks_of(body))
        with named_as(OWN_NAMES | {"response_format": own_format}):
            return replace(plan_of(task, fields, resolver, contexts), keep_s=keep_s)

    def skipped(self, body: MessagesRequest) -> Sequence[str]:
        return skipped_tools(body.tools, FUNCTIONS)

    def writer(self, body: MessagesRequest, facts: AnswerFacts) -> Writer:
        return MessagesWriter(facts)


def cache_marks_of(body: MessagesRequest) -> Iterator[tuple[str, object]]:
    yield "cache_control", body.cache_control
    yield from marks_of(body.tools, "tools")
    yield from marks_of(body.system, "system")
    yield from marks_of_messages(body.messages)


def counted(body: CountTokensRequest, resolver: Resolver, headers: dict[bytes, bytes]) -> dict[str, int]:
    """Add to the response's headers what was done to the conversation."""
    resolver.check_model(body.model)
    with named_as(OWN_NAMES):
        prompt = resolver.chat_prompt(conversation_of(body, tools_of(body.tools), resolver.parts()))
    headers.update(form_headers(prompt.form))
    return {"input_tokens": len(prompt.ids)}


def conversation_of(body: PromptFields, tools: Sequence[Tool], parts: Parts) -> Conversation:
    effort = body.output_config.effort if body.output_config is not None else None
    is_on = THINKING.get(body.thinking.type) if body.thinking is not None else None
    turns = turns_of(body.system, body.messages, parts)
    continues = goes_on(body.messages, turns)
    return Conversation(
        turns,
        tools=[tool.for_template() for tool in tools] or None,
        kwargs=thinking_kwargs(effort, is_on),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def tools_of(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """Raise InvalidRequest with the invalid member's name."""
    check_number(tools or ())
    found = tuple(
        make_tool(
            *(tool.get("name"), tool.get("description"), tool.get("input_schema"), tool.get("strict")),
            path=f"tools[{index}]",
            schema_name="input_schema",
        )
        for index, tool in enumerate(tools or ())
        if tool.get("type") in FUNCTIONS
    )
    check_together(found)
    return found


def choice_of(choice: MessagesToolChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    if choice is None:
        return parse_tool_choice(None, tools)
    if choice.type == "tool":
        return parse_tool_choice({"type": "function", "name": choice.name}, tools)
    return parse_tool_choice(MODES[choice.type], tools)


def format_of(body: PromptFields) -> ResponseFormat | None:
    config = body.output_config
    wanted = (config.format if config is not None else None) or body.output_format
    if wanted is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=wanted.schema))
