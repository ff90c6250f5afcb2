"""The conversation of /v1/messages, and the turns that a template renders.

Results of tools stand in the user's messages here, calls in the assistant's. Images and documents are refused by name;
thoughts that were redacted are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from router.api.chat_messages import Turn, not_text
from router.api.fields import Body, ShortText
from shared.core.errors import InvalidRequest


class ResultBlock(Body, frozen=True, kw_only=True):
    """A part of what a tool said."""

    type: str = "text"
    text: str | None = None
    source: Any = None
    cache_control: Any = None


class Block(Body, frozen=True, kw_only=True):
    """One part of a message. `type` says which of the other fields count."""

    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    signature: Any = None
    data: Any = None
    id: ShortText | None = None
    name: ShortText | None = None
    input: dict[str, Any] | None = None
    tool_use_id: ShortText | None = None
    content: str | list[ResultBlock] | None = None
    source: Any = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None


class Message(Body, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def turns_of(system: str | Sequence[Block] | None, messages: Sequence[Message]) -> list[Turn]:
    """Return what the template gets. Raise InvalidRequest that names the first part that is no text."""
    turns: list[Turn] = []
    if system:
        turns.append({"role": "system", "content": _text_of(system, "system")})
    for index, message in enumerate(messages):
        path = f"messages[{index}].content"
        if message.role == "assistant":
            turns.append(_assistant_turn(message, path))
        else:
            turns += _others_turns(message, path)
    return turns


def goes_on(messages: Sequence[Message]) -> bool:
    """Whether the answer continues the last message, as it does where that is the assistant's. Raise InvalidRequest
    where nothing can: calls want their results."""
    last, path = messages[-1], f"messages[{len(messages) - 1}]"
    if last.role != "assistant":
        return False
    if not isinstance(last.content, str) and any(block.type == "tool_use" for block in last.content):
        raise InvalidRequest(f"{path} calls tools, and no message with their results follows", param=path)
    return True


def _others_turns(message: Message, path: str) -> Iterator[Turn]:
    """Yield the texts between two results of tools as one turn."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts: list[str] = []
    for index, block in enumerate(message.content):
        where = f"{path}[{index}]"
        if block.type != "tool_result":
            texts.append(_block_text(block, where))
            continue
        if texts:
            yield {"role": message.role, "content": "".join(texts)}
            texts = []
        said = _text_of(block.content or "", f"{where}.content")
        yield {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": said}
    if texts or not message.content:
        yield {"role": message.role, "content": "".join(texts)}


def _assistant_turn(message: Message, path: str) -> Turn:
    """The model's own words go back as it said them."""
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, object]] = []
    for index, block in enumerate(message.content):
        where = f"{path}[{index}]"
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                continue
            case "tool_use":
                calls.append(_call_of(block, where))
            case _:
                texts.append(_block_text(block, where))
    turn: Turn = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _call_of(block: Block, path: str) -> dict[str, object]:
    if block.name is None:
        raise InvalidRequest(f"{path}.name: a block of type 'tool_use' needs it", param=f"{path}.name")
    function = {"name": block.name, "arguments": block.input or {}}
    return {"id": block.id or "", "type": "function", "function": function}


def _text_of(content: str | Sequence[Block | ResultBlock], path: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, f"{path}[{index}]") for index, block in enumerate(content))


def _block_text(block: Block | ResultBlock, path: str) -> str:
    if block.type != "text":
        raise not_text(block.type, path)
    if block.text is None:
        raise InvalidRequest(f"{path}.text: a block of type 'text' needs it", param=f"{path}.text")
    return block.text
