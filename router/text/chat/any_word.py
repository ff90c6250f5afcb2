"""Find many words by one pattern, as fast as a few."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence

MAX_NESTING = 64  # Python compiles groups by recursion


def any_word(ends: Mapping[str, str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest word at a place. `ends`: by word, the pattern that must follow."""
    return re.compile(_tails(sorted(ends), 0, ends, MAX_NESTING) if ends else "(?!)")


def _tails(words: Sequence[str], start: int, ends: Mapping[str, str], nesting: int) -> str:
    if len(words) == 1 or not nesting:
        longest_first = sorted(words, key=len, reverse=True)
        return _one_of([re.escape(word[start:]) + ends[word] for word in longest_first])
    shared = os.path.commonprefix([words[0], words[-1]])
    longer = itertools.groupby((word for word in words if word != shared), lambda word: word[len(shared)])
    tails = [_tails(list(group), len(shared), ends, nesting - 1) for _, group in longer]
    return re.escape(shared[start:]) + _one_of([*tails, ends[shared]] if shared in ends else tails)


def _one_of(patterns: Sequence[str]) -> str:
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"
