"""Turn clients' chat messages into the conversation that a template renders.

Text, reasoning and calls reach the template. parts.py says what becomes of images, audio and files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from router.api.ask.insertions import system_text
from router.api.ask.parts import AnyPart, Parts, newest_user
from router.api.fields.fields import Body, ShortText
from router.text.chat.conversation import Conversation, Scalar
from router.tools.schemas.declared import Tool
from shared.core.errors import InvalidRequest

Turn = dict[str, object]
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> field
REASONING_PARTS = {"thinking": "thinking", "reasoning": "text"}
ROLES = {"developer": "system", "function": "tool"}  # OpenAI's role -> the template's role


class ContentPart(AnyPart, frozen=True, kw_only=True):
    refusal: str | None = None
    thinking: str | None = None
    signature: Any = None
    annotations: Any = None


class CalledFunction(Body, frozen=True, kw_only=True):
    """`arguments`: JSON text, an object, or whatever else a client made of a model's call."""

    name: str
    arguments: Any = ""


class CustomCall(Body, frozen=True, kw_only=True):
    name: str
    input: str = ""


class ToolCall(Body, frozen=True, kw_only=True):
    """A call of type custom has `custom` instead of `function`."""

    function: CalledFunction | None = None
    custom: CustomCall | None = None
    id: ShortText | None = None
    type: Literal["function", "custom"] = "function"
    index: Any = None


class ChatMessage(Body, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[str | ContentPart] | None = None
    name: ShortText | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: ShortText | None = None
    function_call: CalledFunction | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: Any = None
    annotations: Any = None
    reasoning_details: Any = None
    provider_specific_fields: Any = None
    cache_control: Any = None


class TemplateFields(Protocol):
    @property
    def chat_template_kwargs(self) -> dict[str, Scalar] | None: ...
    @property
    def documents(self) -> list[dict[str, Any]] | None: ...
    @property
    def enable_thinking(self) -> bool | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...


ABOUT_TEMPLATE = {
    "chat_template_kwargs": "variables of the model's template: texts, numbers, true and false",
    "documents": "for templates that take documents",
    "enable_thinking": "the template variable of that name, as Qwen3's template has it",
    "reasoning_effort": "the template variable of that name; `none` also turns thinking off",
    "add_generation_prompt": "false: the prompt ends after the last message",
    "continue_final_message": "the answer continues the last message; needs add_generation_prompt false",
}


def conversation_of(
    messages: Sequence[ChatMessage], fields: TemplateFields, tools: Sequence[Tool], parts: Parts
) -> Conversation:
    """Raise InvalidRequest with the path of the first part that can't be used."""
    kwargs = thinking_kwargs(fields.reasoning_effort, fields.enable_thinking)
    return Conversation(
        turns_of(messages, parts),
        tools=[tool.for_template() for tool in tools] or None,
        documents=fields.documents,
        kwargs=kwargs | (fields.chat_template_kwargs or {}),
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=bool(fields.continue_final_message),
    )


def thinking_kwargs(effort: str | None, is_on: bool | None = None) -> dict[str, Scalar]:
    kwargs: dict[str, Scalar] = {}
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    if is_on is not None:
        kwargs["enable_thinking"] = is_on
    return kwargs


def turns_of(messages: Sequence[ChatMessage], parts: Parts) -> list[Turn]:
    newest = newest_user([role_of(message) for message in messages])
    return [
        turn_of(message, f"messages[{index}]", parts, is_newest=index == newest)
        for index, message in enumerate(messages)
    ]


def role_of(message: ChatMessage) -> str:
    return ROLES.get(message.role, message.role)


def turn_of(message: ChatMessage, path: str, parts: Parts, *, is_newest: bool) -> Turn:
    texts, reasoning = texts_of(message, f"{path}.content", parts, is_newest=is_newest)
    if message.audio is not None:
        texts.append(_heard(message, path, parts, is_newest=is_newest))
    role = role_of(message)
    text = system_text(texts) if role == "system" else "".join(texts)
    turn: Turn = {"role": role, "content": text or message.refusal or ""}
    reasoning = message.reasoning_content or message.reasoning or reasoning
    if reasoning:
        turn["reasoning_content"] = reasoning
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    calls = [call_of(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        calls.append(call_of(ToolCall(function=message.function_call), path))
    if calls:
        turn["tool_calls"] = calls
    return turn


def _heard(message: ChatMessage, path: str, parts: Parts, *, is_newest: bool) -> str:
    """Return an earlier spoken answer's text, if the client kept it."""
    transcript = message.audio.get("transcript") if isinstance(message.audio, dict) else None
    if isinstance(transcript, str) and not message.content:
        return transcript
    return parts.left_out("audio", f"{path}.audio", is_newest=is_newest)


def call_of(call: ToolCall, path: str) -> dict[str, object]:
    """A custom tool's call has one text instead of arguments."""
    if call.type == "custom" and call.custom is not None:
        function: dict[str, object] = {"name": call.custom.name, "arguments": {"input": call.custom.input}}
    elif call.type == "function" and call.function is not None:
        function = {"name": call.function.name, "arguments": call.function.arguments}
    else:
        raise InvalidRequest(f"{path}.type {call.type!r} needs the member {call.type}", param=f"{path}.type")
    return {"id": call.id or "", "type": "function", "function": function}


def texts_of(message: ChatMessage, path: str, parts: Parts, *, is_newest: bool) -> tuple[list[str], str]:
    """Return (texts of the parts, reasoning)."""
    if message.content is None or isinstance(message.content, str):
        return [message.content or ""], ""
    texts: list[str] = []
    thoughts: list[str] = []
    for index, part in enumerate(message.content):
        where = f"{path}[{index}]"
        if isinstance(part, str):
            texts.append(part)
        elif part.type in TEXT_PARTS:
            texts.append(field_of(part, TEXT_PARTS[part.type], where))
        elif part.type in REASONING_PARTS:
            thoughts.append(field_of(part, REASONING_PARTS[part.type], where))
        else:
            texts.append(parts.text_of(part, where, is_newest=is_newest))
    return texts, "".join(thoughts)


def field_of(part: ContentPart, name: str, path: str) -> str:
    text: str | None = getattr(part, name)
    if text is None:
        raise InvalidRequest(f"{path}.{name}: a part of type {part.type!r} needs it", param=f"{path}.{name}")
    return text
