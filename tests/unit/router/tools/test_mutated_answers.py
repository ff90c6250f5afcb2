"""Mutated answers: no exception, no text lost, a stream equals the whole."""

from __future__ import annotations

import random

import pytest

from router.tools.answer import AnswerReader
from router.tools.calls.deltas import WholeAnswer, whole_answer
from router.tools.calls.formats import BY_NAME, FORMATS
from router.tools.reasoning import TAGS, Thought, framed
from tests.support.bodies.tool_cases import TOOLS
from tests.support.bodies.tool_formats import WRITTEN

NUM_MUTATED, MANY_MUTATED = 40, 10_000  # of each format
BEFORE, BEHIND = ("Kestrel", "Osprey"), ("Heron", "Plover")  # words that no format writes
PIECES = [
    *("<", ">", "{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ":", "=", "\n", " ", "</", "```", "|", "é"),
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>"),
    *("get_weather", "city", "arguments", "null", "True", "0", "ab"),
]


def read(name: str, pieces: list[str], thought: Thought | None) -> WholeAnswer:
    row = BY_NAME[name]
    reader = AnswerReader(row, TOOLS, framed(row.shape) or thought)
    deltas = [delta for piece in pieces for delta in reader.feed(piece)]
    return whole_answer(deltas + reader.finish())


def split(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(16)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def mutated(text: str, rng: random.Random) -> str:
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(text) + 1)
        gone = rng.choice([0, 0, 1, 3, rng.randrange(12)])
        text = text[:at] + rng.choice([*PIECES, text[: rng.randrange(20)]]) + text[at + gone :]
    return text


@pytest.mark.parametrize("num", [NUM_MUTATED, pytest.param(MANY_MUTATED, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [row.name for row in FORMATS])
def test_mutated_answers_lose_no_text(name: str, num: int) -> None:
    rng = random.Random(name)
    written = WRITTEN[name]
    frame = framed(BY_NAME[name].shape)
    for _ in range(num):
        call = mutated(rng.choice([written.stop, written.two or written.stop, written.paris, written.full]), rng)
        tags = rng.choice(TAGS)
        thought = frame or rng.choice([None, Thought(tags, is_open=True), Thought(tags, is_open=False)])
        text = f"{' '.join(BEFORE)} {call} {' '.join(BEHIND)}"
        whole = read(name, [text], thought)
        assert read(name, split(text, rng), thought) == whole
        shown = whole.content + whole.reasoning
        for word in BEFORE:
            assert word in shown, (text, whole)
        for word in BEHIND:
            assert word in shown or whole.calls, (text, whole)
        if not whole.calls and thought is None and not BY_NAME[name].frames:
            assert whole.content == text
