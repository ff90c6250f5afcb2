"""What the recorded answers show about a server: one check per claim. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.tools.prove.asks import KINDS, SEEDED_ONE, SEEDED_OTHER, Ask, limit_of, valid_day
from deploy.tools.prove.counters import Moved
from deploy.tools.prove.partings import Parting, all_said, max_move, part
from deploy.tools.prove.recorded import RecordedAnswer, TokenScore
from deploy.tools.traffic.figures.check import Check

MOST_DETAILS = 5
TOO_MANY = 429
ROUNDED = 1e-4  # servers print log-probabilities with a few digits
SUM_SLACK = 1e-3
NOT_OFFERED = "not offered: {why}"
UNFINISHED = 3  # tokens of a character that max_tokens cuts off
BROKEN = "\ufffd"  # stands for bytes that are not a whole character, as "" does: several tokens may have such a text


@dataclass(frozen=True, slots=True)
class AskedGroup:
    """The same requests, sent in several ways. The first way is the reference. Answers are in the order of `asks`."""

    asks: Sequence[Ask]
    answers: Mapping[str, Sequence[RecordedAnswer]]

    @property
    def reference(self) -> Sequence[RecordedAnswer]:
        return next(iter(self.answers.values()))

    def others(self) -> Iterator[tuple[str, Ask, RecordedAnswer, RecordedAnswer]]:
        """Yield (way, request, reference, answer) where both were answered."""
        for way, answers in list(self.answers.items())[1:]:
            for ask, wanted, got in zip(self.asks, self.reference, answers, strict=True):
                if not wanted.error and not got.error:
                    yield way, ask, wanted, got

    def all(self) -> Iterator[tuple[str, Ask, RecordedAnswer]]:
        for way, answers in self.answers.items():
            yield from ((way, ask, answer) for ask, answer in zip(self.asks, answers, strict=True))


@dataclass(frozen=True, slots=True)
class WayRow:
    """How many streams of a way are equal to the reference's, by kind: (equal, compared)."""

    way: str
    equal: Mapping[str, tuple[int, int]]
    below: int
    above: int


def all_partings(groups: Sequence[AskedGroup], noise: float) -> list[Parting]:
    compared = (one for group in groups for one in group.others())
    return [found for one in compared if (found := part(*one, noise)) is not None]


def rows_of(groups: Sequence[AskedGroup], partings: Sequence[Parting]) -> list[WayRow]:
    rows = []
    for group in groups:
        for way in list(group.answers)[1:]:
            compared = [ask for name, ask, _, _ in group.others() if name == way]
            found = [one for one in partings if one.way == way]
            equal: dict[str, tuple[int, int]] = {}
            for kind in KINDS:
                total = sum(ask.kind == kind for ask in compared)
                equal[kind] = (total - sum(one.kind == kind for one in found), total)
            below = sum(one.below for one in found)
            rows.append(WayRow(way, equal, below, len(found) - below))
    return rows


def first_of(wrong: Sequence[tuple[str, Ask, str]]) -> tuple[str, ...]:
    """Return the first details of a check. `wrong`: (way, request, why)."""
    return tuple(f"{way}: {ask.name!r}: {why}" for way, ask, why in wrong[:MOST_DETAILS])


def check_replies(groups: Sequence[AskedGroup]) -> Check:
    asked = [one for group in groups for one in group.all()]
    failed = [(way, ask, answer) for way, ask, answer in asked if answer.error]
    if not failed:
        return Check("answers", "ok", f"all {len(asked)} requests were answered to their end")
    details = first_of([(way, ask, answer.error) for way, ask, answer in failed])
    if all(answer.status == TOO_MANY for _, _, answer in failed):
        return Check("answers", "doubtful", f"{len(failed)} of {len(asked)} requests were one too many", details)
    return Check("answers", "failed", f"{len(failed)} of {len(asked)} requests failed", details)


def check_streams(groups: Sequence[AskedGroup], partings: Sequence[Parting]) -> list[Check]:
    """Return two checks: of differences that rounding does not explain, and of those below the noise."""
    total = sum(1 for group in groups for _ in group.others())
    above = [one for one in partings if not one.below]
    below = [one for one in partings if one.below]
    if not total:
        return [Check("streams", "doubtful", "there is nothing to compare: see the check of answers")]
    if above:
        text = f"{len(above)} of {total} streams differ from the same request's first one"
        streams = Check("streams", "failed", text, tuple(map(str, above[:MOST_DETAILS])))
    else:
        streams = Check("streams", "ok", f"{total - len(below)} of {total} streams are equal, token for token")
    if not below:
        return [streams, Check("noise", "ok", "no stream differs by less than the noise of its number format")]
    text = f"{len(below)} of {total} streams differ where rounding may decide"
    return [streams, Check("noise", "doubtful", text, tuple(map(str, below[:MOST_DETAILS])))]


