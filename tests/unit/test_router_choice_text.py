"""A choice does not depend on how its tokens were cut into messages; and its written shapes hold the same."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from router.api.choice_text import ChoiceText, Delta
from router.api.generation_plan import ShowOptions
from router.api.shapes import ChatShape, CompletionShape, token_text
from router.text.hashlm import HashTokenizer
from router.text.interface import VocabFacts
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import TokenLogprob


class Bytes:
    """Token = byte; 0 is the end."""

    facts = VocabFacts(256, (0,), frozenset({0}), 100)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,))


def choice(stops: Sequence[str], *, min_tokens: int = 0, stop_ids: tuple[int, ...] = (0,)) -> ChoiceText:
    show = ShowOptions(tuple(stops), stream=True, include_usage=False, return_token_ids=True, num_logprobs=0)
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


def test_half_a_character_at_the_end_may_complete_no_stop() -> None:
    total, _ = run("é".encode()[:1], [], ["\ufffd"], "length")
    assert (total.text, total.finish_reason) == ("", "stop")


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
    show = ShowOptions((), stream=True, include_usage=False, return_token_ids=False, num_logprobs=2)
    delta = Delta("ab", [65, 66], [TokenLogprob(-1.0, (65, 67), (-1.0, -2.0))] * 2, [0, 1])
    chat = ChatShape(HashTokenizer(), show).chunk(0, delta)
    completion = CompletionShape(HashTokenizer(), show).chunk(0, delta)
    assert chat.logprobs is not None and completion.logprobs is not None
    assert [entry.token for entry in chat.logprobs.content] == completion.logprobs.tokens == ["a", "b"]
    tops = [{top.token: top.logprob for top in entry.top_logprobs} for entry in chat.logprobs.content]
    assert tops == completion.logprobs.top_logprobs
