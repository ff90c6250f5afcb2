"""Compiles grammars for one vocabulary, with llguidance, within limits.

A grammar is text: what `llguidance` makes of a JSON schema, a regular expression or a Lark grammar (see
router/text/grammars.py). Routers check it without a vocabulary, nodes compile it for theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.config.vocabulary import Vocabulary
from shared.core.errors import InvalidRequest

SILENT = 0  # llguidance's log level


def limits() -> LLParserLimits:
    """Return what one request's grammar may use. A thread can't be killed, so these bounds are all there is.

    By llguidance's own figures: 20 ms to build the lexer, 7 ms and 1 ms for one mask, 200 MB of lexer states, which
    only a text of a bounded length can need.
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
    """Raise InvalidRequest, with llguidance's words, for a grammar that can't be compiled. Needs no vocabulary."""
    if error := LLMatcher.validate_grammar(grammar, limits=limits()):
        raise InvalidRequest(f"the grammar can't be used: {error[:500]}")


class GrammarCompiler:
    """Owned by a node. `version` names what decides which tokens a grammar allows: nodes that pair have the same."""

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
        """Make what all grammars share: 0.2 s for 50,000 tokens."""
        self._tokenizer  # noqa: B018  # made where it is first asked for

    def compile(self, grammar: str) -> LLMatcher:
        """Return a matcher at the grammar's beginning. Raise InvalidRequest."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=SILENT, limits=limits())
        if matcher.is_error():
            raise InvalidRequest(f"the grammar can't be used: {matcher.get_error()[:500]}")
        return matcher


class _Tokens:
    """A vocabulary in the form that llguidance asks for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._id_of = {token: index for index, token in enumerate(self.tokens) if token}
        self._longest = max(map(len, self._id_of))

    def __call__(self, text: bytes | str) -> Sequence[int]:
        """Encode by the longest tokens. No mask depends on it: any spelling of a text is allowed."""
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        while data:
            length = next((n for n in range(self._longest, 0, -1) if data[:n] in self._id_of), 0)
            if not length:
                return ids
            ids.append(self._id_of[data[:length]])
            data = data[length:]
        return ids
