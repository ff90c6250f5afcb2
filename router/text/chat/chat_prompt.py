"""Turn a conversation into its prompt's ids: normalize, hide control tokens, render, cut, tokenize."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from router.text.chat.control_tokens import Placeholders, conversation_strings
from router.text.chat.conversation import Conversation, normalized
from router.text.chat.interface import RenderingFailed, TextModel
from router.text.chat.normal_form import Form, Renderer
from shared.core.errors import InvalidRequest

CONTINUE = "continue_final_message"
Check = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`form`: the form of the conversation that was rendered."""

    ids: list[int]
    text: str
    form: Form


def chat_ids(model: TextModel, conversation: Conversation) -> list[int]:
    """Return the prompt's ids. Raise InvalidRequest if template or tokenizer refuses the conversation."""
    return chat_prompt(model, conversation).ids


def chat_prompt(model: TextModel, conversation: Conversation, check: Check = lambda text: None) -> ChatPrompt:
    """Call `check` with the text before it is encoded."""
    pieces, form = pieces_and_form(model, conversation, check)
    text = "".join(pieces)
    check(text)
    try:
        if model.control_tokens is None:
            return ChatPrompt(model.tokenizer.encode(text, add_special=False), text, form)
        return ChatPrompt(model.tokenizer.encode_pieces(pieces), text, form)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param="messages") from error


def pieces_and_form(
    model: TextModel, conversation: Conversation, check: Check = lambda text: None
) -> tuple[list[str], Form]:
    """Return the prompt in pieces, and the form of the conversation that was rendered. Pieces with an odd index are
    the client's plain text."""
    given = chat = normalized(conversation)

    @functools.cache
    def placeholders() -> Placeholders:
        return Placeholders([*conversation_strings(given), *model.template.sources.values()])

    hides = model.control_tokens is not None and model.control_tokens.occur_in(conversation_strings(given))
    if model.control_tokens is not None and hides:
        chat = model.control_tokens.hide(given, placeholders())
    render = model.template.render
    if chat.continue_final_message:
        render = functools.partial(_render_unfinished, model, placeholders().unused())
    text, form = Renderer(render, check, lambda: placeholders().unused()).with_all_texts(chat)
    return (placeholders().pieces(text) if hides else [text]), form


def _render_unfinished(model: TextModel, mark: str, chat: Conversation) -> str:
    """Render up to the end of the last message, which a temporary mark and a space show. If the template has trimmed
    the space, remove white space before the mark too.
    """
    if chat.add_generation_prompt:
        raise _cannot("needs add_generation_prompt to be false")
    if not chat.messages:
        raise _cannot("needs a message")
    last = chat.messages[-1]
    content, ending = _with_mark(last.get("content"), mark + " ")
    rendered = model.template.render(replace(chat, messages=[*chat.messages[:-1], {**last, "content": content}]))
    before, found, after = rendered.rpartition(mark)
    if not found or ending.strip() not in rendered:
        raise RenderingFailed(f"{CONTINUE} can't be used: the chat template changes the last message", param=CONTINUE)
    return before if after.startswith(" ") else before.rstrip()


def _with_mark(content: object, mark: str) -> tuple[object, str]:
    """Append the mark to the content's last text. Return the new content, and the last text without the mark."""
    if isinstance(content, str):
        return content + mark, content
    parts = list(content) if isinstance(content, list) else []
    for i, part in reversed(list(enumerate(parts))):
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            marked: dict[str, Any] = {**part, "text": part["text"] + mark}
            return [*parts[:i], marked, *parts[i + 1 :]], part["text"]
    raise _cannot("needs a last message with text")


def _cannot(reason: str) -> InvalidRequest:
    return InvalidRequest(f"{CONTINUE} {reason}", param=CONTINUE)
