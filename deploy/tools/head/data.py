"""Read the target's answers as training sequences, hold some out, and order the others in shards.

Lines are JSON objects: `p` has the prompt's ids with the chat template, `a` the answer's ids, `t` the temperature.
Files may be gzipped.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.core.errors import ConfigError

HELD_OUT_OF = 50  # one prompt in 50 is held out
SHORTEST_ANSWER = 8  # shorter answers have no room for a chain of drafts


@dataclass(frozen=True, slots=True)
class TrainingAnswer:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.answer


def read_answers(path: Path) -> list[TrainingAnswer]:
    """Raise ConfigError that names the invalid line."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            return [_parse(path, number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, EOFError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error


def _parse(path: Path, number: int, line: str) -> TrainingAnswer:
    try:
        raw = json.loads(line)
        found = TrainingAnswer(tuple(map(int, raw["p"])), tuple(map(int, raw["a"])), float(raw["t"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}:{number} is not an answer with the fields p, a and t: {error!r}") from error
    if not found.prompt:
        raise ConfigError(f"{path}:{number} has an empty prompt")
    return found


def is_held_out(prompt: Sequence[int]) -> bool:
    digest = hashlib.blake2b(repr(tuple(prompt)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_OF == 0


@dataclass(frozen=True, slots=True)
class Split:
    """Training and held-out answers, in an order that depends only on the seed. The two parts share no prompt."""

    training: tuple[TrainingAnswer, ...]
    held_out: tuple[TrainingAnswer, ...]


def split(answers: Iterable[TrainingAnswer], seed: int, max_tokens: int) -> Split:
    """Cut sequences at `max_tokens`, and drop answers shorter than SHORTEST_ANSWER."""
    usable = [_cut(one, max_tokens) for one in answers]
    usable = [one for one in usable if len(one.answer) >= SHORTEST_ANSWER]
    random.Random(seed).shuffle(usable)
    held_out = tuple(one for one in usable if is_held_out(one.prompt))
    return Split(tuple(one for one in usable if not is_held_out(one.prompt)), held_out)


def _cut(one: TrainingAnswer, max_tokens: int) -> TrainingAnswer:
    return TrainingAnswer(one.prompt, one.answer[: max(0, max_tokens - len(one.prompt))], one.temperature)


def shards(answers: Sequence[TrainingAnswer], size: int) -> list[tuple[TrainingAnswer, ...]]:
    return [tuple(answers[start : start + size]) for start in range(0, len(answers), size)]


def frequent_ids(answers: Iterable[TrainingAnswer], count: int, always: Iterable[int]) -> list[int]:
    """Return the draft vocabulary, ascending: the ids in `always`, and the answers' most frequent ids.

    Fill up to `count` with the lowest ids, which are bytes and early merges in byte-level vocabularies.
    """
    seen: Counter[int] = Counter()
    for one in answers:
        seen.update(one.answer)
    chosen = dict.fromkeys(always)
    for candidate in _candidates(seen):
        if len(chosen) >= count:  # `always` alone may have more ids
            break
        chosen.setdefault(candidate)
    return sorted(chosen)


def _candidates(seen: Counter[int]) -> Iterator[int]:
    yield from sorted(seen, key=lambda token: (-seen[token], token))
    number = 0
    while True:
        yield number
        number += 1
