"""Tell how a model calls tools and thinks, by its chat template: without tokenizer.json, if that is not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from router.text.chat.interface import TextModel, VocabFacts
from router.text.folder_tokenizer import template_of
from router.text.load import load_text_model
from router.tools.detect import speech_of
from router.tools.reasoning import thought_tags
from shared.config.models.folder_facts import facts_of
from shared.config.models.model_folder import ModelFolder
from shared.config.models.tokenizer_file import token_content

NO_FORMAT, NO_TEMPLATE = "as the model writes them: no known format", "no chat template"


class SpecialTokens:
    """A tokenizer that knows only its special tokens, as tokenizer_config.json lists them."""

    def __init__(self, folder: ModelFolder) -> None:
        listed: Mapping[str, Any] = folder.tokenizer.get("added_tokens_decoder") or {}
        special = {int(index): token for index, token in listed.items() if token.get("special")}
        self._bytes = {index: token_content(token).encode() for index, token in special.items()}
        facts = facts_of(folder)
        size = facts.vocab_size or 0
        self.facts = VocabFacts(size, facts.eos_ids, frozenset(self._bytes), facts.context_length)

    def __hash__(self) -> int:
        return id(self)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return [index for index, token in self._bytes.items() if token == text.encode()]

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        return [index for piece in pieces for index in self.encode(piece, add_special=False)]

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]


def calls_and_thoughts(path: str, folder: ModelFolder) -> tuple[str, str]:
    """Return the name of the format of calls, and the tags around a thought; "" for none. Raises ConfigError."""
    if folder.path.is_dir() and not Path(folder.path, "tokenizer.json").is_file():
        text = TextModel(SpecialTokens(folder), template_of(folder, {}, continues=True), about=folder.tokenizer)
    else:
        text = load_text_model(path)
    if not text.template.sources:
        return NO_TEMPLATE, ""
    speech = speech_of(text)
    tags = thought_tags(text.template.sources)
    calls = speech.calls.name if speech.calls is not None else "response_template" if speech.template else NO_FORMAT
    return calls, f"{tags.opening.strip()} ... {tags.closing.strip()}" if tags is not None else ""
