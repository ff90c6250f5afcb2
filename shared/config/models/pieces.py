"""A vocabulary of pieces of one to six bytes, for test models.

Its tokens are difficult: some end inside a character, others cross a grammar's boundaries, like `":{`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from shared.config.models.vocab_bytes import Vocabulary

MAX_BYTES = 6
JSON = (
    *('":', '": ', '":"', '": "', '":{', '": {', '":[', '": [', '","', '", "', '"},', '"}, ', '"],', '{"', '{ "'),
    *('["', '"]', '"}', '" }', '"}}', '"}]', "}]", "[{", "},{", "}}", "]}", "{}", "[]", ", ", ": ", '\\"', "\\n"),
    *("true", "false", "null", "-1", "0.", ".5", "e+", "1e", "\n  ", "\n\n", "  ", "    ", "\\u00", "\\u"),
)  # fmt: skip
TAGS = (
    *("<tool", "_call>", "</tool", "<think", "</thin", "k>", "<func", "tion=", "</", "[TOOL", "_CALLS", "[ARGS]"),
    *("name", "argume", "nts", "parame", "ters", '{"name', 'me": "', '", "ar', "type", "<|", "|>", "[/", "()", "='"),
)
WORDS = (
    *(" the", " of", " and", " a", " in", "ing", "er", "on", "tion", "ent", "es", "re", "th", "he", "an", "ed", "or"),
    *("is", "it", "st", "en", " to", " th", "ou", "ar", "al", "yes", "no", "maybe", "ab", "abc", "abcd", "city", "Os"),
    *("lo", " say:", "say:", "The ", "user", "user:", "tool", "tool: ", "assist", "ant: ", "system", ".\n", "! ", "? "),
)
NUMBERS = tuple(f"{i:02}" for i in range(100))
CUT = (  # parts of é, 你 and an emoji, some with bytes of neighbouring characters
    *(b" \xc3", b"\xa9s", b"\xc3\xa9", b"\xe4\xbd", b"\xbd\xa0", b"\xa0\xe4", b"\xf0\x9f", b"\x9f\x98", b"\x98\x80"),
    *(b"\x80\xf0\x9f", b"\xc3\xa9\xc3", b'"\xe4', b'\xa0"', b"\xe4\xbd\xa0\xe4\xbd", b"\xf0\x9f\x98"),
)
END = b"<eos>"


@dataclass(frozen=True, slots=True)
class Pieces:
    """`ids` maps each token's bytes to the token's id, but lacks the end token."""

    vocabulary: Vocabulary
    ids: dict[bytes, int]

    @property
    def eos_id(self) -> int:
        return len(self.vocabulary.tokens) - 1

    def first(self, data: bytes) -> int:
        """Return the longest token at the beginning of `data`, which must not be empty."""
        return next(self.ids[data[:size]] for size in range(MAX_BYTES, 0, -1) if data[:size] in self.ids)

    def encode(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            ids.append(self.first(data[at : at + MAX_BYTES]))
            at += len(self.vocabulary.tokens[ids[-1]])
        return ids

    def decode(self, ids: list[int]) -> bytes:
        tokens = self.vocabulary.tokens
        return b"".join(tokens[i] for i in ids if i != self.eos_id)


def make_pieces() -> Pieces:
    texts = (text.encode() for text in itertools.chain(JSON, TAGS, WORDS, NUMBERS))
    tokens = tuple(dict.fromkeys((*(bytes((byte,)) for byte in range(256)), *texts, *CUT)))
    eos_id = len(tokens)
    vocabulary = Vocabulary((*tokens, END), (eos_id,), frozenset({eos_id}))
    return Pieces(vocabulary, {token: i for i, token in enumerate(tokens)})