def check_seeds(group: AskedGroup) -> Check:
    by_name = {ask.name: answer for ask, answer in zip(group.asks, group.reference, strict=True) if not answer.error}
    if SEEDED_ONE not in by_name or SEEDED_OTHER not in by_name:
        return Check("seeds", "skipped", NOT_OFFERED.format(why="seeded requests were refused"))
    if all_said(by_name[SEEDED_ONE]) != all_said(by_name[SEEDED_OTHER]):
        return Check("seeds", "ok", "another seed draws another stream")
    return Check("seeds", "doubtful", "two seeds drew the same stream: is the temperature heeded?")


def check_structured(groups: Sequence[AskedGroup], refused: str) -> Check:
    if refused:
        return Check("structured", "skipped", NOT_OFFERED.format(why=refused))
    answers = [(way, ask, one) for group in groups for way, ask, one in group.all() if ask.kind == "structured"]
    answers = [one for one in answers if not one[2].error]
    if not answers:
        return Check("structured", "doubtful", "no structured request was answered")
    wrong = [(way, ask, why) for way, ask, answer in answers if (why := misfit(answer))]
    cut = sum(answer.finish == "length" for _, _, answer in answers)
    if wrong:
        details = first_of(wrong)
        return Check("structured", "failed", f"{len(wrong)} of {len(answers)} answers do not fit the schema", details)
    if cut:
        return Check(
            "structured", "doubtful", f"{cut} of {len(answers)} answers were cut off before their object's end"
        )
    return Check("structured", "ok", f"all {len(answers)} answers parse and fit the schema")


def misfit(answer: RecordedAnswer) -> str:
    """Return why the answer does not fit the schema; "" if it fits or max_tokens cut it off."""
    try:
        value = json.loads(answer.text)
    except ValueError:
        is_begun = answer.finish == "length" and answer.text.lstrip()[:1] in ("", "{")  # or in its thoughts
        return "" if is_begun else f"not JSON: {answer.text[:60]!r}"
    return "" if valid_day(value) else f"not the schema's: {answer.text[:120]!r}"


def check_scores(groups: Sequence[AskedGroup], refused: str) -> Check:
    """Check each answer's log-probabilities by themselves."""
    scored = [(way, ask, one) for group in groups for way, ask, one in group.all() if one.scores]
    if refused or not scored:
        return Check("logprobs", "skipped", NOT_OFFERED.format(why=refused or "answers have no log-probabilities"))
    wrong = [(way, ask, why) for way, ask, answer in scored if (why := untrue_scores(ask, answer))]
    if wrong:
        details = first_of(wrong)
        text = f"{len(wrong)} of {len(scored)} answers have log-probabilities that can't be true"
        return Check("logprobs", "failed", text, details)
    other = [f"{way}: {ask.name!r}" for way, ask, answer in scored if not spells(answer)]
    if other:
        text = f"the tokens of {len(other)} of {len(scored)} answers do not spell the text"
        return Check("logprobs", "doubtful", text, tuple(other[:MOST_DETAILS]))
    text = f"in {len(scored)} answers: sums are at most 1, and a greedy token is always the most likely one"
    return Check("logprobs", "ok", text)


def untrue_scores(ask: Ask, answer: RecordedAnswer) -> str:
    for position, one in enumerate(answer.scores):
        why = untrue_score(one, is_greedy=ask.kind == "greedy")
        if why:
            return f"token {position}, {one.token!r}: {why}"
    return ""


def untrue_score(one: TokenScore, *, is_greedy: bool) -> str:
    wrong = next((value for value in (one.logprob, *one.top.values()) if not value <= ROUNDED), None)
    if wrong is not None:
        return f"a log-probability is {wrong:.4f}, which is not 0 or below"
    total = sum(map(math.exp, one.top.values()))
    if total > 1 + SUM_SLACK:
        return f"the probabilities of the most likely tokens add up to {total:.4f}"
    told = one.top.get(one.token)
    if told is not None and one.token and BROKEN not in one.token and abs(told - one.logprob) > ROUNDED:
        return f"it has {one.logprob:.4f} as the chosen token and {told:.4f} among the most likely ones"
    best = max(one.top, key=lambda token: one.top[token], default=None)
    if is_greedy and best is not None and one.top[best] > one.logprob + ROUNDED:
        return f"it was chosen greedily with {one.logprob:.4f}, but {best!r} has {one.top[best]:.4f}"
    return ""


def spells(answer: RecordedAnswer) -> bool:
    """Return whether the shown tokens are the text. A server may also show the token that ends the answer."""
    whole = "".join(one.token for one in answer.scores).strip()
    text = answer.text.strip()
    if answer.thoughts or BROKEN in whole:
        return True
    without_last = "".join(one.token for one in answer.scores[:-1]).strip()
    return whole == text or (answer.finish == "stop" and without_last == text)


