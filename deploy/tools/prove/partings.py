"""Where two answers to the same request part, and whether rounding may explain it. Pure.

Bounds. A margin between two tokens is a difference of two logits. A format with p significant bits stores a logit
between 16 and 32 in steps of 2^(5 - p): 1/8 in bfloat16 (p = 8), 1/64 in float16 (p = 11). A sum in another order, as
another batch size brings, may move each of the two logits by one step, so a margin of at most two steps is below the
noise. In float32 the steps are 2^-19, and the sums' own errors dominate: some thousand terms through some ten layers
move a logit by up to 1e-3.

A seeded stream parts where the two distributions draw differently. If they are p and q, the same random number draws
different tokens with a chance near their distance, half the sum of |p - q|. If these distances add up to less than
RARE until the tokens differ, rounding is not the reason. Equal distributions never draw differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.tools.prove.asks import Ask
from deploy.tools.prove.compare import first_difference
from deploy.tools.prove.recorded import RecordedAnswer, TokenScore

NOISE = {"float32": 1e-3, "float16": 2 * 2**-6, "bfloat16": 2 * 2**-3}  # in logprob
RARE = 1e-3
CONTEXT = 3  # tokens shown of each stream
CONTEXT_CHARS = 24


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of two streams. `margin`: logprobs between the two tokens, or None if unknown.

    `below`: whether rounding may explain the difference.
    """

    way: str
    ask: str
    kind: str
    position: int
    unit: str
    wanted: str
    got: str
    margin: float | None
    below: bool
    why: str

    def __str__(self) -> str:
        where = f"{self.way}: {self.ask!r}, {self.unit} {self.position}"
        return f"{where}: {self.got} instead of {self.wanted}; {self.why}"


def part(way: str, ask: Ask, wanted: RecordedAnswer, got: RecordedAnswer, noise: float) -> Parting | None:
    """Compare token ids if both show them, else tokens of the logprobs, else texts. Return None for equal answers."""
    for unit, first, second, shown in (
        ("token", wanted.ids, got.ids, CONTEXT),
        ("token", tokens_of(wanted), tokens_of(got), CONTEXT),
        ("character", wanted.thoughts + wanted.text, got.thoughts + got.text, CONTEXT_CHARS),
    ):
        if not first and not second or (unit == "token" and not (first and second)):
            continue
        position = first_difference(first, second)
        ends_alike = wanted.finish == got.finish and wanted.text == got.text
        if position is None or (ends_alike and position == min(len(first), len(second))):
            continue  # one of the two may show the token that ends the answer
        hides_some = unit == "token" and (wanted.thoughts or ask.kind == "structured")
        if hides_some and all_said(wanted) == all_said(got) and lacks_some(first, second):
            continue  # streams of some servers hide the tokens around thoughts, or around an object
        around = slice(position, position + shown)
        has_scores = unit == "token" and scored(wanted) and scored(got)
        margin, below, why = judge(ask, wanted, got, position, noise) if has_scores else (None, False, UNKNOWN)
        shown_parts = (excerpt(first[around]), excerpt(second[around]))
        return Parting(way, ask.name, ask.kind, position, unit, *shown_parts, margin, below, why)
    if wanted.finish != got.finish:
        why = "the texts are equal, the reasons for their end are not"
        return Parting(way, ask.name, ask.kind, len(wanted.text), "end", wanted.finish, got.finish, None, False, why)
    return None


UNKNOWN = "how near the two were is unknown, because the server shows no log-probabilities of them"


def lacks_some(first: Sequence[object], second: Sequence[object]) -> bool:
    """Return whether the shorter one is the longer one without some tokens."""
    shorter, longer = sorted((first, second), key=len)
    rest = iter(longer)
    return len(shorter) < len(longer) and all(token in rest for token in shorter)


def tokens_of(answer: RecordedAnswer) -> tuple[str, ...]:
    return tuple(one.token for one in answer.scores)


def all_said(answer: RecordedAnswer) -> tuple[str, str, str]:
    return answer.thoughts, answer.text, answer.finish


def scored(answer: RecordedAnswer) -> bool:
    """Return whether each shown token has a log-probability, so that positions agree."""
    return bool(answer.scores) and (not answer.ids or len(answer.ids) == len(answer.scores))


