"""A choice does not depend on how its tokens were cut into messages; and its written shapes hold the same."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from router.api.answer.choice_text import ChoiceText, Delta
from router.api.answer.generation_plan import ShowOptions, UsageShown
from router.api.answer.shapes import token_text
from router.api.openai.chat import ChatShape
from router.api.openai.completions import CompletionShape
from router.text.chat.interface import VocabFacts
from router.text.hashlm import HashTokenizer
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import TokenLogprob


class Bytes:
    """Token = byte; 0 is the end."""

    facts = VocabFacts(256, (0,), frozenset({0}), 100)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,))


def options(stops: Sequence[str] = (), **changes: bool) -> ShowOptions:
    return ShowOptions(tuple(stops), True, UsageShown.NEVER, return_token_ids=True, num_logprobs=2, **changes)


def choice(
    stops: Sequence[str], *, min_tokens: int = 0, stop_ids: tuple[int, ...] = (0,), **changes: bool
) -> ChoiceText:
    show = options(stops, **changes)
    sampling = SamplingParams(100, min_tokens=min_tokens, stop_token_ids=stop_ids)
    return ChoiceText(Bytes(), sampling, show)


def run(ids: Sequence[int], cuts: Sequence[int], stops: Sequence[str], reason: str) -> tuple[Delta, int]:
    mine = choice(stops)
    total = Delta()
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for first, last in zip(edges, edges[1:], strict=False):
        logprobs = [TokenLogprob(float(i), (), ()) for i in range(first, last)]
        total.add(mine.feed(ids[first:last], logprobs))
        if mine.finish_reason is not None:
            break
    if mine.finish_reason is None:
        total.add(mine.finish(reason))
    return total, mine.num_tokens


TEXT = st.text(alphabet="ab🦜é", max_size=12)


@settings(max_examples=300)
@given(TEXT, st.lists(st.integers(0, 100), max_size=8), st.lists(TEXT.filter(bool), max_size=2), st.booleans())
def test_messages_may_be_cut_anywhere(text: str, cuts: list[int], stops: list[str], ends: bool) -> None:
    ids = [*text.encode(), *([0] if ends else [])]
    whole, count = run(ids, [], stops, "length")
    cut, cut_count = run(ids, cuts, stops, "length")
    assert (whole.text, whole.ids, whole.offsets, whole.finish_reason, count) == (
        cut.text, cut.ids, cut.offsets, cut.finish_reason, cut_count,
    )  # fmt: skip
    assert len(whole.ids) == len(whole.logprobs) == len(whole.offsets) == count
    expected = text
    for stop in stops:
        expected = expected.partition(stop)[0]
    assert whole.text == expected or len(stops) > 1
    assert whole.finish_reason == ("stop" if any(stop in text for stop in stops) else "length")


def test_a_character_that_is_cut_is_not_shown() -> None:
    total, _ = run("aé".encode()[:2], [], ["\ufffd"], "length")
    assert (total.text, total.finish_reason) == ("a", "length")


@given(TEXT, TEXT.filter(bool), st.lists(st.integers(0, 100), max_size=4))
def test_the_text_may_end_with_what_stopped_it(text: str, stop: str, cuts: list[int]) -> None:
    mine, shown, ids = choice([stop], keeps_stop=True), "", text.encode()
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for first, last in zip(edges, edges[1:], strict=False):
        if mine.finish_reason is None:
            shown += mine.feed(ids[first:last], []).text
    before, found, _ = text.partition(stop)
    assert mine.finish_reason == ("stop" if found else None)
    assert shown + ("" if found else mine.finish("length").text) == before + found


def test_a_stop_token_that_is_kept_is_text() -> None:
    assert choice([], stop_ids=(98,), keeps_stop=True).feed(list(b"ab"), []).text == "ab"
    assert choice([], stop_ids=(0,), keeps_stop=True).feed(list(b"a\0"), []).text == "a", "special, and so not shown"
    assert choice([], stop_ids=(0,), keeps_stop=True, shows_special=True).feed(list(b"a\0"), []).text == "a\0"


def test_no_stop_string_before_min_tokens() -> None:
    mine = choice(["a"], min_tokens=3)
    assert mine.feed(list(b"aaaa"), []).text == "aaa"
    assert mine.finish_reason == "stop" and mine.num_tokens == 4


def test_a_stop_token_is_counted_and_not_shown() -> None:
    mine = choice([], stop_ids=(0, 98))
    assert mine.feed(list(b"ab"), []).text == "a" and mine.num_tokens == 2


def test_tokens_that_are_half_a_character_are_written_as_bytes() -> None:
    assert token_text(Bytes(), 0xF0) == "bytes:\\xf0" and token_text(Bytes(), 97) == "a"


def test_both_shapes_show_the_same_logprobs() -> None:
    show = options()
    delta = Delta("ab", [65, 66], [TokenLogprob(-1.0, (65, 67), (-1.0, -2.0))] * 2, [0, 1])
    chat = ChatShape(HashTokenizer(), show).chunk(0, delta)
    completion = CompletionShape(HashTokenizer(), show).chunk(0, delta)
    assert chat.logprobs is not None and completion.logprobs is not None
    assert [entry.token for entry in chat.logprobs.content] == completion.logprobs.tokens == ["a", "b"]
    tops = [{top.token: top.logprob for top in entry.top_logprobs} for entry in chat.logprobs.content]
    assert tops == completion.logprobs.top_logprobs


def test_tokens_may_be_named_by_their_ids() -> None:
    show = options(names_tokens_by_id=True)
    delta = Delta("a", [65], [TokenLogprob(-1.0, (65, 67), (-1.0, -2.0))], [0])
    chat = ChatShape(HashTokenizer(), show).chunk(0, delta)
    completion = CompletionShape(HashTokenizer(), show).chunk(0, delta)
    assert chat.logprobs is not None and completion.logprobs is not None
    assert [top.token for top in chat.logprobs.content[0].top_logprobs] == ["token_id:65", "token_id:67"]
    assert completion.logprobs.tokens == [chat.logprobs.content[0].token] == ["token_id:65"]
    assert completion.logprobs.top_logprobs == [{"token_id:65": -1.0, "token_id:67": -2.0}]
