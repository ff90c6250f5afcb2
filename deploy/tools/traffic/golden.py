"""Compare answers under load with golden answers, which the idle server gave to the same prompts. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.tools.traffic.figures.check import Check
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.truth import MOST_DETAILS
from deploy.tools.traffic.workloads.driver import Messages
from deploy.tools.traffic.workloads.workload import Session, Turn
from shared.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Golden:
    """Without `ids`, which only some servers show, texts are compared.

    `margins[i]`: the logprob of token i minus the second best; empty if unknown.
    """

    messages: Messages
    max_tokens: int
    text: str
    ids: tuple[int, ...] = ()
    margins: tuple[float, ...] = ()

    def as_session(self, probe: int) -> Session:
        *opening, (_, text) = self.messages
        return Session((Turn(text, self.max_tokens),), tuple(opening), probe)


@dataclass(frozen=True, slots=True)
class GoldenDifference:
    number: int
    probe: int
    position: int  # in tokens, or in characters
    unit: str
    got: str
    wanted: str
    margin: float | None

    def is_near_tie(self, bound: float) -> bool:
        """Return whether rounding may explain the difference; False if `bound` is 0."""
        return self.margin is not None and 0 < bound >= self.margin

    def __str__(self) -> str:
        near = "" if self.margin is None else f"; there the best two tokens were {self.margin:.4f} apart in logprob"
        where = f"request {self.number} (golden {self.probe}), {self.unit} {self.position}"
        return f"{where}: {self.got} instead of {self.wanted}{near}"


def check_tokens(goldens: Sequence[Golden], records: Sequence[RequestRecord], near_tie: float) -> Check:
    if not goldens:
        return Check("tokens", "skipped", "skipped: no golden prompts were asked for")
    compared = [one for one in records if one.probe is not None and one.at and not one.error]
    found = [one for record in compared if (one := first_difference(goldens[record.probe or 0], record)) is not None]
    wrong = [one for one in found if not one.is_near_tie(near_tie)]
    details = tuple(map(str, (wrong or found)[:MOST_DETAILS]))
    how = "token for token" if goldens[0].ids else "as text"
    if wrong:
        text = f"{len(wrong)} of {len(compared)} answers to golden prompts differ under load ({how})"
        return Check("tokens", "failed", text, details)
    if not compared:
        return Check("tokens", "doubtful", "no golden prompt was sent during the load: make it longer")
    equal = f"{len(compared) - len(found)} of {len(compared)} answers to golden prompts are equal under load ({how})"
    if found:
        text = (
            f"{equal}; the others differ where the best two tokens were within {near_tie:g}: rounding may decide there"
        )
        return Check("tokens", "doubtful", text, details)
    return Check("tokens", "ok", equal)


def first_difference(golden: Golden, record: RequestRecord) -> GoldenDifference | None:
    """If we hung up, compare only what had come by then."""
    if golden.ids and record.ids:
        position = parting(golden.ids, record.ids, record.is_whole)
        if position is None:
            return None
        margin = golden.margins[position] if position < len(golden.margins) else None
        got, wanted = (str(list(ids[position : position + 3])) for ids in (record.ids, golden.ids))
        return GoldenDifference(record.number, record.probe or 0, position, "token", got, wanted, margin)
    position = parting(golden.text, record.text, record.is_whole)
    if position is None:
        return None
    got, wanted = (repr(text[position : position + 20]) for text in (record.text, golden.text))
    return GoldenDifference(record.number, record.probe or 0, position, "character", got, wanted, None)


def parting(wanted: Sequence[object], got: Sequence[object], is_whole: bool) -> int | None:
    for position, (one, other) in enumerate(zip(wanted, got, strict=False)):
        if one != other:
            return position
    has_ended_elsewhere = len(got) > len(wanted) or (is_whole and len(got) != len(wanted))
    return min(len(got), len(wanted)) if has_ended_elsewhere else None


def save(path: Path, model: str, goldens: Sequence[Golden]) -> None:
    text = json.dumps({"model": model, "answers": [asdict(one) for one in goldens]}, indent=1)
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"--golden-file {path}: {error.strerror}") from None


def read(path: Path, model: str) -> list[Golden]:
    try:
        found = json.loads(path.read_text("utf-8"))
        answers = [
            Golden(
                tuple((str(role), str(text)) for role, text in row["messages"]),
                int(row["max_tokens"]),
                str(row["text"]),
                tuple(map(int, row["ids"])),
                tuple(map(float, row["margins"])),
            )
            for row in found["answers"]
        ]
        of = str(found["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--golden-file {path}: {error!r}") from None
    if of != model:
        raise ConfigError(f"--golden-file {path} has answers of {of}, but the server's model is {model}")
    return answers