def check_repeats(groups: Sequence[AskedGroup], noise: float) -> Check:
    """Check that the same tokens have the same log-probabilities in all ways, streamed or not."""
    moves = [
        (max_move(wanted.scores, got.scores), way, ask.name)
        for group in groups
        for way, ask, wanted, got in group.others()
        if wanted.scores and got.scores
    ]
    if not moves:
        return Check("repeated", "skipped", NOT_OFFERED.format(why="answers have no log-probabilities"))
    worst, way, name = max(moves)
    if worst == 0:
        return Check("repeated", "ok", f"the same tokens have the same log-probabilities in all {len(moves)} streams")
    text = f"the same tokens' log-probabilities move by up to {worst:.2g}; the noise is {noise:g}"
    details = (f"the largest: {way}: {name!r}",)
    return Check("repeated", "ok" if worst <= noise else "failed", text, details)


def check_usage(groups: Sequence[AskedGroup], max_tokens: int) -> Check:
    told = [
        (way, ask, answer, wanted)
        for group in groups
        for way, answers in group.answers.items()
        for ask, answer, wanted in zip(group.asks, answers, group.reference, strict=True)
        if answer.usage is not None
    ]
    if not told:
        return Check("usage", "skipped", NOT_OFFERED.format(why="answers have no usage"))
    wrong = [
        (way, ask, why) for way, ask, answer, wanted in told if (why := untrue_usage(ask, answer, wanted, max_tokens))
    ]
    if wrong:
        details = first_of(wrong)
        return Check("usage", "failed", f"{len(wrong)} of {len(told)} answers have a usage that is not true", details)
    counted = sum(answer.num_shown > 0 for _, _, answer, _ in told)
    text = f"in {len(told)} answers sums and prompt tokens agree; in {counted} of them the tokens could be counted too"
    return Check("usage", "ok", text)


def untrue_usage(ask: Ask, answer: RecordedAnswer, wanted: RecordedAnswer, max_tokens: int) -> str:
    usage, limit = answer.usage, limit_of(ask, max_tokens)
    assert usage is not None
    if usage.total != usage.prompt + usage.completion:
        return f"total_tokens is {usage.total}, but the parts are {usage.prompt} and {usage.completion}"
    if usage.cached is not None and not 0 <= usage.cached <= usage.prompt:
        return f"{usage.cached} of {usage.prompt} prompt tokens came from a cache"
    if wanted.usage is not None and usage.prompt != wanted.usage.prompt:
        return f"{usage.prompt} prompt tokens, and {wanted.usage.prompt} for the same prompt before"
    hidden = int(answer.finish == "stop")  # an end has no text
    hides_some = bool(answer.thoughts)  # what stands around them
    if not answer.ids:  # llama.cpp hides parts of characters, and what stands around an object
        hidden += len(answer.text.encode(errors="replace")) - len(answer.text)
        hidden += UNFINISHED * (answer.finish != "stop" and usage.completion == limit)
        hides_some = hides_some or ask.kind == "structured"
    most = usage.completion if hides_some else answer.num_shown + hidden
    if answer.num_shown and not answer.num_shown <= usage.completion <= most:
        return f"completion_tokens is {usage.completion}, but {answer.num_shown} tokens were shown"
    if answer.finish == "length" and usage.completion != limit:
        return f"completion_tokens is {usage.completion} of an answer that was cut off at {limit}"
    return ""


def told_cached(groups: Sequence[AskedGroup]) -> int | None:
    """Return how many prompt tokens of the compared requests came from a cache by usage. None: not told."""
    usages = [answer.usage for group in groups for _, _, answer in group.all()]
    told = [usage.cached for usage in usages if usage is not None and usage.cached is not None]
    return sum(told) if told else None


def check_prefixes(told: int | None, moved: Sequence[Moved]) -> Check:
    rises = "; ".join(f"{one.name} rose by {one.by:.0f}" for one in moved)
    by_usage = "usage does not tell" if told is None else f"usage tells of {told} cached prompt tokens"
    text = f"{by_usage}; {rises}" if rises else f"{by_usage}; no known counter tells"
    highest = max((one.by for one in moved), default=None)
    if told is None and highest is None:
        return Check("prefixes", "skipped", NOT_OFFERED.format(why=text))
    if highest is not None and highest < 0:
        return Check("prefixes", "doubtful", f"{text}: a counter fell, so it is of another server, or of a new one")
    if told and highest == 0:
        return Check("prefixes", "failed", text)
    if told == 0 and highest is not None and highest > 0:
        return Check("prefixes", "doubtful", text)
    if not told and not highest:
        return Check("prefixes", "doubtful", f"{text}: nothing came from a cache, so its streams prove nothing of it")
    return Check("prefixes", "ok", text)


def check_hand_offs(moved: Sequence[Moved]) -> Check:
    if not moved:
        return Check("hand-offs", "skipped", NOT_OFFERED.format(why="no known counter of hand-offs"))
    text = "; ".join(f"{one.name} rose by {one.by:.0f}" for one in moved)
    if any(one.by > 0 for one in moved):
        return Check("hand-offs", "ok", text)
    return Check("hand-offs", "doubtful", f"{text}: nothing was handed over, so equal streams prove nothing of it")
