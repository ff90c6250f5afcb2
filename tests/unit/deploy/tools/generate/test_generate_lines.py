"""A file of requests: what is a request, what is a bad line, which lines are the same, and how little is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.tools.generate import lines
from deploy.tools.generate.asker import LONGEST_RETRY_AFTER_S, Backoff, retry_after_s
from deploy.tools.generate.line_file import OutputLine, ResponsePart
from deploy.tools.generate.lines import BadLine, BatchRequest, parse_line, read_lines, survey
from deploy.tools.generate.tally import Tally, progress_text, summary_text
from shared.core.errors import ConfigError

CHAT = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}


def parsed(**fields: Any) -> BatchRequest | BadLine:
    return parse_line(7, json.dumps(CHAT | fields).encode())


def test_a_request_keeps_its_body_as_it_stands_in_the_file() -> None:
    body = b'{ "seed":12345678901234567890123, "x":1.0 }'
    found = parse_line(3, b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":' + body + b"}")
    assert isinstance(found, BatchRequest)
    assert (found.number, found.custom_id, found.url) == (3, "a", "/v1/completions")
    assert found.body == body


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"custom_id": None}, "has no custom_id"),
        ({"custom_id": ""}, "has no custom_id"),
        ({"custom_id": 5}, "has no custom_id"),
        ({"method": "GET"}, "method is 'GET'; it must be 'POST'"),
        ({"method": None}, "method is missing"),
        ({"url": "/v1/embeddings"}, "url is '/v1/embeddings'; it must be /v1/chat/completions or /v1/completions"),
        ({"url": ["x"]}, "url is ['x']"),
        ({"body": None}, "body is not a JSON object"),
        ({"body": [1]}, "body is not a JSON object"),
        ({"body": {"stream": True}}, "asks for a stream"),
    ],
)
def test_what_can_not_be_asked_is_said_with_its_line(fields: dict[str, Any], says: str) -> None:
    found = parsed(**fields)
    assert isinstance(found, BadLine) and says in found.message and "line 7" in found.message
    assert found.custom_id == ("a" if "custom_id" not in fields else None)


@pytest.mark.parametrize("text", [b"{", b"[]", b"nonsense", b"\xff\xfe", b"[" * 100_000, b'{"custom_id": "\\ud800"'])
def test_what_is_no_json_object_is_a_bad_line_and_nothing_worse(text: bytes) -> None:
    found = parse_line(7, text)
    assert isinstance(found, BadLine) and "line 7 is not a JSON object" in found.message


def test_a_line_without_a_body_says_so() -> None:
    found = parse_line(1, json.dumps({name: CHAT[name] for name in ("custom_id", "method", "url")}).encode())
    assert isinstance(found, BadLine) and found.message == "line 1: body is missing"


def test_a_stream_that_is_off_is_no_stream() -> None:
    assert isinstance(parsed(body={"stream": False}), BatchRequest)
    assert isinstance(parsed(body={"stream": None}), BatchRequest)


def test_a_changed_line_is_a_new_request_wherever_it_stands() -> None:
    same, elsewhere = parsed(), parse_line(99, json.dumps(CHAT).encode())
    others = [parsed(custom_id="b"), parsed(url="/v1/completions"), parsed(body={"messages": [], "n": 2})]
    assert same.id == elsewhere.id
    assert len({same.id, *(one.id for one in others)}) == 4


def write(path: Path, *texts: str) -> Path:
    path.write_text("\n".join(texts))
    return path


def test_a_file_is_read_with_a_byte_order_mark_and_empty_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "r", "\ufeff" + json.dumps(CHAT), "", "  ", json.dumps(CHAT | {"custom_id": "b"}) + "\r")
    assert [(one.number, one.custom_id) for one in read_lines(path)] == [(1, "a"), (4, "b")]


def test_a_line_without_end_is_a_bad_line_and_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 200)
    path = write(tmp_path / "r", "x" * 1000, json.dumps(CHAT))
    long, good = read_lines(path)
    assert isinstance(long, BadLine) and "longer than" in long.message
    assert isinstance(good, BatchRequest) and good.number == 2


def test_two_lines_of_one_name_are_refused_with_their_numbers(tmp_path: Path) -> None:
    other = json.dumps(CHAT | {"custom_id": "b"})
    path = write(tmp_path / "r", json.dumps(CHAT), other, "{", json.dumps(CHAT | {"url": "x"}), other)
    with pytest.raises(ConfigError, match="'a' in lines 1 and 4; 'b' in lines 2 and 5"):
        survey(path, {})


def test_waits_double_and_the_server_s_own_may_be_longer() -> None:
    backoff = Backoff(first_s=1.0, longest_s=8.0)
    assert [backoff.wait_s(attempt, 0.0, 1.0) for attempt in range(5)] == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert (backoff.wait_s(1, 0.0, 0.0), backoff.wait_s(10_000, 0.0, 1.0)) == (1.0, 8.0)
    assert backoff.wait_s(0, 20.0, 0.5) == 20.0
    assert backoff.wait_s(3, 2.0, 1.0) == 8.0
    assert backoff.wait_s(0, 1e9, 0.5) == LONGEST_RETRY_AFTER_S


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), (" 7 ", 7.0), ("Thu, 01 Jan 1970 00:01:00 GMT", 50.0), ("", 0.0), ("soon", 0.0), ("-3", 0.0)],
)
def test_retry_after_is_seconds_or_a_date(header: str, seconds: float) -> None:
    assert retry_after_s(header, now=10.0) == seconds


def answered(**usage: Any) -> OutputLine:
    return OutputLine("batch_req_x", "a", ResponsePart(200, "r", {"usage": usage}), None)


def test_progress_and_summary_add_up() -> None:
    tally = Tally(num_lines=1000, num_before=400)
    assert progress_text(tally, 0.0) == "400 of 1,000 lines (40%); 0 tokens/s; no answer yet"
    for _ in range(99):
        assert tally.take_line(
            answered(prompt_tokens=10, completion_tokens=20, prompt_tokens_details={"cached_tokens": 3})
        )
    assert not tally.take_line(OutputLine("batch_req_x", "a", ResponsePart(400, "", {}), None))
    assert progress_text(tally, 50.0) == "500 of 1,000 lines (50%), 1 failed; 40 tokens/s; 4:10 left"
    assert summary_text(tally, 50.0) == (
        "499 of 1,000 lines have an answer (400 by earlier runs); 990 prompt tokens (297 from a cache), "
        "1,980 completion tokens in 0:50, 40 tokens/s"
    )
    assert tally.num_left == 500


@pytest.mark.parametrize("body", [None, [], {"usage": None}, {"usage": {"prompt_tokens": "many"}}])
def test_an_answer_without_usage_counts_no_tokens(body: object) -> None:
    tally = Tally(1, 0)
    assert tally.take_line(OutputLine("batch_req_x", "a", ResponsePart(200, "r", body), None))
    assert (tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens) == (0, 0, 0)
