"""Events out of bytes, however the network cuts them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.tools.traffic.sse import MAX_EVENT_BYTES, Splitter, decode_chunk, error_text


@given(
    st.lists(st.text(max_size=20).map(lambda text: json.dumps({"choices": [{"text": text}]}).encode()), max_size=8),
    st.sampled_from([b"\n", b"\r\n"]),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_any_cut_gives_the_same_events(bodies, line_end, cuts):
    stream = b": hello" + line_end + b"".join(b"data: " + body + 2 * line_end for body in bodies)
    splitter, found, at, turn = Splitter(), [], 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        found += splitter.feed_bytes(stream[at : at + step])
        at, turn = at + step, turn + 1
    assert found == bodies


def test_data_of_many_lines_is_one_event_and_other_fields_none():
    assert Splitter().feed_bytes(b"event: x\ndata: a\ndata:b\nid: 3\n\n\n\ndata: [DONE]\n\n") == [b"a\nb", b"[DONE]"]


def test_an_event_without_end_is_refused():
    splitter = Splitter()
    with pytest.raises(ValueError, match="no end"):
        splitter.feed_bytes(b"x" * (MAX_EVENT_BYTES + 1))


def test_only_what_matters_is_read():
    chunk = decode_chunk(
        b'{"id":"c","object":"x","unknown":{"a":[1]},"choices":[{"index":0,"delta":{"role":"assistant","content":"hi"},'
        b'"logprobs":null,"finish_reason":"stop","token_ids":[5,6]}],"usage":{"prompt_tokens":3,"completion_tokens":2,'
        b'"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1}}}'
    )
    (choice,) = chunk.choices
    assert (choice.piece, choice.token_ids, choice.finish_reason) == ("hi", [5, 6], "stop")
    assert chunk.usage.prompt_tokens_details.cached_tokens == 1


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_thoughts_are_tokens(field):
    assert decode_chunk(json.dumps({"choices": [{"delta": {field: "x"}}]}).encode()).choices[0].piece == "x"


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"choices": 3}'])
def test_what_is_no_chunk_is_refused(data):
    with pytest.raises(ValueError, match="invalid chunk"):
        decode_chunk(data)


def test_errors_in_their_known_shapes():
    assert error_text({"message": "no"}) == "no" and error_text("no") == "no" and error_text({"a": 1}) == "{'a': 1}"
