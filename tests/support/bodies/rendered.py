"""A conversation as its model reads it, before the tokenizer."""

from __future__ import annotations

from router.text.chat.chat_prompt import pieces_and_form
from router.text.chat.conversation import Conversation
from router.text.chat.interface import TextModel


def chat_text(model: TextModel, conversation: Conversation) -> str:
    return "".join(chat_pieces(model, conversation))


def chat_pieces(model: TextModel, conversation: Conversation) -> list[str]:
    return pieces_and_form(model, conversation)[0]
