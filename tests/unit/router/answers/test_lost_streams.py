"""A stream that was cut anywhere goes on at a router that knows nothing of it: no text is missing, and none comes
twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from router.api.answer import stream_token
from router.api.answer.marks import MAX_CHOICES, read_id
from router.api.answer.stream_start import begin_stream
from router.api.answer.stream_token import Signer, StreamFacts
from router.http.errors import ResumeMismatch, UnknownStream
from shared.core.errors import BatonError
from shared.core.sampling_params import NEUTRAL, SamplingValues
from shared.observe.metrics import RequestMetrics
from tests.support.worlds.lost_streams import Asked, Event, last_id, read

KEY = "the key of all routers"
CALL = '<tool_call> {"name": "get_weather", "arguments": {"city": "Oslo"}} </tool_call>'
MIXED_TEXT = f"I think.</think>  Let me look. {CALL} {CALL}"
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)
ASKED = st.one_of(
    st.builds(Asked, st.sampled_from(["chat", "completions"]), st.sampled_from([("abc",), ("abc def", "", "xyz")])),
    st.builds(Asked, st.sampled_from(["messages", "responses"]), st.sampled_from([("  abc def",), ("",)])),
    st.builds(
        Asked, st.sampled_from(["chat", "messages", "responses"]), st.just((MIXED_TEXT,)), is_mixed=st.just(True)
    ),
    st.just(Asked("completions", ("abc stop def", "no s top"), stops=("stop",))),
)


def told(events: Sequence[Event]) -> dict[str, str]:
    """Return all that a client makes of events: text by its place, and the kinds of events around it, in order."""
    texts: dict[str, str] = defaultdict(str)
    for event in events:
        if event.raw == "[DONE]":
            texts["shape"] += "[DONE]"
            continue
        data = event.data
        for choice in data.get("choices", ()):
            delta = choice.get("delta", choice)
            own = f"choice {choice['index']}"
            for name in ("text", "content", "reasoning"):
                texts[f"{own} {name}"] += delta.get(name) or ""
            texts[f"{own} role"] += delta.get("role") or ""
            for call in delta.get("tool_calls", ()):
                texts[f"{own} calls"] += f"{call.get('id', '')}{call['function'].get('name', '')}"
                texts[f"{own} arguments"] += call["function"]["arguments"]
            texts[f"{own} end"] += choice["finish_reason"] or ""
        if data.get("usage") and "choices" in data:
            texts["usage"] += str(data["usage"]["completion_tokens"])
        grown = data.get("delta")
        if event.name.endswith("delta") and event.name != "message_delta":
            text = grown if isinstance(grown, str) else "".join(v for k, v in grown.items() if k != "type")
            texts[f"block {data.get('index', data.get('output_index'))}"] += text
        elif event.name:
            data.pop("sequence_number", None)
            texts["shape"] += str(data)
    return {name: text for name, text in texts.items() if text}


@given(ASKED, SIZES, SIZES, SIZES, st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_stream_cut_behind_any_event_goes_on(
    asked: Asked, sizes: list[int], others: list[int], more: list[int], place: int, next_place: int
) -> None:
    """And may be cut again."""
    whole = read(asked, sizes, Signer(KEY)).events
    seen = whole[: 1 + place % len(whole)]
    rest = read(asked, others, Signer(KEY), last_id(seen)).events
    assert told([*seen, *rest]) == told(whole)
    assert all(event.id for event in [*seen, *rest])
    seen += rest[: next_place % (len(rest) + 1)]
    rest = read(asked, more, Signer(KEY), last_id(seen)).events
    assert told([*seen, *rest]) == told(whole)


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_an_answer_of_many_kinds_goes_on_after_each_event(api: str) -> None:
    """One run of tokens shows as several events, elsewhere as others."""
    asked = Asked(api, (MIXED_TEXT,), is_mixed=True)
    whole = read(asked, [60], Signer(KEY)).events
    for place in range(1, len(whole)):
        rest = read(asked, [7], Signer(KEY), last_id(whole[:place])).events
        assert told([*whole[:place], *rest]) == told(whole)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_numbered_events_keep_their_numbers(is_mixed: bool) -> None:
    asked = Asked("responses", (MIXED_TEXT if is_mixed else "  abc",), is_mixed=is_mixed)
    whole = read(asked, [3], Signer(KEY)).events
    for place in range(1, len(whole)):
        rest = read(asked, [5, 2], Signer(KEY), last_id(whole[:place])).events
        numbers = [event.data["sequence_number"] for event in [*whole[:place], *rest]]
        assert numbers == list(range(len(numbers)))


def test_answer_ids_call_ids_and_the_seed_are_the_same_elsewhere() -> None:
    asked = Asked("chat", (MIXED_TEXT,), is_mixed=True)
    first, _ = begin_stream("/v1/chat", asked.body(), asked.plan(), Signer(KEY), None)
    plan = replace(asked.plan(), jobs=(replace(asked.plan().jobs[0], seed=78),))  # drawn anew there
    whole = read(asked, [4], Signer(KEY)).events
    again, start = begin_stream("/v1/chat", asked.body(), plan, Signer(KEY), last_id(whole))
    assert start is not None and again.jobs[0].seed == first.jobs[0].seed == 77
    assert start.name in whole[0].data["id"] and again.show.form.request_id == start.name


def test_sampling_is_the_same_at_a_router_with_other_defaults() -> None:
    asked = Asked("chat", ("abc",))
    values = SamplingValues(0.6, 0.9, 20, 0.1, 1.05)
    plan = replace(asked.plan(), sampling=replace(asked.plan().sampling, **asdict(values)))
    _, begun = begin_stream("/v1/chat", asked.body(), plan, Signer(KEY), None)
    assert begun is not None
    seen = f"{begun.token}/1.0.0-{'0' * 16}"
    try:
        again, _ = begin_stream("/v1/chat", asked.body(), asked.plan(), Signer(KEY), seen)
    except ResumeMismatch:
        pytest.fail("the digest was made of this router's defaults")
    assert again.sampling == plan.sampling


def test_a_token_of_another_version_is_refused_as_such() -> None:
    facts = StreamFacts(0, 0, 0, bytes(16), bytes(8), NEUTRAL)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stream_token, "VERSION", 1)
        token = Signer(KEY).sign(facts)
    with pytest.raises(UnknownStream, match="of another version"):
        Signer(KEY).read(token)


def test_what_is_computed_again_is_counted() -> None:
    asked, registry = Asked("completions", ("abcdef",)), CollectorRegistry()
    seen = read(asked, [1], Signer(KEY)).events[:4]
    read(asked, [1], Signer(KEY), last_id(seen), RequestMetrics(registry))
    assert registry.get_sample_value("baton_continued_streams_total") == 1
    assert registry.get_sample_value("baton_recomputed_tokens_total") == 4


# ---- what can't go on


@pytest.mark.parametrize("text", ["abXdef", "ab", "abc"])
@pytest.mark.parametrize("api", ["completions", "messages", "responses"])
def test_other_tokens_than_the_client_saw_end_the_stream(api: str, text: str) -> None:
    asked = Asked(api, ("abcdef",))
    whole = read(asked, [1], Signer(KEY)).events
    place = next(i for i, event in enumerate(whole) if ".4-" in event.id)
    with pytest.raises(ResumeMismatch):
        read(replace(asked, texts=(text,)), [1], Signer(KEY), last_id(whole[: place + 1]))


@pytest.mark.parametrize("text", ["abcd", "ab", "abd"])
def test_an_end_that_the_client_saw_must_come_there_again(text: str) -> None:
    asked = Asked("completions", ("abc",))
    whole = read(asked, [1], Signer(KEY)).events
    with pytest.raises(ResumeMismatch):
        read(replace(asked, texts=(text,)), [1], Signer(KEY), last_id(whole))


@pytest.mark.parametrize(
    "other", [{"prompt": (1, 3)}, {"seed": 5}, {"texts": ("abc", "abc")}, {"api": "chat"}], ids=str
)
def test_another_request_is_refused(other: dict[str, object]) -> None:
    asked = Asked("completions", ("abc",))
    seen = read(asked, [1], Signer(KEY)).events[:2]
    with pytest.raises(ResumeMismatch):
        read(replace(asked, **other), [1], Signer(KEY), last_id(seen))  # type: ignore[arg-type]


def test_only_a_router_with_the_same_key_goes_on() -> None:
    asked = Asked("completions", ("abc",))
    for first, second in ((Signer(KEY), Signer("another")), (Signer(""), Signer(""))):
        seen = read(asked, [1], first).events[:2]
        with pytest.raises(UnknownStream, match="another key"):
            read(asked, [1], second, last_id(seen))
        assert read(asked, [1], first, last_id(seen)).events


@pytest.mark.parametrize("change", [0, 20, 40, 60, 80])
def test_a_forged_token_is_refused(change: int) -> None:
    asked = Asked("completions", ("abc",))
    seen = last_id(read(asked, [1], Signer(KEY)).events[:2])
    forged = seen[:change] + ("A" if seen[change] != "A" else "B") + seen[change + 1 :]
    with pytest.raises(BatonError) as refused:
        read(asked, [1], Signer(KEY), forged)
    assert isinstance(refused.value, UnknownStream), "the token's own content was believed"


@pytest.mark.parametrize(
    "header", ["", "7", "a/b", "a/1.0.1-00", "/1.0.0-0123456789abcdef", "a/1.0.1-0123456789abcdef,", "\x00" * 99_999]
)
def test_what_is_no_id_is_refused(header: str) -> None:
    with pytest.raises(UnknownStream):
        read_id(header)


def test_the_token_holds_neither_text_nor_ids() -> None:
    asked = Asked("completions", ("abc",))
    short, long = (
        read(replace(asked, prompt=prompt), [1], Signer(KEY)).events[0].id.partition("/")[0]
        for prompt in ((1,), tuple(range(90)))
    )
    assert len(short) == len(long) == 130


def test_a_stream_of_too_many_choices_has_no_ids() -> None:
    most, more = (Asked("completions", ("a",) * number) for number in (MAX_CHOICES, MAX_CHOICES + 1))
    whole = read(most, [1], Signer(KEY)).events
    assert all(event.id for event in whole) and read_id(last_id(whole))
    assert not any(event.id for event in read(more, [1], Signer(KEY)).events)
