"""Compare answers token by token. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.columns import aligned

NEAR_TIE = 1e-3
CONTEXT_TOKENS = 3


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    """`margins[i]`: the best token's logprob minus the second best's; None if unknown."""

    ids: tuple[int, ...]
    margins: tuple[float | None, ...] = ()
    prompt_ids: tuple[int, ...] = ()


Answer = tuple[AnswerChoice, ...]  # choices by index
Answers = Sequence[Answer]  # in order of cases


@dataclass(frozen=True, slots=True)
class Difference:
    case: str
    choice: int
    position: int
    wanted: tuple[int, ...]  # the ids around the position
    got: tuple[int, ...]
    margin: float | None

    def __str__(self) -> str:
        where = f"request {self.case!r}, answer {self.choice}, token {self.position}"
        text = f"{where}: ids {list(self.got)} instead of {list(self.wanted)}"
        if self.margin is None:
            return text
        verdict = "a near tie" if self.margin < NEAR_TIE else "not a tie"
        return f"{text}; there the best two tokens are {self.margin:.4f} apart in logprob ({verdict})"


def differences(names: Sequence[str], wanted: Answers, got: Answers) -> list[Difference]:
    found = []
    for name, reference, answer in zip(names, wanted, got, strict=True):
        for index, (right, other) in enumerate(zip(reference, answer, strict=True)):
            position = first_difference(right.ids, other.ids)
            if position is not None:
                margin = right.margins[position] if position < len(right.margins) else None
                around = slice(position, position + CONTEXT_TOKENS)
                found.append(Difference(name, index, position, right.ids[around], other.ids[around], margin))
    return found


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A cell's result: the number of equal answers by pass, and counters that show how the cell ran."""

    cell: str
    about: str
    equal: tuple[str, ...]
    handed_over: int
    cached_tokens: int


def table(passes: Sequence[str], rows: Sequence[ComparedRow]) -> str:
    lines = [["", *passes, "handed over", "cached tokens", ""]]
    lines += [[row.cell, *row.equal, str(row.handed_over), str(row.cached_tokens), row.about] for row in rows]
    return aligned(lines)