def excerpt(values: Sequence[object]) -> str:
    return repr(values if isinstance(values, str) else list(values)) if values else "the end"


def judge(
    ask: Ask, wanted: RecordedAnswer, got: RecordedAnswer, position: int, noise: float
) -> tuple[float | None, bool, str]:
    """Return (margin, whether it is below the noise, why), from the scores of both at `position`."""
    if ask.fields.get("temperature") == 0.0:
        views = ((wanted.scores, got.scores), (got.scores, wanted.scores))
        found = [margin_between(*view, position) for view in views]
        margins = [(one, is_exact) for one, is_exact in found if one is not None]
        if not margins:
            return None, False, UNKNOWN
        margin, is_exact = max(margins)  # a near tie is one for both
        below = margin <= noise and any(one[1] for one in margins)
        verdict = f"below the noise of {noise:g}" if below else f"above the noise of {noise:g}"
        return margin, below, f"there the two are {'' if is_exact else 'more than '}{margin:.4f} apart: {verdict}"
    moved = max(max_move(wanted.scores[:position], got.scores[:position]), moved_at(wanted, got, position))
    chance = sum(distance(a, b) for a, b in zip(wanted.scores[: position + 1], got.scores, strict=False))
    below = moved <= noise and chance >= RARE
    said = (
        f"up to there log-probabilities moved by {moved:.4f}, which draws another token with a chance of {chance:.2g}"
    )
    return None, below, said + (": rounding may explain it" if below else ": rounding does not explain it")


def margin_between(wanted: Sequence[TokenScore], got: Sequence[TokenScore], position: int) -> tuple[float | None, bool]:
    """Return (the two tokens' margin by the scores of `wanted`, True), or (a lower bound of it, False).

    If one stream ended there, its last token's text is unknown: the margin is that of the best two of the other.
    Between two scores of minus infinity, as servers give to tokens that a mask forbids, the margin is None: unknown.
    """
    if position >= min(len(wanted), len(got)):
        longer = wanted if len(wanted) > position else got
        best = sorted(longer[position].top.values(), reverse=True)[:2] if len(longer) > position else []
        return told_margin(best[0], best[1], True) if len(best) == 2 else (None, False)
    at, token = wanted[position], got[position].token
    if token in at.top:
        return told_margin(at.logprob, at.top[token], True)
    if not at.top:
        return None, False
    least = min(at.top.values())
    if at.logprob < least:  # a grammar's choice: both are less likely than those shown, and each stream tells its own
        return told_margin(at.logprob, got[position].logprob, True)
    return told_margin(at.logprob, least, False)


def told_margin(first: float, second: float, is_exact: bool) -> tuple[float | None, bool]:
    if first == second == -math.inf:
        return None, False
    return abs(first - second), is_exact


def max_move(wanted: Sequence[TokenScore], got: Sequence[TokenScore]) -> float:
    """Return the largest difference between the same tokens' log-probabilities, until the streams part."""
    moved = 0.0
    for a, b in zip(wanted, got, strict=False):
        if a.token != b.token:
            break
        if a.logprob != b.logprob:  # both may be minus infinity
            moved = max(moved, abs(a.logprob - b.logprob))
    return moved


def moved_at(wanted: RecordedAnswer, got: RecordedAnswer, position: int) -> float:
    """Return how far the most likely tokens' log-probabilities are apart at `position`."""
    if position >= min(len(wanted.scores), len(got.scores)):
        return 0.0
    a, b = wanted.scores[position].top, got.scores[position].top
    both = a.keys() & b.keys()
    return max((abs(a[token] - b[token]) for token in both if a[token] != b[token]), default=0.0)


def distance(a: TokenScore, b: TokenScore) -> float:
    """Estimate half the sum of |p - q| from the most likely tokens, as if the others moved alike."""
    common = a.top.keys() & b.top.keys()
    mass = sum(math.exp(a.top[token]) for token in common)
    apart = sum(abs(math.exp(a.top[token]) - math.exp(b.top[token])) for token in common)
    return min(1.0, apart / 2 / mass) if mass else 1.0
