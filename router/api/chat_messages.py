"""Turn clients' chat messages into the conversation that a template renders.

Text, reasoning and calls reach the template. Images, audio and files are refused, and the error names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from router.api.fields import Body, ShortText
from router.api.insertions import system_text
from router.text.conversation import Conversation, Scalar
from router.tools.declared import Tool
from shared.core.errors import InvalidRequest

Turn = dict[str, object]
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> field
REASONING_PARTS = {"thinking": "thinking", "reasoning": "text"}
ROLES = {"developer": "system", "function": "tool"}  # OpenAI's role -> the template's role


class ContentPart(Body, frozen=True, kw_only=True):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    signature: Any = None
    cache_control: Any = None
    annotations: Any = None


class CalledFunction(Body, frozen=True, kw_only=True):
    """`arguments`: JSON text, or an object."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Body, frozen=True, kw_only=True):
    function: CalledFunction
    id: ShortText | None = None
    type: Literal["function"] = "function"
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
    messages: Sequence[ChatMessage], fields: TemplateFields, tools: Sequence[Tool] = ()
) -> Conversation:
    """Raise InvalidRequest with the path of the first part that is not text."""
    kwargs = thinking_kwargs(fields.reasoning_effort, fields.enable_thinking)
    return Conversation(
        turns_of(messages),
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


def turns_of(messages: Sequence[ChatMessage]) -> list[Turn]:
    return [turn_of(message, f"messages[{index}]") for index, message in enumerate(messages)]


def turn_of(message: ChatMessage, path: str) -> Turn:
    if message.audio is not None:
        raise InvalidRequest(f"{path}.audio is not supported: this model reads text only", param=f"{path}.audio")
    texts, reasoning = texts_of(message, f"{path}.content")
    role = ROLES.get(message.role, message.role)
    text = system_text(texts) if role == "system" else "".join(texts)
    turn: Turn = {"role": role, "content": text or message.refusal or ""}
    reasoning = message.reasoning_content or message.reasoning or reasoning
    if reasoning:
        turn["reasoning_content"] = reasoning
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    calls = [call_of(call) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(call_of(ToolCall(function=message.function_call)))
    if calls:
        turn["tool_calls"] = calls
    return turn


def call_of(call: ToolCall) -> dict[str, object]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id or "", "type": call.type, "function": function}


def texts_of(message: ChatMessage, path: str) -> tuple[list[str], str]:
    """Return (texts of the parts, reasoning)."""
    if message.content is None or isinstance(message.content, str):
        return [message.content or ""], ""
    texts: list[str] = []
    thoughts: list[str] = []
    for index, part in enumerate(message.content):
        if isinstance(part, str):
            texts.append(part)
        elif part.type in TEXT_PARTS:
            texts.append(field_of(part, TEXT_PARTS[part.type], f"{path}[{index}]"))
        elif part.type in REASONING_PARTS:
            thoughts.append(field_of(part, REASONING_PARTS[part.type], f"{path}[{index}]"))
        else:
            raise not_text(part.type, f"{path}[{index}]")
    return texts, "".join(thoughts)


def not_text(kind: str, path: str) -> InvalidRequest:
    why = f"{path}.type {kind[:40]!r} is not supported: this model reads text only"
    return InvalidRequest(why, param=f"{path}.type")


def field_of(part: ContentPart, name: str, path: str) -> str:
    text: str | None = getattr(part, name)
    if text is None:
        raise InvalidRequest(f"{path}.{name}: a part of type {part.type!r} needs it", param=f"{path}.{name}")
    return text
