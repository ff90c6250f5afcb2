"""The position rule: whatever order, overlap and repetition runs come in, the emitted tokens are the one stream."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.requests.journal import SequenceJournal
from shared.wire.messages import Key, SequenceEnd, TokenLogprob


def end(count: int) -> SequenceEnd:
    return SequenceEnd(Key("r", 1, "x", 0, 0), "length", count, 0, "", "")


def test_tokens_beyond_the_request_are_not_taken() -> None:
    journal = SequenceJournal(max_tokens=2)
    assert list(journal.take_tokens(0, [1, 2, 3], []).ids) == [1, 2]
    assert journal.take_tokens(1, [2, 3], []).ids == []
    assert journal.take_tokens(1000, [3], []).ids == [] and journal.ids == [1, 2]


@settings(max_examples=300)
@given(st.data())
def test_any_order_of_runs_gives_the_stream(data: st.DataObject) -> None:
    stream = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=20))
    wants_logprobs = data.draw(st.booleans())
    spans = st.tuples(st.integers(0, len(stream)), st.integers(0, len(stream)))
    cuts = [(min(s), max(s)) for s in data.draw(st.lists(spans, max_size=15))]
    journal = SequenceJournal(max_tokens=len(stream))
    got: list[int] = []
    got_logprobs: list[float] = []
    for first, last in [*cuts, (0, len(stream))]:
        logprobs = [TokenLogprob(float(i), (), ()) for i in range(first, last)] if wants_logprobs else []
        taken = journal.take_tokens(first, stream[first:last], logprobs)
        assert not taken.conflict
        got += taken.ids
        got_logprobs += [entry.logprob for entry in taken.logprobs]
        assert got == stream[: len(got)] == journal.ids
    assert got == stream
    assert got_logprobs == ([float(i) for i in range(len(stream))] if wants_logprobs else [])
