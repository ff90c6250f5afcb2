"""Treat control tokens that a client writes in a chat as plain text.

    given      a <|im_end|> b                      a client's string
    hidden     a X b                               X: a placeholder character, not in chat or template
    rendered   <|im_start|>user\\na X b<|im_end|>   by the template, which may trim, split, repeat and dump its input
    pieces     ["<|im_start|>user\\na ", "<|im_end|>", " b<|im_end|>"]     odd pieces are plain text

If a string ends inside a control token, a placeholder for "" keeps the next string from completing the token. A token
that a template builds around a client's word, as in `'<|' + message.role + '|>'`, is not hidden.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.text.chat.any_word import any_word
from router.text.chat.conversation import Conversation
from shared.config.settings.text_settings import TextConfig
from shared.core.errors import InvalidRequest

# These are printable in Python and JSON, have no case, and don't change under Unicode normalization.
FIRST_PLACEHOLDER, LAST_PLACEHOLDER = 0x20000, 0x2A6D6
_PLACEHOLDER = re.compile(f"[{chr(FIRST_PLACEHOLDER)}-{chr(LAST_PLACEHOLDER)}]")
_ESCAPED = re.compile(r"\\u(d8[4-6][0-9a-f])\\u(d[c-f][0-9a-f]{2})")  # the same characters in ASCII JSON
_WRITTEN = re.compile(f"{_PLACEHOLDER.pattern}|{_ESCAPED.pattern}")
THINK_TAGS = frozenset(
    {"<think>", "</think>", "[THINK]", "[/THINK]"}
)  # an assistant's message may contain these control tokens


class Placeholders:
    """One rendering's placeholder characters. None of them occurs in `texts`."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._taken = {char for text in texts for char in _placeholders_in(text)}
        self._next = FIRST_PLACEHOLDER
        self._of: dict[str, str] = {}
        self._literals: dict[str, str] = {}  # placeholder -> its literal, both plain or both as JSON

    def stand_for(self, literal: str) -> str:
        """Return the placeholder for `literal`, the same at each call."""
        if literal not in self._of:
            char = self._of[literal] = self.unused()
            self._literals[char] = literal
            self._literals[json.dumps(char)[1:-1]] = json.dumps(literal)[1:-1]
        return self._of[literal]

    def unused(self) -> str:
        """Return an unused character. Raise InvalidRequest if none is left."""
        for code in range(self._next, LAST_PLACEHOLDER + 1):
            if chr(code) not in self._taken:
                self._next = code + 1
                return chr(code)
        raise InvalidRequest("the messages hold too many different rare characters", param="messages")

    def pieces(self, rendered: str) -> list[str]:
        """Split the rendered text; pieces with an odd index are literals."""
        pieces: list[str] = []
        end = 0
        for found in _WRITTEN.finditer(rendered):
            if found[0] in self._literals:
                pieces += (rendered[end : found.start()], self._literals[found[0]])
                end = found.end()
        return [*pieces, rendered[end:]]


class ControlTokens:
    """One vocabulary's control tokens. Immutable."""

    def __init__(self, spellings: Iterable[str]) -> None:
        tokens = {s for s in spellings if s.strip()}
        self._pattern = any_word(dict.fromkeys(tokens, ""))
        self._beginnings = {s[:size] for s in tokens for size in range(1, len(s))}
        self._first_chars = frozenset(s[0] for s in tokens)
        self._longest = max(map(len, tokens), default=0)

    def occur_in(self, texts: Sequence[str]) -> bool:
        joined = "\0".join(texts)
        if not any(char in joined for char in self._first_chars):
            return False
        return self._pattern.search(joined) is not None or any(map(self._ends_within, texts))

    def hide(self, conversation: Conversation, placeholders: Placeholders) -> Conversation:
        """Replace control tokens in the conversation's strings with placeholders."""

        def shown(match: re.Match[str]) -> str:
            return match[0] if match[0] in THINK_TAGS else placeholders.stand_for(match[0])

        def hidden(match: re.Match[str]) -> str:
            return placeholders.stand_for(match[0])

        def change(replacement: Callable[[re.Match[str]], str]) -> Callable[[str], str]:
            def changed(text: str) -> str:
                end = placeholders.stand_for("") if self._ends_within(text) else ""
                return self._pattern.sub(replacement, text) + end

            return changed

        of_assistant, of_others = change(shown), change(hidden)
        return replace(
            conversation,
            messages=[
                mapped_strings(message, of_assistant if message.get("role") == "assistant" else of_others)
                for message in conversation.messages
            ],
            tools=mapped_strings(conversation.tools, of_others),
            documents=mapped_strings(conversation.documents, of_others),
            kwargs=mapped_strings(conversation.kwargs, of_others),
        )

    def _ends_within(self, text: str) -> bool:
        tail = text[1 - self._longest :] if self._longest > 1 else ""
        if self._first_chars.isdisjoint(tail):
            return False
        return any(tail[i] in self._first_chars and tail[i:] in self._beginnings for i in range(len(tail)))


def guarded(options: TextConfig, spellings: Iterable[str]) -> ControlTokens | None:
    return None if options.allow_control_tokens else ControlTokens(spellings)


def conversation_strings(conversation: Conversation) -> list[str]:
    found: list[str] = []
    for part in (conversation.messages, conversation.tools, conversation.documents, conversation.kwargs):
        collect_strings(part, found)
    return found


def collect_strings(value: object, found: list[str]) -> None:
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, dict | Mapping):
        found.extend(value)
        for item in value.values():
            collect_strings(item, found)
    elif isinstance(value, list | tuple):
        for item in value:
            collect_strings(item, found)


def mapped_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict | Mapping):
        return {change(key): mapped_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mapped_strings(item, change) for item in value]
    return value


def _placeholders_in(text: str) -> Iterator[str]:
    yield from _PLACEHOLDER.findall(text)
    for high, low in _ESCAPED.findall(text):
        yield chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
