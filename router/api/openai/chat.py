"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any

from msgspec import UNSET, Meta

from router.api.answer.answers import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    Choice,
    ChoiceLogprob,
    ToolCall,
    TopLogprob,
)
from router.api.answer.choice_text import Delta
from router.api.answer.generation_plan import Contexts, GenerationPlan, ShowOptions
from router.api.answer.shapes import PromptShown, TokenNames, shown_ids
from router.api.answer.writer import AnswerFacts, Writer
from router.api.ask.resolve import Resolver
from router.api.fields.cache_hints import asked_s, marks_of_messages
from router.api.fields.fields import (
    NOT_YET,
    NOTHING,
    GenerationFields,
    Longest,
    RefusedField,
    ShortText,
    TopLogprobs,
    check_some,
    generation_table,
)
from router.api.openai.chat_messages import ABOUT_TEMPLATE, ChatMessage, conversation_of
from router.api.openai.chat_task import ChatTask, plan_of
from router.api.openai.choices_writer import ChoicesWriter
from router.text.chat.conversation import Scalar
from router.text.chat.interface import Tokenizer
from router.tools.calls.deltas import (
    AnswerDelta,
    CallArguments,
    CallBegun,
    ContentText,
    ReasoningText,
    WholeCall,
    whole_answer,
)
from router.tools.schemas.choice import ToolChoice, parse_tool_choice
from router.tools.schemas.declared import Tool, parse_tools
from shared.core.errors import InvalidRequest
from shared.core.states import FinishReason


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Longest | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None
    documents: list[dict[str, Any]] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: ShortText | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


CHAT = generation_table(
    "/v1/chat/completions",
    ChatRequest,
    about={
        "messages": "the conversation. Agents' histories are accepted as they are",
        "max_completion_tokens": "longest answer; the new name of max_tokens, which has no effect beside it",
        "logprobs": "the log-probability of every token",
        "top_logprobs": "and of this many of the likeliest tokens",
        "tools": "functions that the model may call; what it calls follows the function's schema",
        "tool_choice": "`none`, `auto`, `required`, or the one function that must be called",
        "parallel_tool_calls": "false: one call at most",
    }
    | ABOUT_TEMPLATE,
    ignored={
        "prediction": "it could only make the answer faster",
        "verbosity": "the served models don't know it",
    },
    refused={
        "functions": RefusedField("send tools"),
        "function_call": RefusedField("send tool_choice", (*NOTHING, "none")),
        "modalities": RefusedField("this model writes text only", (*NOTHING, ["text"])),
        "audio": RefusedField("this model writes text only"),
        "moderation": RefusedField(NOT_YET),
        "web_search_options": RefusedField("this server never asks other servers"),
        "chat_template": RefusedField("templates are taken from the model only"),
        "add_special_tokens": RefusedField("a template writes its own begin token"),
        "echo": RefusedField("ask /v1/completions"),
        "best_of": RefusedField("ask for n", (None, 1)),
    },
)


