"""Events out of bytes, however the network cuts them."""

from __future__ import annotations

import json

import pytest

from deploy.tools.traffic.sse import MAX_EVENT_BYTES, Splitter, decode_chunk


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_data_of_many_lines_is_one_event_and_other_fields_none(line_end):
    data = b": hello\nevent: x\ndata: a\ndata:b\nid: 3\n\n\n\ndata: [DONE]\n\n".replace(b"\n", line_end)
    assert Splitter().feed_bytes(data) == [b"a\nb", b"[DONE]"]
    splitter = Splitter()
    assert sum((splitter.feed_bytes(bytes([byte])) for byte in data), []) == [b"a\nb", b"[DONE]"]


def test_an_event_without_end_is_refused():
    splitter = Splitter()
    with pytest.raises(ValueError, match="no end"):
        splitter.feed_bytes(b"x" * (MAX_EVENT_BYTES + 1))


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_thoughts_are_tokens(field):
    assert decode_chunk(json.dumps({"choices": [{"delta": {field: "x"}}]}).encode()).choices[0].piece == "x"
