"""Answers that a limit cut off show no mark-up and no half of a call; stop strings end texts, not calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.answer.choice_text import ChoiceText, Delta
from router.api.answer.generation_plan import AnswerForm, ShowOptions, UsageShown
from router.text.hashlm import HashTokenizer
from router.tools.answer import AnswerReader
from router.tools.calls.deltas import WholeAnswer, WholeCall, whole_answer
from router.tools.calls.formats import BY_NAME
from router.tools.reasoning import THINK, Thought, framed
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from tests.support.bodies.tool_cases import CASES, PARIS, STOP, TOOLS, Case

WRITTEN = [case for case in CASES if case.is_grammatical]
OPEN, CLOSED = Thought(THINK, is_open=True), Thought(THINK, is_open=False)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def cut(name: str, text: str, thought: Thought | None = None, whole_marks: Sequence[str] = ()) -> WholeAnswer:
    """Return what a reader makes of a cut-off answer, fed whole and in characters."""
    reads = []
    for pieces in ([text], text):
        row = BY_NAME[name]
        reader = AnswerReader(row, TOOLS, framed(row.shape) or thought, whole_marks)
        deltas = [delta for piece in pieces for delta in reader.feed(piece)]
        reads.append(whole_answer(deltas + reader.finish(is_cut=True)))
    assert reads[0] == reads[1]
    return reads[0]


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: f"{case.format}: {case.text[:40]!r}")
@pytest.mark.parametrize(
    "thought", ["", "I think.\n</think>\n\n", "<think>I think.</think>"], ids=["no", "open", "closed"]
)
def test_a_cut_shows_no_mark_up(case: Case, thought: str) -> None:
    if framed(BY_NAME[case.format].shape) is not None:
        thought = ""  # channels have thoughts of their own
    text = thought + case.text
    kind = (OPEN if thought[0] == "I" else CLOSED) if thought else None
    for size in range(len(text)):
        answer = cut(case.format, text[:size], kind)
        assert case.content.startswith(answer.content.lstrip("\n")), (text[:size], answer.content)
        assert "I think.".startswith(answer.reasoning.strip())
        assert len(answer.calls) <= len(case.calls)


@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", "a <b> "),
        ("hermes", " \n"),
        ("hermes", "<tool_call>hello"),
        ("hermes", '<tool_call>{"name": "oth'),
        ("llama3_json", '{"name": "Bo'),
        ("mistral_args", "[TOOL_CALLS]other"),
        ("pythonic", "[1, 2"),
        ("qwen3_coder", "<tool_call>\n<function=other"),
    ],
)
def test_a_cut_text_that_can_be_no_call_stays(name: str, text: str) -> None:
    assert cut(name, text) == WholeAnswer(text, "", ())


def test_half_a_mark_stays_where_marks_are_tokens() -> None:
    assert cut("hermes", "if a <") == WholeAnswer("if a ", "", ())
    assert cut("hermes", "if a <", None, ("<tool_call>", "</tool_call>")) == WholeAnswer("if a <", "", ())
    assert cut("hermes", "<", CLOSED, ("<tool_call>", "</tool_call>", "<think>", "</think>")).content == "<"
    assert cut("hermes", 'Hi <tool_call>{"na', None, ("<tool_call>",)) == WholeAnswer("Hi ", "", ())


def test_half_a_tag_of_a_cut_thought_is_dropped() -> None:
    assert cut("hermes", "Hm</thi", OPEN) == WholeAnswer("", "Hm", ())
    assert cut("hermes", "\n<thi", CLOSED) == WholeAnswer("", "", ())


# ---- stop strings


class Bytes(HashTokenizer):
    """Token = byte + 1; 0 is the end."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id - 1]) if token_id else b""


def said(
    text: str,
    stops: Sequence[str],
    *,
    thought: Thought | None = None,
    reason: FinishReason = FinishReason.STOP,
    **more: Any,
) -> tuple[WholeAnswer, Delta]:
    """Return an answer fed token by token, and its sum. The result does not depend on batches."""
    form = AnswerForm(BY_NAME["hermes"], TOOLS, thought=thought, request_id="r")
    show = ShowOptions(tuple(stops), True, UsageShown.NEVER, return_token_ids=True, num_logprobs=-1, form=form, **more)
    ids = [byte + 1 for byte in text.encode()]
    totals = []
    for batches in ([ids], [[token] for token in ids]):
        choice, total = ChoiceText(Bytes(), SamplingParams(1000), show), Delta()
        for batch in batches:
            if choice.finish_reason is None:
                total.add(choice.feed(batch, []))
        if choice.finish_reason is None:
            total.add(choice.finish(reason))
        totals.append(total)
    one, other = totals
    assert whole_answer(one.parts) == whole_answer(other.parts) and one.ids == other.ids
    assert (one.finish_reason, one.has_calls, one.stopped_by) == (
        other.finish_reason,
        other.has_calls,
        other.stopped_by,
    )
    return whole_answer(one.parts), one


