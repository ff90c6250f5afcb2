"""Turn a conversation into its prompt's ids: normalize, hide control tokens, render, cut, tokenize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from router.text.control_tokens import Placeholders, conversation_strings
from router.text.conversation import Conversation, normalized
from router.text.interface import TextModel
from shared.core.errors import InvalidRequest


def chat_ids(model: TextModel, conversation: Conversation) -> list[int]:
    """Return the prompt's ids. Raise InvalidRequest if template or tokenizer refuses the conversation."""
    return ids_and_text(model, conversation)[0]


def ids_and_text(
    model: TextModel, conversation: Conversation, check: Callable[[str], None] = lambda text: None
) -> tuple[list[int], str]:
    """Call `check` with the text before it is encoded."""
    pieces = chat_pieces(model, conversation)
    text = "".join(pieces)
    check(text)
    try:
        if model.control_tokens is None:
            return model.tokenizer.encode(text, add_special=False), text
        return model.tokenizer.encode_pieces(pieces), text
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param="messages") from error


def chat_text(model: TextModel, conversation: Conversation) -> str:
    return "".join(chat_pieces(model, conversation))


def chat_pieces(model: TextModel, conversation: Conversation) -> list[str]:
    """Return the prompt in pieces. Pieces with an odd index are the client's plain text."""
    chat = normalized(conversation)
    if model.control_tokens is None and not chat.continue_final_message:
        return [model.template.render(chat)]
    texts = conversation_strings(chat)
    hides = model.control_tokens is not None and model.control_tokens.occur_in(texts)
    if not hides and not chat.continue_final_message:
        return [model.template.render(chat)]
    placeholders = Placeholders([*texts, *model.template.sources.values()])
    if model.control_tokens is not None and hides:
        chat = model.control_tokens.hide(chat, placeholders)
    if not chat.continue_final_message:
        return placeholders.pieces(model.template.render(chat))
    return placeholders.pieces(_render_unfinished(model, chat, placeholders.unused()))


def _render_unfinished(model: TextModel, chat: Conversation, mark: str) -> str:
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
        raise _cannot("can't be used: the chat template changes the last message")
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
    return InvalidRequest(f"continue_final_message {reason}", param="continue_final_message")
