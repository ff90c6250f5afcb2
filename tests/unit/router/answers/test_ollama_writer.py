"""/api/chat and /api/generate write the same answer in lines and whole, however it was cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.answer.writer import AnswerFacts, Times
from router.api.ollama.ollama_writer import Loading, OllamaWriter, PartWriter, chat_part, generate_part
from shared.core.errors import Overloaded
from shared.core.states import FinishReason
from shared.wire.messages import TokenLogprob
from tests.support.web.written_answers import COUNTS, deltas_of, facts_of, streamed, whole
from tests.unit.router.answers.test_answer_writers import CALL, OPEN, REASONS, TEXTS, cut

Json = dict[str, Any]


def writer(
    part: PartWriter = chat_part, loading: Loading | None = None, facts: AnswerFacts | None = None
) -> OllamaWriter:
    return OllamaWriter(facts or facts_of(), part, "m:latest", loading=loading)


def lines_of(data: bytes) -> list[Json]:
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def joined(lines: Sequence[Json]) -> Json:
    """Put a chat's lines together as a client does."""
    messages = [line["message"] for line in lines]
    text, thought = ("".join(one.get(name, "") for one in messages) for name in ("content", "thinking"))
    calls = [call for one in messages for call in one.get("tool_calls", [])]
    return {"role": "assistant", "content": text, "thinking": thought, "tool_calls": calls}


@given(TEXTS, st.lists(st.integers(0, 500), max_size=20), st.sampled_from(REASONS))
def test_lines_hold_what_the_whole_answer_holds(text: str, places: list[int], reason: FinishReason) -> None:
    deltas = deltas_of(cut(text, places), reason=reason, thought=OPEN)
    lines = lines_of(streamed(writer(), deltas))
    (answer,) = lines_of(whole(writer(), deltas))
    empty = {"thinking": "", "tool_calls": []}
    assert joined(lines) == empty | answer["message"]
    assert lines[-1] == answer | {"message": {"role": "assistant", "content": ""}}


def test_thoughts_text_and_calls_have_their_places() -> None:
    deltas = deltas_of(["I think.</think>", "\n\nLet me look.\n", CALL, "\n", CALL], thought=OPEN)
    (answer,) = lines_of(whole(writer(), deltas))
    message = answer["message"]
    assert (message["thinking"], message["content"].strip()) == ("I think.", "Let me look.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"index": index, "name": "get_weather", "arguments": {"city": "Oslo"}} for index in range(2)
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    (of_prompt,) = lines_of(whole(writer(generate_part), deltas_of(["I think.</think>", "Yes."], thought=OPEN)))
    assert (of_prompt["thinking"], of_prompt["response"], of_prompt["done_reason"]) == ("I think.", "Yes.", "stop")


@pytest.mark.parametrize("write", [streamed, whole])
def test_a_call_that_was_cut_off_is_left_out(write: Callable[..., bytes]) -> None:
    """Also a call whose arguments have not begun, though no arguments at all would be `{}`."""
    for begun in (CALL[:-30], CALL[:-15]):
        deltas = deltas_of([CALL, begun], reason=FinishReason.LENGTH)
        message = joined(lines_of(write(writer(), deltas)))
        assert (message["content"], len(message["tool_calls"])) == ("", 1)


def test_counts_and_times_are_in_the_last_line() -> None:
    facts = replace(facts_of(), times=Times(arrived=10.0, first=10.25, last=12.0))
    *parts, last = lines_of(streamed(writer(facts=facts), deltas_of(["hel", "lo"])))
    assert all(set(part) == {"model", "created_at", "message", "done"} for part in parts)
    assert (last["prompt_eval_count"], last["eval_count"]) == (COUNTS.prompt, COUNTS.answer)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (250_000_000, 1_750_000_000)
    assert (last["total_duration"], last["load_duration"]) == (2_000_000_000, 0)
    assert (last["model"], last["created_at"]) == ("m:latest", "1970-01-01T00:00:01Z")


@pytest.mark.parametrize("reason", list(Loading))
def test_a_model_that_was_only_loaded_has_no_counts(reason: Loading) -> None:
    (answer,) = lines_of(whole(writer(loading=reason), deltas_of([])))
    assert (answer["done"], answer["done_reason"]) == (True, reason) and "eval_count" not in answer


def test_a_ping_and_an_error_are_lines() -> None:
    assert writer(generate_part).ping.startswith(b"{")
    (ping,) = lines_of(writer(generate_part).ping)
    assert (ping["response"], ping["done"]) == ("", False)
    assert lines_of(writer().failed(Overloaded("too much"))) == [{"error": "too much"}]


def test_scores_that_no_text_belongs_to_have_a_line() -> None:
    """Text that may begin a call is held back, but its tokens have been drawn."""
    facts = facts_of()
    facts = replace(facts, plan=replace(facts.plan, show=replace(facts.plan.show, num_logprobs=1)))
    first, *rest = deltas_of(["<tool", "!"])
    first.ids, first.logprobs = [3], [TokenLogprob(-0.5, (3,), (-0.5,))]
    assert not first.parts
    lines = lines_of(streamed(writer(facts=facts), [first, *rest]))
    assert [len(line.get("logprobs", [])) for line in lines].count(1) == 1
    assert lines[0]["logprobs"][0]["top_logprobs"][0]["logprob"] == -0.5