@pytest.mark.parametrize("stop", ["Paris", "\n", "{", '"', "}}", "name", "tool_call", "<", "</tool_call>", "e"])
def test_a_stop_string_within_a_call_ends_nothing(stop: str) -> None:
    answer, delta = said(CALL, [stop])
    assert answer == WholeAnswer("", "", (PARIS,))
    assert delta.finish_reason is FinishReason.STOP and delta.has_calls and not delta.stopped_by


def test_a_stop_string_ends_the_text_around_calls() -> None:
    answer, delta = said(f"I look. Wait! {CALL}", ["Wait"])
    assert answer == WholeAnswer("I look. ", "", ()) and delta.stopped_by == "Wait" and not delta.has_calls
    answer, delta = said(f"Paris?{CALL}", ["Paris"])
    assert answer == WholeAnswer("", "", ()) and delta.stopped_by == "Paris"
    answer, delta = said(f"P{CALL}", ["Paris"])
    assert answer == WholeAnswer("P", "", (PARIS,)) and not delta.stopped_by
    answer, delta = said(f"{CALL} Done. END", ["Do", "END"])
    assert answer == WholeAnswer(" ", "", (PARIS,)) and delta.stopped_by == "Do" and delta.has_calls


def test_a_stop_string_ends_a_thought_and_may_be_its_tag() -> None:
    answer, delta = said("I see</think>Hi", ["see"], thought=OPEN)
    assert answer == WholeAnswer("", "I ", ()) and delta.stopped_by == "see"
    answer, delta = said("I see</think>Hi", ["</think>"], thought=OPEN)
    assert answer == WholeAnswer("", "I see", ()) and delta.stopped_by == "</think>"
    answer, delta = said("I se</think>He", ["eH"], thought=OPEN)
    assert answer == WholeAnswer("He", "I se", ()) and not delta.stopped_by


def test_a_stop_string_is_found_in_text_that_was_held_back() -> None:
    answer, delta = said("a <", ["<"])
    assert answer == WholeAnswer("a ", "", ()) and delta.stopped_by == "<"
    answer, delta = said("a <tool", ["<to"], reason=FinishReason.ABORT)
    assert answer == WholeAnswer("a ", "", ()) and delta.finish_reason is FinishReason.STOP
    answer, delta = said("a <tool! b", ["!"], keeps_stop=True)
    assert answer == WholeAnswer("a <tool!", "", ()) and delta.ids == [ord(char) + 1 for char in "a <tool!"]


PIECES = [
    CALL,
    "<tool_call>",
    '{"name": "stop", "arguments": {}}',
    "</tool_call>",
    "</think>",
    "END",
    "E",
    "ND",
    " ",
    "a",
    "<",
]


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.sampled_from([None, OPEN]), st.booleans())
def test_stops_leave_the_calls_before_them(text: str, thought: Thought | None, is_cut: bool) -> None:
    """What a reader shows without stops begins with what it shows with them, and no text holds a stop string."""
    reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
    free, _ = said(text, [], thought=thought, reason=reason)
    answer, delta = said(text, ["END"], thought=thought, reason=reason)
    assert free.reasoning.startswith(answer.reasoning) and free.content.startswith(answer.content)
    assert free.calls[: len(answer.calls)] == answer.calls
    assert delta.stopped_by or (free == answer and delta.finish_reason is reason)
    if delta.has_calls:
        assert all(isinstance(json.loads(call.arguments), dict) for call in answer.calls)


def test_a_cut_call_stays_a_call() -> None:
    answer, delta = said(CALL[:60], ["Paris"], reason=FinishReason.LENGTH)
    assert answer == WholeAnswer("", "", (WholeCall("get_weather", '{"city": "P'),)) and not delta.has_calls
    answer, delta = said('<tool_call>{"name": "stop", "arguments": {}}</tool', [], reason=FinishReason.LENGTH)
    assert answer == WholeAnswer("", "", (STOP,)) and delta.has_calls
