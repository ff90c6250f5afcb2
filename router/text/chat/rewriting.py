"""Steps that rewrite a conversation for a template that refuses it or drops a part of it. No step drops a text.

Each step returns the conversation itself if it has nothing to change, and takes time in proportion to its length.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.text.chat.calls_in_text import with_calls, with_results, with_text_arguments
from router.text.chat.conversation import Conversation, JsonObject

SYSTEM = ("system", "developer")
THOUGHTS = ("thinking", "reasoning_content")
BETWEEN = "\n\n"  # stands between joined texts
BLANK = " "  # some templates refuse an empty turn
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")  # Mistral's templates take no others
Messages = list[JsonObject]


# ---- contents


def contents_as_text(chat: Conversation) -> Conversation:
    """Make each content one text: parts are joined, and no content is an empty one."""
    return _changed(chat, [_with_one_text(message) for message in chat.messages])


def _with_one_text(message: JsonObject) -> JsonObject:
    content = message.get("content")
    if isinstance(content, str):
        return message
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        return message  # not only text
    return {**message, "content": "".join(map(str, texts))}


def blanks_filled(chat: Conversation) -> Conversation:
    """Give empty turns without calls a space."""
    messages = [
        {**message, "content": BLANK} if _speaks(message) and message.get("content") == "" else message
        for message in chat.messages
    ]
    return _changed(chat, messages)


def tools_described(chat: Conversation) -> Conversation:
    """Give functions and their arguments empty descriptions, which gpt-oss's template and others read."""
    tools = [_described(tool) for tool in chat.tools or ()]
    return chat if tools == list(chat.tools or ()) else replace(chat, tools=tools)


def _described(tool: JsonObject) -> JsonObject:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    parameters = function.get("parameters")
    if isinstance(parameters, Mapping) and isinstance(parameters.get("properties"), Mapping):
        properties = {
            name: {"description": "", **one} if isinstance(one, Mapping) else one
            for name, one in parameters["properties"].items()
        }
        function = {**function, "parameters": {**parameters, "properties": properties}}
    return {**tool, "function": {"description": "", **function}}


# ---- the order of turns


def systems_merged(chat: Conversation) -> Conversation:
    """Make all system and developer messages one, which begins the conversation."""
    systems = [message for message in chat.messages if message.get("role") in SYSTEM]
    others = [message for message in chat.messages if message.get("role") not in SYSTEM]
    if not systems:
        return chat
    merged = joined(systems)
    return _changed(chat, [merged if merged.get("role") == "system" else {**merged, "role": "system"}, *others])


def systems_as_user(chat: Conversation) -> Conversation:
    """Make the merged system messages the beginning of the user's first turn."""
    merged = systems_merged(chat).messages
    if not merged or merged[0].get("role") not in SYSTEM:
        return chat
    return turns_joined(replace(chat, messages=[{**merged[0], "role": "user"}, *merged[1:]]))


def turns_joined(chat: Conversation) -> Conversation:
    """Make neighbouring turns of the user, or of the assistant, one. Turns with calls stay."""
    messages: Messages = []
    for role, group in itertools.groupby(chat.messages, lambda one: one.get("role") if _speaks(one) else None):
        turns = list(group)
        messages += turns if role is None else [joined(turns)]
    return _changed(chat, messages)


def turns_alternate(chat: Conversation) -> Conversation:
    """Join turns of one role, and put blank turns where turns still don't alternate.

    These are an assistant's first turn, a system message alone, and turns of one role with calls and results between
    them."""
    messages: Messages = []
    begins = True  # no turn yet but system messages
    last = "assistant"  # the role of the last turn that is neither a call nor a result
    for message in turns_joined(chat).messages:
        role = message.get("role")
        if (begins and role == "assistant") or (_speaks(message) and role == last):
            last = "user" if last == "assistant" else "assistant"
            messages.append({"role": last, "content": BLANK})
        if _speaks(message):
            last = str(role)
        begins = begins and role in SYSTEM
        messages.append(message)
    if begins and chat.add_generation_prompt:
        messages.append({"role": "user", "content": BLANK})
    return _changed(chat, messages)


def _speaks(message: JsonObject) -> bool:
    return message.get("role") in ("user", "assistant") and not message.get("tool_calls")


# ---- calls and results


def texts_before_calls(chat: Conversation) -> Conversation:
    """Make text before a call a turn of its own. The thought stays with the call."""
    messages: Messages = []
    for message in chat.messages:
        content = message.get("content")
        if message.get("tool_calls") and not _is_blank(content):
            messages.append({"role": message.get("role"), "content": content})
            message = {**message, "content": ""}
        messages.append(message)
    return _changed(chat, messages)


