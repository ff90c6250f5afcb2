"""Turn the input of /v1/responses into a template's turns.

Images and files are refused. Encrypted reasoning is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from router.api.chat_messages import ROLES, TEXT_PARTS, Turn, not_text
from router.api.fields import Body, ShortText
from router.api.turns import Turns
from shared.core.errors import InvalidRequest

THOUGHT_PARTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}  # type -> field
TYPES = ("message", "function_call", "function_call_output", "reasoning")


class InputPart(Body, frozen=True, kw_only=True):
    type: str = "input_text"
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None


class InputItem(Body, frozen=True, kw_only=True):
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: ShortText | None = None
    name: ShortText | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: Any = None
    id: Any = None
    status: Any = None
    phase: Any = None


def turns_of(instructions: str | None, items: str | Sequence[InputItem]) -> list[Turn]:
    """Raise InvalidRequest with the path of the first invalid item."""
    turns = Turns()
    if instructions:
        turns.add_system([instructions])
    if isinstance(items, str):
        turns.add("user", items)
    else:
        for index, item in enumerate(items):
            _add(turns, item, f"input[{index}]")
    turns.close()
    return turns.all


def _add(turns: Turns, item: InputItem, path: str) -> None:
    match item.type:
        case "message":
            role = _needed(item.role, item.type, f"{path}.role")
            texts = _texts_of(item.content or "", TEXT_PARTS, f"{path}.content")
            _add_message(turns, ROLES.get(role, role), texts)
        case "function_call":
            call_id = _needed(item.call_id, item.type, f"{path}.call_id")
            turns.add_call(call_id, _needed(item.name, item.type, f"{path}.name"), item.arguments or "")
        case "function_call_output":
            call_id = _needed(item.call_id, item.type, f"{path}.call_id")
            turns.add_results([(call_id, "".join(_texts_of(item.output or "", TEXT_PARTS, f"{path}.output")))])
        case "reasoning":
            thought = "".join(_texts_of(item.content or item.summary or "", THOUGHT_PARTS, f"{path}.content"))
            if thought:
                turns.add_own("reasoning_content", thought)
        case _:
            why = f"{path}.type {item.type[:40]!r} is not supported: items are {', '.join(TYPES)}"
            raise InvalidRequest(why, param=f"{path}.type")


def _add_message(turns: Turns, role: str, texts: Sequence[str]) -> None:
    if role == "assistant":
        turns.add_own("content", "".join(texts))
    elif role == "system":
        turns.add_system(texts)
    else:
        turns.add(role, "".join(texts))


def _texts_of(content: str | Sequence[InputPart], kinds: Mapping[str, str], path: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts: list[str] = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        if part.type not in kinds:
            raise not_text(part.type, where)
        name = kinds[part.type]
        texts.append(_needed(getattr(part, name), part.type, f"{where}.{name}"))
    return texts


def _needed(value: str | None, kind: str, path: str) -> str:
    if value is None:
        raise InvalidRequest(f"{path}: an entry of type {kind!r} needs it", param=path)
    return value
