"""Turn a conversation of /v1/messages into a template's turns.

Images and documents are refused. Redacted reasoning is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from router.api.chat_messages import Turn, not_text
from router.api.fields import Body, ShortText
from router.api.turns import Turns
from shared.core.errors import InvalidRequest

FAILED = "Error: "  # before a failed tool's output


class ResultBlock(Body, frozen=True, kw_only=True):
    type: str = "text"
    text: str | None = None
    source: Any = None
    cache_control: Any = None


class Block(Body, frozen=True, kw_only=True):
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
    is_error: bool | None = None
    source: Any = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None


class Message(Body, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def turns_of(system: str | Sequence[Block] | None, messages: Sequence[Message]) -> list[Turn]:
    """Raise InvalidRequest with the path of the first part that is not text."""
    turns = Turns()
    if system:
        turns.add_system(_texts_of(system, "system"))
    for index, message in enumerate(messages):
        path = f"messages[{index}].content"
        if message.role == "assistant":
            _add_own(turns, message, path)
        else:
            _add_other(turns, message, path)
    turns.close()
    return turns.all


def goes_on(messages: Sequence[Message], turns: Sequence[Turn]) -> bool:
    """Return whether the answer continues the assistant's last message. Raise InvalidRequest if this message calls
    tools.

    An empty message has no turn, so no answer continues it."""
    last, path = messages[-1], f"messages[{len(messages) - 1}]"
    if last.role != "assistant":
        return False
    if not isinstance(last.content, str) and any(block.type == "tool_use" for block in last.content):
        raise InvalidRequest(f"{path} calls tools, and no message with their results follows", param=path)
    return bool(turns) and turns[-1]["role"] == "assistant"


def _add_other(turns: Turns, message: Message, path: str) -> None:
    """Put tool results first: they answer the previous turn."""
    blocks = [Block(text=message.content)] if isinstance(message.content, str) else message.content
    texts: list[str] = []
    results: list[tuple[str, str]] = []
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        if block.type == "tool_result":
            said = "".join(_texts_of(block.content or "", f"{where}.content"))
            results.append((block.tool_use_id or "", FAILED + said if block.is_error else said))
        else:
            texts.append(_block_text(block, where))
    if results:
        turns.add_results(results)
    if message.role == "system":
        turns.add_system(texts)
    elif texts or not results:
        turns.add(message.role, "".join(texts))


def _add_own(turns: Turns, message: Message, path: str) -> None:
    blocks = [Block(text=message.content)] if isinstance(message.content, str) else message.content
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        match block.type:
            case "thinking":
                turns.add_own("reasoning_content", block.thinking or "")
            case "redacted_thinking":
                continue
            case "tool_use":
                turns.add_call(block.id or "", _name_of(block, where), block.input or {})
            case _:
                turns.add_own("content", _block_text(block, where))


def _name_of(block: Block, path: str) -> str:
    if block.name is None:
        raise InvalidRequest(f"{path}.name: a block of type 'tool_use' needs it", param=f"{path}.name")
    return block.name


def _texts_of(content: str | Sequence[Block | ResultBlock], path: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_block_text(block, f"{path}[{index}]") for index, block in enumerate(content)]


def _block_text(block: Block | ResultBlock, path: str) -> str:
    if block.type != "text":
        raise not_text(block.type, path)
    if block.text is None:
        raise InvalidRequest(f"{path}.text: a block of type 'text' needs it", param=f"{path}.text")
    return block.text
