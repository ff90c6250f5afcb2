"""Turn the input of /v1/responses into a template's turns.

Encrypted reasoning is left out. parts.py says what becomes of images and files. Calls that the client has run become
calls, also of OpenAI's own tools; a foreign server's own call becomes text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from router.api.ask.parts import AnyPart, Parts, content_text, newest_user, not_text, tagged
from router.api.fields.fields import Body, ShortText
from router.api.openai.chat_messages import ROLES, TEXT_PARTS, Turn
from router.api.openai.turns import Turns
from shared.core.errors import InvalidRequest

THOUGHT_PARTS = ("reasoning_text", "summary_text", "text")
TYPES = ("message", "function_call", "function_call_output", "reasoning")


SERVER_CALL = ("name", "arguments", "action", "queries", "code", "output", "outputs", "results", "error")  # shown


class InputPart(AnyPart, frozen=True, kw_only=True):
    type: str = "input_text"
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None
    stdout: Any = None
    stderr: Any = None
    outcome: Any = None


class InputItem(Body, frozen=True, kw_only=True):
    """An item of any kind.

    It has many fields because clients send items of earlier answers back, with all their keys.
    """

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: ShortText | None = None
    name: ShortText | None = None
    arguments: Any = None
    input: Any = None
    action: Any = None
    actions: Any = None
    operation: Any = None
    queries: Any = None
    code: Any = None
    output: str | list[InputPart] | dict[str, Any] | None = None
    outputs: Any = None
    results: Any = None
    result: Any = None
    tools: Any = None
    error: Any = None
    summary: list[InputPart] | None = None
    encrypted_content: Any = None
    id: Any = None
    status: Any = None
    phase: Any = None
    namespace: Any = None
    caller: Any = None


def turns_of(instructions: str | None, items: str | Sequence[InputItem], parts: Parts) -> list[Turn]:
    """Raise InvalidRequest with the path of the first invalid item."""
    turns = Turns()
    if instructions:
        turns.add_system([instructions])
    if isinstance(items, str):
        turns.add_turn("user", items)
    else:
        newest = newest_user([_role_of(item) for item in items])
        for index, item in enumerate(items):
            is_newest = index == newest or (item.type != "message" and index == len(items) - 1)
            _add(turns, item, f"input[{index}]", parts, is_newest=is_newest)
    turns.close()
    return turns.all


def _role_of(item: InputItem) -> str:
    if item.type == "message":
        return ROLES.get(item.role or "", item.role or "")
    return "tool" if _is_output(item) else "assistant"


def _is_output(item: InputItem) -> bool:
    return item.type.endswith("_output")


def _add(turns: Turns, item: InputItem, path: str, parts: Parts, *, is_newest: bool) -> None:
    if item.type == "message":
        _add_message(turns, item, path, parts, is_newest=is_newest)
    elif item.type == "reasoning":
        _add_thought(turns, item, path)
    elif item.type == "function_call":
        call_id = _needed(item.call_id, item.type, f"{path}.call_id")
        turns.add_call(call_id, _needed(item.name, item.type, f"{path}.name"), item.arguments)
    elif item.type == "function_call_output" or (_is_output(item) and item.call_id is not None):
        call_id = _needed(item.call_id, item.type, f"{path}.call_id")
        turns.add_results([(call_id, _output_text(item, f"{path}.output", parts))])
    elif item.call_id is not None and item.type.endswith("_call"):
        turns.add_call(item.call_id, item.name or item.type.removesuffix("_call"), _arguments(item))
    elif shown := {name: value for name in SERVER_CALL if (value := getattr(item, name)) is not None}:
        turns.add_own("content", tagged(item.type, content_text(shown)))
    else:
        turns.add_own("content", _left_out(item, path, parts, is_newest=is_newest))


def _left_out(item: InputItem, path: str, parts: Parts, *, is_newest: bool) -> str:
    try:
        return parts.left_out(item.type, path, is_newest=is_newest)
    except InvalidRequest as error:
        why = f"{path}.type {item.type[:40]!r} is not supported: items are {', '.join(TYPES)}"
        raise InvalidRequest(why, param=error.param) from None


def _add_message(turns: Turns, item: InputItem, path: str, parts: Parts, *, is_newest: bool) -> None:
    role = _needed(item.role, item.type, f"{path}.role")
    texts = _texts_of(item.content or "", f"{path}.content", parts, is_newest=is_newest)
    if role == "assistant":
        turns.add_own("content", "".join(texts))
    elif ROLES.get(role, role) == "system":
        turns.add_system(texts)
    else:
        turns.add_turn(role, "".join(texts))


def _add_thought(turns: Turns, item: InputItem, path: str) -> None:
    content = item.content or item.summary or ""
    if isinstance(content, str):
        thought = content
    else:
        thought = "".join(_thought(part, f"{path}.content[{index}]") for index, part in enumerate(content))
    if thought:
        turns.add_own("reasoning_content", thought)


def _thought(part: InputPart, path: str) -> str:
    if part.type not in THOUGHT_PARTS:
        raise not_text(part.type, path)
    return _needed(part.text, part.type, f"{path}.text")


def _arguments(item: InputItem) -> object:
    given = next((value for value in (item.arguments, item.action, item.actions, item.operation) if value), None)
    if given is None:
        return {"input": item.input or ""}
    return given if isinstance(given, str | dict) else {"actions": given}


def _output_text(item: InputItem, path: str, parts: Parts) -> str:
    output = next((one for one in (item.output, item.results, item.result, item.tools) if one is not None), None)
    if isinstance(output, dict) and isinstance(kind := output.get("type"), str) and "image_url" in output:
        return parts.left_out(kind, path, is_newest=False)
    if isinstance(output, list) and all(isinstance(part, InputPart) for part in output):
        return "".join(_texts_of(output, path, parts, is_newest=False))
    return content_text(output)


def _texts_of(content: str | Sequence[InputPart], path: str, parts: Parts, *, is_newest: bool) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_part_text(part, f"{path}[{index}]", parts, is_newest=is_newest) for index, part in enumerate(content)]


def _part_text(part: InputPart, path: str, parts: Parts, *, is_newest: bool) -> str:
    if part.stdout is not None or part.stderr is not None:  # a shell's output has no type
        return "\n".join(content_text(one) for one in (part.stdout, part.stderr) if one)
    if part.type in TEXT_PARTS:
        name = TEXT_PARTS[part.type]
        return _needed(getattr(part, name), part.type, f"{path}.{name}")
    return parts.text_of(part, path, is_newest=is_newest)


def _needed(value: str | None, kind: str, path: str) -> str:
    if value is None:
        raise InvalidRequest(f"{path}: an entry of type {kind!r} needs it", param=path)
    return value
