"""Answers of the target model as training sequences: reading, the held-out split, and a fixed order in shards.

One JSON object a line, plain or gzipped: `p` prompt ids (with the chat template), `a` answer ids, `t` the temperature
the answer was drawn at. Knows nothing of models.
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

HELD_OUT_OF = 50  # one prompt in this many is never trained on
SHORTEST_ANSWER = 8  # below this no chain of drafts has room


@dataclass(frozen=True, slots=True)
class TrainingAnswer:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.answer


def read_answers(path: Path) -> list[TrainingAnswer]:
    """Raises ConfigError with the line that is not an answer."""
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
        raise ConfigError(f"{path}:{number} is no answer (p, a, t): {error!r}") from error
    if not found.prompt:
        raise ConfigError(f"{path}:{number} has an empty prompt")
    return found


def is_held_out(prompt: Sequence[int]) -> bool:
    """By the prompt alone, so that no second answer to a held-out prompt is trained on, in whatever file it stands."""
    digest = hashlib.blake2b(repr(tuple(prompt)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_OF == 0


@dataclass(frozen=True, slots=True)
class Split:
    """Both in one fixed order that depends on the seed only. `training` has no prompt of `held_out`."""

    training: tuple[TrainingAnswer, ...]
    held_out: tuple[TrainingAnswer, ...]


def split(answers: Iterable[TrainingAnswer], seed: int, max_tokens: int) -> Split:
    """Leaves out answers too short to draft in; cuts at `max_tokens` per sequence."""
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
    """The draft vocabulary: `always` and the most frequent answer ids, ascending. Fewer than `count` are filled up
    with the lowest ids, as a byte-level vocabulary begins with its bytes and merges by frequency."""
    seen: Counter[int] = Counter()
    for one in answers:
        seen.update(one.answer)
    chosen = dict.fromkeys(always)
    for candidate in _candidates(seen):
        if len(chosen) == count:
            break
        chosen.setdefault(candidate)
    return sorted(chosen)


def _candidates(seen: Counter[int]) -> Iterator[int]:
    yield from sorted(seen, key=lambda token: (-seen[token], token))
    number = 0
    while True:
        yield number
        number += 1