class Chat:
    """See `router.api.ask.generation_api.GenerationApi`."""

    table = CHAT

    def plan(self, body: ChatRequest, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
        check_some(body, "max_completion_tokens", "max_tokens")
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        tools, choice = declared_tools(body)
        parts = resolver.parts()
        task = ChatTask(
            conversation_of(body.messages, body, tools, parts),
            choice,
            allows_parallel=body.parallel_tool_calls is not False,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            max_tokens_field="max_completion_tokens" if body.max_completion_tokens else "max_tokens",
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
            parts=parts,
        )
        plan = plan_of(task, body, resolver, contexts)
        return replace(plan, keep_s=max(plan.keep_s, asked_s(marks_of_messages(body.messages))))

    def skipped(self, body: ChatRequest) -> Sequence[str]:
        older, newer = body.max_tokens, body.max_completion_tokens
        return ("max_tokens",) if older and newer and older != newer else ()

    def writer(self, body: ChatRequest, facts: AnswerFacts) -> Writer:
        return ChoicesWriter(ChatShape(facts.tokenizer, facts.plan.show), facts)


def declared_tools(body: ChatRequest) -> tuple[tuple[Tool, ...], ToolChoice]:
    declared = parse_tools(body.tools or [])
    if declared.others:
        other = declared.others[0]
        raise InvalidRequest(f"tools[{other.index}].type {other.type!r} is not supported", param="tools")
    return declared.tools, parse_tool_choice(body.tool_choice, declared.tools)


class ChatShape:
    """See `router.api.answer.shapes.AnswerShape`."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_on_top = True

    def __init__(self, tokenizer: Tokenizer, show: ShowOptions) -> None:
        self._tokenizer = tokenizer
        self._show = show
        self._names = TokenNames(tokenizer, show)

    def opening(self, index: int, prompt: PromptShown) -> Choice | None:
        return ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))

    def chunk(self, index: int, delta: Delta) -> Choice:
        return ChatChunkChoice(
            index=index,
            delta=self._delta(index, delta),
            logprobs=self._logprobs(delta),
            finish_reason=self._finish_reason(delta),
            token_ids=shown_ids(delta, self._show),
            certificate=delta.certificate,
        )

    def _delta(self, index: int, delta: Delta) -> ChatDelta:
        if self._show.form.is_plain:
            is_bare_end = delta.finish_reason is not None and not delta.text
            return ChatDelta() if is_bare_end else ChatDelta(content=delta.text)
        content = "".join(part.text for part in delta.parts if isinstance(part, ContentText))
        reasoning = "".join(part.text for part in delta.parts if isinstance(part, ReasoningText))
        calls = self._calls(index, delta.parts)
        return ChatDelta(
            content=content or UNSET,
            reasoning=reasoning or UNSET,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def _calls(self, index: int, parts: Sequence[AnswerDelta]) -> list[ToolCall]:
        of_calls = (part for part in parts if isinstance(part, CallBegun | CallArguments))
        return [self._call(index, call, list(own)) for call, own in groupby(of_calls, lambda part: part.index)]

    def _call(self, index: int, call: int, parts: Sequence[CallBegun | CallArguments]) -> ToolCall:
        arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
        first = parts[0]
        if isinstance(first, CallArguments):
            return ToolCall(index=call, function=CalledFunction(arguments))
        function = CalledFunction(arguments, name=first.name)
        return ToolCall(index=call, id=self._call_id(index, call, first.name), type="function", function=function)

    def _whole_call(self, index: int, call: int, whole: WholeCall) -> ToolCall:
        function = CalledFunction(whole.arguments, whole.name)
        return ToolCall(id=self._call_id(index, call, whole.name), type="function", function=function)

    def _call_id(self, index: int, call: int, name: str) -> str:
        return self._show.form.call_id(call, name, choice=index)

    def _finish_reason(self, delta: Delta) -> str | None:
        called = delta.has_calls and delta.finish_reason is FinishReason.STOP and not self._show.form.is_named
        return "tool_calls" if called else delta.finish_reason

    def whole(self, index: int, delta: Delta, prompt: PromptShown) -> Choice:
        return ChatChoice(
            index=index,
            message=self._message(index, delta),
            logprobs=self._logprobs(delta),
            finish_reason=self._finish_reason(delta),
            token_ids=shown_ids(delta, self._show),
            certificate=delta.certificate,
        )

    def _message(self, index: int, delta: Delta) -> AssistantMessage:
        if self._show.form.is_plain:
            return AssistantMessage(content=delta.text)
        answer = whole_answer(delta.parts)
        calls = [self._whole_call(index, i, call) for i, call in enumerate(answer.calls)]
        return AssistantMessage(
            content=answer.content or (None if calls else ""),
            reasoning=answer.reasoning or UNSET,
            reasoning_content=answer.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if self._show.num_logprobs < 0 or not delta.logprobs:
            return None
        entries = [
            ChoiceLogprob(
                token=self._names.of(token),
                logprob=own.logprob,
                bytes=list(self._tokenizer.token_bytes(token)),
                top_logprobs=[self._top(*top) for top in zip(own.top_ids, own.top_logprobs, strict=True)],
            )
            for token, own in zip(delta.ids, delta.logprobs, strict=True)
        ]
        return ChatLogprobs(content=entries)

    def _top(self, token: int, logprob: float) -> TopLogprob:
        raw = self._tokenizer.token_bytes(token)
        return TopLogprob(token=self._names.of(token), logprob=logprob, bytes=list(raw))
