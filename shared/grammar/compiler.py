"""Compiles grammars for one vocabulary, with llguidance and within limits. Routers check grammars without a vocabulary.

A grammar is a text for llguidance (router/text/grammars.py makes it).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.config.models.vocab_bytes import Vocabulary
from shared.core.errors import InvalidRequest

SILENT = 0  # log level of llguidance
MOST_FORCED_BYTES = 1024  # of a forced text that become tokens at once


def limits() -> LLParserLimits:
    """Return a grammar's limits. Only these limits can stop a compilation, because a thread can't be killed.

    By llguidance's figures, the limits allow 20 ms to build the lexer. Each mask may take 7 ms in the lexer and 1 ms in
    the parser. Lexer states may take 200 MB; only a grammar that bounds a text's length can need this.
    """
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=100_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def check_grammar(grammar: str) -> None:
    """Raise InvalidRequest, with llguidance's message, if the grammar can't be compiled."""
    if error := LLMatcher.validate_grammar(grammar, limits=limits()):
        raise InvalidRequest(f"the grammar can't be used: {error[:500]}")


class GrammarCompiler:
    """`version` names the rules by which grammars allow tokens. Paired nodes must have equal versions."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.num_words = -(-len(vocabulary.tokens) // 32)

    @property
    def version(self) -> str:
        return f"llguidance {llguidance.__version__} {self._vocabulary.digest}"

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        wrapper = llguidance.TokenizerWrapper(_Tokens(self._vocabulary))
        return LLTokenizer(wrapper, n_vocab=len(self._vocabulary.tokens), eos_token=list(self._vocabulary.eos_ids))

    def warm_up(self) -> None:
        """Build the shared tokenizer: 0.2 s for 50,000 tokens."""
        self._tokenizer  # noqa: B018  # a cached property

    def compile(self, grammar: str) -> LLMatcher:
        """Return a new matcher. Raises InvalidRequest."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=SILENT, limits=limits())
        if matcher.is_error():
            raise InvalidRequest(f"the grammar can't be used: {matcher.get_error()[:500]}")
        return matcher


class _Tokens:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._id_of = {token: index for index, token in enumerate(self.tokens) if token}
        self._longest = max(map(len, self._id_of))

    def __call__(self, text: bytes | str) -> Sequence[int]:
        """Encode the text's beginning greedily. Masks do not depend on how a text is split into tokens, and of forced
        tokens only the next ones are needed."""
        data = (text.encode() if isinstance(text, str) else text)[:MOST_FORCED_BYTES]
        ids: list[int] = []
        while data:
            length = next((n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._id_of), 0)
            if not length:
                return ids
            ids.append(self._id_of[data[:length]])
            data = data[length:]
        return ids
