"""Turn a conversation of /v1/messages into a template's turns.

Redacted reasoning is left out. parts.py says what becomes of images and documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from router.api.ask.parts import AnyPart, Parts, content_text, newest_user
from router.api.fields.fields import Body, ShortText
from router.api.openai.chat_messages import Turn
from router.api.openai.turns import Turns
from shared.core.errors import InvalidRequest

FAILED = "Error: "  # before a failed tool's output


class ResultBlock(AnyPart, frozen=True, kw_only=True):
    pass


class Block(AnyPart, frozen=True, kw_only=True):
    thinking: str | None = None
    signature: Any = None
    data: Any = None
    id: ShortText | None = None
    name: ShortText | None = None
    tool_use_id: ShortText | None = None
    content: str | list[ResultBlock] | dict[str, Any] | None = None
    is_error: bool | None = None
    caller: Any = None
    server_name: Any = None


class HistoryMessage(Body, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def turns_of(system: str | Sequence[Block] | None, messages: Sequence[HistoryMessage], parts: Parts) -> list[Turn]:
    """Raise InvalidRequest with the path of the first part that can't be used."""
    turns = Turns()
    if system:
        turns.add_system(_texts_of(system, "system", parts, is_newest=True))
    newest = newest_user([_role_of(message) for message in messages])
    for index, message in enumerate(messages):
        path = f"messages[{index}].content"
        if message.role == "assistant":
            _add_own(turns, message, path, parts)
        else:
            _add_other(turns, message, path, parts, is_newest=index == newest)
    turns.close()
    return turns.all


def _role_of(message: HistoryMessage) -> str:
    has_results = not isinstance(message.content, str) and any(one.type == "tool_result" for one in message.content)
    return "tool" if has_results and message.role == "user" else message.role


def goes_on(messages: Sequence[HistoryMessage], turns: Sequence[Turn]) -> bool:
    """Return whether the answer continues the assistant's last message. Raise InvalidRequest if this message calls
    tools.

    An empty message has no turn, so no answer continues it."""
    last, path = messages[-1], f"messages[{len(messages) - 1}]"
    if last.role != "assistant":
        return False
    if not isinstance(last.content, str) and any(block.type == "tool_use" for block in last.content):
        raise InvalidRequest(f"{path} calls tools, and no message with their results follows", param=path)
    return bool(turns) and turns[-1]["role"] == "assistant"


def _add_other(turns: Turns, message: HistoryMessage, path: str, parts: Parts, *, is_newest: bool) -> None:
    """Put tool results first: they answer the previous turn."""
    blocks = [Block(text=message.content)] if isinstance(message.content, str) else message.content
    texts: list[str] = []
    results: list[tuple[str, str]] = []
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        if block.type == "tool_result":
            said = "".join(_texts_of(block.content or "", f"{where}.content", parts, is_newest=False))
            results.append((block.tool_use_id or "", FAILED + said if block.is_error else said))
        else:
            texts.append(parts.text_of(block, where, is_newest=is_newest))
    if results:
        turns.add_results(results)
    if message.role == "system":
        turns.add_system(texts)
    elif texts or not results:
        turns.add_turn(message.role, "".join(texts))


def _add_own(turns: Turns, message: HistoryMessage, path: str, parts: Parts) -> None:
    blocks = [Block(text=message.content)] if isinstance(message.content, str) else message.content
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        match block.type:
            case "thinking":
                turns.add_own("reasoning_content", block.thinking or "")
            case "redacted_thinking":
                continue
            case "tool_use":
                turns.add_call(block.id or "", _name_of(block, where), block.input)
            case _:
                turns.add_own("content", parts.text_of(block, where, is_newest=False))


def _name_of(block: Block, path: str) -> str:
    if block.name is None:
        raise InvalidRequest(f"{path}.name: a block of type 'tool_use' needs it", param=f"{path}.name")
    return block.name


def _texts_of(
    content: str | Sequence[Block | ResultBlock] | Mapping[str, Any], path: str, parts: Parts, *, is_newest: bool
) -> list[str]:
    if isinstance(content, str | Mapping):
        return [content_text(content)]
    return [parts.text_of(block, f"{path}[{index}]", is_newest=is_newest) for index, block in enumerate(content)]
