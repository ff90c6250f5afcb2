"""HTTP answers as bytes, cut anywhere: what the record says afterwards. No socket, no clock."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.tools.traffic.client import with_header
from deploy.tools.traffic.exchange import Exchange
from deploy.tools.traffic.figures.record import RequestRecord

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunk(text=None, ids=None, reason=None, **more):
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": reason}
    return json.dumps({"choices": [choice], **more}).encode()


def chunked(*events, done=True):
    """A whole answer with chunked encoding, one HTTP chunk per event."""
    data = [b"data: " + event + b"\n\n" for event in (*events, *([b"[DONE]"] if done else []))]
    frames = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in data)
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + frames + b"0\r\n\r\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
ANSWER = chunked(
    chunk("a", [1]),
    chunk("", [2]),
    chunk("bc", [3], "stop"),
    json.dumps({"choices": [], "usage": USAGE}).encode(),
)


def exchange(hang_up_after=None):
    return Exchange(RequestRecord(0, 0, 0, 0.0, 8, sent=0.0), hang_up_after)


def fed(data, cuts=(10**9,), **options):
    """The exchange after these bytes, cut in turn; piece i arrives at i + 1."""
    made, at, piece = exchange(**options), 0, 0
    while at < len(data):
        step = cuts[piece % len(cuts)]
        piece += 1
        made.feed(data[at : at + step], float(piece), 0.25)
        at += step
    return made


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_any_cut_gives_the_same_answer(cuts):
    made = fed(ANSWER, cuts)
    record = made.record
    assert made.is_over and made.may_reuse and record.error == ""
    assert (record.ids, record.text, record.finish_reason) == ([1, 2, 3], "abc", "stop")
    assert (record.num_tokens, record.prompt_tokens, record.cached_tokens) == (3, 7, 4)
    assert list(record.counts) == [1, 1, 1] and set(record.late) == {0.25}
    assert list(record.at) == sorted(record.at) and record.at[-1] <= record.end


@given(st.binary(max_size=200), st.integers(0, 200))
def test_no_bytes_break_it(garbage, position):
    """Whatever a server sends: at most the request fails."""
    data = ANSWER[:position] + garbage + ANSWER[position:]
    made = fed(data, (17,))
    made.end_of_stream(99.0)
    assert made.is_over and math.isfinite(made.record.end)


def test_the_end_is_when_the_done_came():
    made = exchange()
    first, last = ANSWER.split(b"data: [DONE]\n\n")
    made.feed(first + b"data: [DONE]\n\n", 3.0, 0.0)
    made.feed(last, 9.0, 0.0)
    assert made.record.end == 3.0 and made.is_over


def test_an_answer_without_a_length_ends_with_its_connection():
    body = b"data: " + chunk("a", reason="length") + b"\n\ndata: [DONE]\n\n"
    made = fed(HEAD + b"connection: close\r\n\r\n" + body)
    assert not made.is_over
    made.end_of_stream(5.0)
    assert made.is_over and made.record.error == "" and not made.may_reuse


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (chunked(chunk("a")), "without a finish reason"),
        (chunked(chunk("", [], "stop")), "without a token"),
        (HEAD + b"\r\ndata: " + chunk("", reason="stop") + b"\n\n", "without a token"),
        (chunked(chunk("ab", [1], "stop", usage=USAGE)), "1 token ids came, the usage says 3"),
        (chunked(b'{"error": {"message": "node lost"}}'), "node lost"),
        (chunked(b'{"error": "plain"}'), "plain"),
        (chunked(b"{"), "invalid chunk"),
        (b"SSH-2.0-x\r\n\r\n", "not HTTP"),
        (b'HTTP/1.1 429 X\r\ncontent-length: 31\r\n\r\n{"error":{"message":"too many"}}', "429"),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 6\r\n\r\n<html>", "502 <html>"),
    ],
)
def test_failures_in_the_servers_words(data, words):
    made = fed(data)
    made.end_of_stream(99.0)
    assert made.is_over and words in made.record.error and not made.may_reuse and not made.record.is_whole


def test_an_interim_answer_is_not_the_answer():
    assert fed(b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER).record.ids == [1, 2, 3]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_leaving_after_so_many_chunks(after):
    made = exchange(after)
    made.was_sent(0.5)
    assert made.is_over == (after == 0)
    made.feed(ANSWER, 1.0, 0.0)
    assert made.record.hung_up and len(made.record.at) == after and made.record.error == ""
    assert not made.may_reuse


def test_asked_once_more_it_begins_anew():
    made = exchange()
    made.end_of_stream(1.0)
    assert made.was_cut_off and made.record.error
    made.reopen()
    made.feed(ANSWER, 2.0, 0.0)
    assert made.record.is_whole and made.record.end == 2.0 and not made.was_cut_off


# ---- streams that go on


def with_ids(first, last, *, token=b"TOKEN", done=True):
    """Events `first` to `last` of a stream, as a router writes them on one connection."""
    events = [chunk("x", [number]) for number in range(first, last)]
    if done:
        events += [chunk("", [], "stop"), b"[DONE]"]
    marks = [b"%d.0.%d-0123456789abcdef" % (number, number) for number in range(first, first + len(events))]
    marks[:1] = [token + b"/" + one for one in marks[:1]]
    data = b"".join(b"id: %b\ndata: %b\n\n" % pair for pair in zip(marks, events, strict=True))
    return HEAD + b"content-length: %d\r\n\r\n" % len(data) + data


@given(st.integers(0, len(with_ids(0, 5)) - 1))
def test_a_stream_cut_anywhere_resumes_at_its_last_whole_event(length):
    made = fed(with_ids(0, 5)[:length], (7,))
    made.end_of_stream(99.0)
    if not made.record.error:
        return
    assert made.can_go_on
    header = made.resume()
    seen = len(made.record.ids)
    assert not made.is_over and header == (f"TOKEN/{seen - 1}.0.{seen - 1}-0123456789abcdef" if seen else "")
    made.feed(with_ids(seen, 5, token=b"AGAIN"), 100.0, 0.0)
    assert made.is_over and made.record.error == "" and made.record.ids == [0, 1, 2, 3, 4]
    assert made.record.num_resumed == 1 and made.may_reuse


def test_what_has_no_ids_or_is_refused_does_not_go_on():
    made = fed(ANSWER[:-40])
    made.end_of_stream(99.0)
    assert made.record.error == "" or not made.can_go_on
    cut = fed(chunked(chunk("a", [1]), done=False))
    assert cut.record.error and not cut.can_go_on, "tokens came, and no ids"
    refused = fed(HEAD.replace(b"200 OK", b"422 No") + b"content-length: 2\r\n\r\n{}")
    assert refused.record.error and not refused.can_go_on


@pytest.mark.parametrize(("kind", "goes_on"), [("server_error", True), ("invalid_request_error", False)])
def test_an_error_in_a_stream_resumes_it_unless_the_client_erred(kind, goes_on):
    error = b"data: " + json.dumps({"error": {"message": "m", "type": kind, "code": "c"}}).encode() + b"\n\n"
    data = with_ids(0, 2, done=False).split(b"\r\n\r\n")[1] + error
    made = fed(HEAD + b"content-length: %d\r\n\r\n" % len(data) + data)
    assert made.record.error == "m" and made.can_go_on == goes_on


def test_a_full_router_is_asked_again_once_the_stream_has_begun():
    full = HEAD.replace(b"200 OK", b"503 No") + b"content-length: 2\r\n\r\n{}"
    assert not fed(full).can_go_on, "a first refusal is the answer"
    made = fed(with_ids(0, 2, done=False)[:-9])
    made.end_of_stream(9.0)
    made.resume()
    made.feed(full, 10.0, 0.0)
    assert made.can_go_on


def test_the_header_stands_before_the_body():
    message = b"POST /x HTTP/1.1\r\nHost: h\r\n\r\n{}\r\n\r\n"
    assert with_header(message, b"Last-Event-ID", "") == message
    assert (
        with_header(message, b"Last-Event-ID", "T/1")
        == b"POST /x HTTP/1.1\r\nHost: h\r\nLast-Event-ID: T/1\r\n\r\n{}\r\n\r\n"
    )


def called(reason, *arguments, thought="hm"):
    deltas = [{"reasoning": thought}, {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "run"}}]}]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in arguments]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": reason})
    return fed(chunked(*(json.dumps({"choices": [choice]}).encode() for choice in choices))).record


def test_of_two_calls_the_first_goes_on():
    """Servers that don't know `parallel_tool_calls` make several, and refuse a history with joined arguments."""
    deltas = [{"index": call, "function": {"arguments": text}} for call, text in ((0, "{}"), (1, '{"a":'), (1, "1}"))]
    choices = [{"index": 0, "delta": {"tool_calls": [one]}} for one in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    record = fed(chunked(*(json.dumps({"choices": [choice]}).encode() for choice in choices))).record
    assert record.is_call and record.text == "{}" and list(record.counts) == [1, 1, 1]


def test_part_of_a_call_is_none():
    record = called("length", '{"command":')
    assert record.is_whole and not record.is_call and record.text == "hm"
