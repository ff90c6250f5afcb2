"""Text for HashLM, the integer test model: a token is a printable ASCII character or the end token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from router.text.chat.calls_in_text import calls_as_json, content_of
from router.text.chat.conversation import Conversation
from router.text.chat.interface import TextModel, VocabFacts
from shared.config.models.vocabulary import HASHLM_EOS, HASHLM_FIRST_CHAR
from shared.core.errors import InvalidRequest

FIRST_CHAR = HASHLM_FIRST_CHAR
EOS_ID = HASHLM_EOS
CONTEXT_LENGTH = 65536


class HashTokenizer:
    """Ids 0..94 are chr(32 + id), 95 is the end of text."""

    facts = VocabFacts(
        vocab_size=EOS_ID + 1, eos_ids=(EOS_ID,), special_ids=frozenset({EOS_ID}), context_length=CONTEXT_LENGTH
    )

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        ids = [ord(char) - FIRST_CHAR for char in text]
        if ids and not (min(ids) >= 0 and max(ids) < EOS_ID):
            raise InvalidRequest("model hashlm knows printable ASCII characters only (codes 32 to 126)")
        return ids

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        return self.encode("".join(pieces), add_special=False)

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == EOS_ID else bytes((token_id + FIRST_CHAR,))


class PlainTemplate:
    """Writes `role: content` and the calls of each message, for models without a template."""

    sources: Mapping[str, str] = MappingProxyType({})

    def render(self, conversation: Conversation) -> str:
        turns = [
            " ".join([f"{message.get('role')}: {content_of(message)}", *calls_as_json(message, ensure_ascii=True)])
            for message in conversation.messages
        ]
        return " ".join([*turns, "assistant: "] if conversation.add_generation_prompt else turns)


def hash_text_model() -> TextModel:
    return TextModel(tokenizer=HashTokenizer(), template=PlainTemplate())