def calls_one_by_one(chat: Conversation) -> Conversation:
    """Make each call a turn of its own, with its result behind it."""
    messages: Messages = []
    rest = deque(chat.messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            messages.append(message)
            continue
        results: Messages = []
        while rest and rest[0].get("role") == "tool":
            results.append(rest.popleft())
        messages += _one_by_one(message, calls, results)
    return _changed(chat, messages)


def _one_by_one(message: JsonObject, calls: Sequence[Any], results: Messages) -> Messages:
    """A result that names none of the calls goes behind the next call that has no result."""
    ids = [call.get("id") if isinstance(call, Mapping) else None for call in calls]
    of_call: dict[object, Messages] = {own: [] for own in ids if own}
    strays: deque[JsonObject] = deque()
    for result in results:
        of_call.get(result.get("tool_call_id"), strays).append(result)
    turns: Messages = []
    for call, own in zip(calls, ids, strict=True):
        head = message if not turns else {"role": message.get("role"), "content": ""}
        answers = of_call.pop(own, []) or ([strays.popleft()] if strays else [])
        turns += [{**head, "tool_calls": [call]}, *answers]
    return [*turns, *strays]


def short_call_ids(chat: Conversation) -> Conversation:
    """Give calls and their results ids of nine characters. A result without an id answers the first open call."""
    open_ids: dict[str, None] = {}
    messages: Messages = []
    for message in chat.messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            ids = [_short(call.get("id"), number) for number, call in enumerate(calls)]
            open_ids = dict.fromkeys(ids)
            if ids != [call.get("id") for call in calls]:
                named = [{**call, "id": own} for call, own in zip(calls, ids, strict=True)]
                message = {**message, "tool_calls": named}
        elif message.get("role") == "tool":
            given = message.get("tool_call_id")
            own = _short(given, 0) if given or not open_ids else next(iter(open_ids))
            open_ids.pop(own, None)
            message = message if own == given else {**message, "tool_call_id": own}
        messages.append(message)
    return _changed(chat, messages)


def _short(given: object, number: int) -> str:
    if isinstance(given, str) and SHORT_ID.fullmatch(given):
        return given
    return hashlib.sha256(str(given or number).encode(errors="replace")).hexdigest()[:9]


def calls_as_sent(chat: Conversation) -> Conversation:
    """Write calls as OpenAI's API does: arguments are JSON text, and the content of a message without text is null."""
    return _changed(chat, [_as_sent(message) for message in chat.messages])


def _as_sent(message: JsonObject) -> JsonObject:
    written = with_text_arguments(message)
    return written if written is message or not _is_blank(message.get("content")) else {**written, "content": None}


def stray_results_as_user(chat: Conversation) -> Conversation:
    """Make results without a call before them turns of the user: agents cut off the beginning of a long history."""
    are_stray: list[bool] = []
    has_call = False
    for message in chat.messages:
        is_result = message.get("role") == "tool"
        has_call = has_call if is_result else bool(message.get("tool_calls"))
        are_stray.append(is_result and not has_call)
    return turns_joined(replace(chat, messages=with_results(chat.messages, are_stray))) if any(are_stray) else chat


def results_as_user(chat: Conversation) -> Conversation:
    if not any(message.get("role") == "tool" for message in chat.messages):
        return chat
    return turns_joined(replace(chat, messages=with_results(chat.messages)))


def calls_as_text(chat: Conversation) -> Conversation:
    written = _changed(chat, [with_calls(message) for message in chat.messages])
    return chat if written is chat else turns_joined(written)


# ---- joining


def joined(turns: Sequence[JsonObject]) -> JsonObject:
    """Return one turn with all texts and thoughts of turns without calls."""
    if len(turns) == 1:
        return turns[0]
    both: dict[str, object] = {**turns[0], "content": _joined_contents([turn.get("content") for turn in turns])}
    for name in THOUGHTS:
        thoughts = [str(turn[name]) for turn in turns if turn.get(name)]
        if thoughts:
            both[name] = BETWEEN.join(thoughts)
    return both


def _joined_contents(contents: Sequence[object]) -> object:
    said = [content for content in contents if not _is_blank(content)]
    if len(said) < 2:
        return said[0] if said else contents[0]
    if all(isinstance(content, str) for content in said):
        return BETWEEN.join(map(str, said))
    parts: list[object] = []
    for content in said:
        parts += content if isinstance(content, list) else [{"type": "text", "text": content}]
        parts.append({"type": "text", "text": BETWEEN})
    return parts[:-1]


def _is_blank(content: object) -> bool:
    return not (content.strip() if isinstance(content, str) else content)


def _changed(chat: Conversation, messages: Messages) -> Conversation:
    is_same = len(messages) == len(chat.messages) and all(map(operator.is_, messages, chat.messages))
    return chat if is_same else replace(chat, messages=messages)
