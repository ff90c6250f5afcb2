"""Find out which texts of a conversation a template has dropped.

The usual conversation is looked up in its prompt, text by text. That can't tell a short text from the template's own
words, nor find a text that the template has changed. So a doubtful conversation is rendered once more, with a mark at
both ends of each text.

    hi   ->   <mark>0<mark>hi<mark>0<mark>
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.text.chat.control_tokens import collect_strings, mapped_strings
from router.text.chat.conversation import Conversation, JsonObject
from router.text.chat.rewriting import SYSTEM

NEAR = 1024  # between two texts, templates seldom write more characters of their own
MOST_TIMES = 16  # how many times a prompt's length may be searched
LEAST = 1 << 20
# templates drop what stands before them in an answer
THOUGHT_ENDS = (
    *("</think>", "[/THINK]", "</seed:think>", "</mm:think>", "</longcat_think>", "<channel|>", "<|END_THINKING|>"),
    *("<|inner_suffix|>", "[BEGIN FINAL RESPONSE]"),
)
Change = Callable[[str], str]


def is_usual(messages: Sequence[JsonObject]) -> bool:
    """Return whether the roles come in an order that every template should know."""
    previous = ""
    for index, message in enumerate(messages):
        role = str(message.get("role"))
        before = "" if previous in SYSTEM else previous
        if role in SYSTEM and index:
            return False
        if role == previous != "tool" and not message.get("tool_calls"):
            return False
        if role == "assistant" and not before:
            return False
        if role == "tool" and before not in ("assistant", "tool"):
            return False
        previous = role
    return True


def all_found(messages: Sequence[JsonObject], prompt: str) -> bool:
    """Return whether each text stands in the prompt, behind the texts of earlier messages.

    A call's texts may come in any order, and the message's content before or behind them."""
    places = _Places(prompt)
    at = 0
    for message in messages:
        start = at
        for text in contents_of(message):
            at = places.end_of(text, at, NEAR)
            if at < 0:
                return False
        texts = call_texts_of(message) if "tool_calls" in message else ()
        if texts:
            near = NEAR + 2 * sum(map(len, texts))
            ends = [places.end_of(text, start, near) for text in texts]
            if -1 in ends:
                return False
            at = max(ends)
    return True


class _Places:
    """Looks up texts in one prompt. Its work is limited to a multiple of the prompt's length."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._spare = MOST_TIMES * len(prompt) + LEAST

    def end_of(self, text: str, start: int, near: int) -> int:
        """Return the end of the text's first place behind `start`; -1 without a place, or after too much work.

        The next `near` characters come first, in all spellings: a search through the rest of a long prompt takes
        time."""
        if self._spare < 0:
            return -1
        found = self._prompt.find(text, start, start + near + len(text))
        if found >= 0:
            self._spare -= found - start
            return found + len(text)
        return self._end_of_spelled(text, start, near)

    def _end_of_spelled(self, text: str, start: int, near: int) -> int:
        for most in (min(start + near + len(text), len(self._prompt)), len(self._prompt)):
            for spelled in _spellings(text):
                if self._spare < 0:
                    return -1
                found = self._prompt.find(spelled, start, most)
                self._spare -= (found if found >= 0 else most) - start
                if found >= 0:
                    return found + len(spelled)
        return -1


def contents_of(message: JsonObject) -> list[str]:
    """Return the content's texts without outer white space; of the assistant's, only what stands behind a thought."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else _part_texts(content)
    if message.get("role") == "assistant":
        texts = [text[_end_of_thought(text) :] for text in texts]
    return [core for text in texts if (core := text.strip())]


def _part_texts(content: object) -> list[str]:
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def call_texts_of(message: JsonObject) -> list[str]:
    """Return all texts of the message's calls without outer white space: names, and what the arguments hold."""
    texts: list[str] = []
    for call in _calls_of(message):
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            collect_strings([function.get("name"), function.get("arguments")], texts)
    return [core for text in texts if (core := text.strip())]


def _calls_of(message: JsonObject) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


@dataclass(frozen=True, slots=True)
class TextPlace:
    """A text's place, such as messages[3].content, and its kind: the message's role, or `call`."""

    name: str
    kind: str

    def __str__(self) -> str:
        return self.name


def marked(chat: Conversation, mark: str) -> tuple[Conversation, list[TextPlace]]:
    """Return the conversation with a mark at both ends of each text, and the place of each mark's text."""
    places: list[TextPlace] = []

    def signed(place: TextPlace) -> Change:
        def change(text: str) -> str:
            sign = f"{mark}{len(places)}{mark}"
            places.append(place)
            return f"{sign}{text}{sign}"

        return change

    messages = []
    for index, message in enumerate(chat.messages):
        role = "system" if message.get("role") in SYSTEM else str(message.get("role"))
        message = _with_content(message, signed(TextPlace(f"messages[{index}].content", role)))
        messages.append(_with_calls(message, signed(TextPlace(f"messages[{index}].tool_calls", "call"))))
    return replace(chat, messages=messages), places


def lost_places(places: Sequence[TextPlace], mark: str, rendered: str) -> tuple[TextPlace, ...]:
    """Return the places of the texts whose marks are not both in the rendered text, perhaps escaped for JSON."""
    either = f"(?:{mark}|{re.escape(json.dumps(mark)[1:-1])})"
    num_found = Counter(map(int, re.findall(rf"{either}(\d+){either}", rendered)))
    return tuple(dict.fromkeys(place for i, place in enumerate(places) if num_found[i] < 2))


def _spellings(text: str) -> Iterator[str]:
    """Yield the forms in which templates write a text: as it is, or in JSON."""
    yield text
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    if escaped != text:
        yield escaped
    if not text.isascii():
        yield json.dumps(text)[1:-1]


def _with_content(message: JsonObject, change: Change) -> JsonObject:
    """Change the texts of the content that are not blank; in the assistant's, only what stands behind a thought."""
    content = message.get("content")
    is_assistants = message.get("role") == "assistant"

    def changed(text: str) -> str:
        end = _end_of_thought(text) if is_assistants else 0
        return text[:end] + change(text[end:]) if text[end:].strip() else text

    if isinstance(content, str):
        return {**message, "content": changed(content)}
    if isinstance(content, list):
        return {**message, "content": [_with_text(part, changed) for part in content]}
    return message


def _with_text(part: object, change: Change) -> object:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {**part, "text": change(part["text"])}
    return part


def _end_of_thought(text: str) -> int:
    end = 0
    for tag in THOUGHT_ENDS:
        if tag in text:
            end = max(end, text.rfind(tag) + len(tag))
    return end


def _with_calls(message: JsonObject, change: Change) -> JsonObject:
    """Change all texts of the message's calls that are not blank."""
    calls = _calls_of(message)

    def changed(text: str) -> str:
        return change(text) if text.strip() else text

    return {**message, "tool_calls": [_with_function(call, changed) for call in calls]} if calls else message


def _with_function(call: Any, change: Change) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    texts = {name: mapped_strings(function[name], change) for name in ("name", "arguments") if name in function}
    return {**call, "function": {**function, **texts}}
