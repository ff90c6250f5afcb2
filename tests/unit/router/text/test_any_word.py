"""One pattern for many words: what it finds, and what it costs."""

from __future__ import annotations

import re

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, models

from router.text.chat.any_word import any_word
from router.text.chat.control_tokens import FIRST_PLACEHOLDER, ControlTokens, Placeholders
from router.text.guarded_encoder import GuardedEncoder
from tests.support.machine.growth import TIMES, grows_linearly

SIZE = 200
LARGE = SIZE * TIMES
words = st.text(alphabet="<ab|]-^\n", min_size=1, max_size=5)


def spans(pattern: re.Pattern[str], text: str) -> list[tuple[int, int]]:
    return [match.span() for match in pattern.finditer(text)]


@given(st.lists(words, unique=True), st.lists(words).map("".join))
@example(words=["a" * n for n in range(1, 300)], text="a" * 700 + "b" + "a" * 299)
@example(words=[], text="a")
def test_it_finds_the_longest_word(words: list[str], text: str) -> None:
    longest_first = sorted(words, key=len, reverse=True)
    one_by_one = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    assert spans(any_word(dict.fromkeys(words, "")), text) == spans(one_by_one, text)


@given(st.dictionaries(words, st.booleans()), st.lists(words).map("".join))
@example(words={"<a": False, "<a>": True, "a": True}, text="<a>b <a> ba a")
def test_a_single_word_has_no_letters_around(words: dict[str, bool], text: str) -> None:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.add_tokens([AddedToken(word, single_word=alone, normalized=False) for word, alone in words.items()])
    longest_first = sorted(words, key=len, reverse=True)
    patterns = (rf"(?<!\w){re.escape(word)}(?!\w)" if words[word] else re.escape(word) for word in longest_first)
    assert spans(GuardedEncoder(inner)._spelled, text) == spans(re.compile("|".join(patterns) or "(?!)"), text)


def names(num: int) -> list[str]:
    return [*(f"<unused{i}>" for i in range(num)), "[mask]"]


@pytest.mark.parametrize("text", ["<", "<unused"])
def test_many_control_tokens_cost_no_more_than_few(text: str) -> None:
    """The number of tokens grows with the text."""
    tokens = {num: ControlTokens(names(num)) for num in (SIZE, LARGE)}
    assert grows_linearly(lambda num: tokens[num].occur_in([text * num]), SIZE)


@pytest.mark.parametrize("text", ["\\", chr(FIRST_PLACEHOLDER)])
def test_many_placeholders_cost_no_more_than_few(text: str) -> None:
    """A client may write each control token once, and then many backslashes."""

    def split(num: int) -> None:
        placeholders = Placeholders([])
        for name in names(num):
            placeholders.stand_for(name)
        placeholders.pieces(text * 10 * num)

    assert grows_linearly(split, SIZE)
