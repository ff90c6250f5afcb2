"""Log lines: one per record, plain values only, limited per kind."""

from __future__ import annotations

import ast
import enum
import io
import json
import logging
import warnings
from datetime import UTC, datetime

import numpy as np
import pytest

from shared.core.keys import RequestKey
from shared.observe.last_faults import MOST, LastFaults
from shared.observe.library_logs import capture_libraries
from shared.observe.log import HEAD, Logger
from shared.observe.log_once import LogOnce
from tests.support.house import surface


def noon() -> datetime:
    return datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)


def make(**options):
    stream = io.StringIO()
    return Logger("decode-0", stream, now=noon, **options), stream


def test_a_line_has_time_level_node_message_and_fields():
    log, stream = make()
    log.info("peer lost", node="prefill-0", silent_s=5.25, count=3, reason="no answer", empty="", none=None)
    assert stream.getvalue() == (
        "2026-01-31T12:00:00.123Z INFO    decode-0 peer lost node=prefill-0 silent_s=5.25 count=3 "
        'reason="no answer" empty="" none=None\n'
    )


def test_a_json_line_has_the_same_as_an_object():
    log, stream = make(form="json")
    log.warning("peer lost", node="prefill-0", silent_s=5.25, count=3, is_here=False, reason='no "answer"', none=None)
    assert stream.getvalue() == (
        '{"time":"2026-01-31T12:00:00.123Z","level":"warning","part":"decode-0","message":"peer lost",'
        '"node":"prefill-0","silent_s":5.25,"count":3,"is_here":false,"reason":"no \\"answer\\"","none":null}\n'
    )


def test_any_json_line_is_one_line_of_plain_json():
    log, stream = make(form="json")
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        log.error("bad\nthing", error=error, inf=float("inf"), nan=float("nan"), text="\u2028\ud800\x85", ids=[1, 2])
    (line,) = stream.getvalue().splitlines()
    assert line.isascii()
    found = json.loads(line, parse_constant=pytest.fail)
    assert found["message"] == "bad\nthing" and found["error"].endswith("ValueError: first\nsecond")
    assert (found["inf"], found["nan"], found["ids"]) == ("inf", "nan", "<list of 2>")


def test_json_lines_show_no_more_than_text():
    log, stream = make(form="json")
    log.info("m", text="x" * 1000, key=RequestKey("r", 255, "id7", 1, 0), state=State.RUNNING, raw=b"secret")
    found = json.loads(stream.getvalue())
    assert found["text"].endswith("... (1000 characters)") and len(found["text"]) < 330
    assert (found["key"], found["state"], found["raw"]) == ("r.ff/id7#1.0", "running", "<bytes of 6>")


def test_no_field_of_a_line_hides_the_line_s_head():
    named = {
        keyword.arg
        for node in surface.walk(surface.sources())
        if isinstance(node, ast.Call) and surface.last_name(node.func) in surface.LEVELS
        for keyword in node.keywords
    }
    assert named.isdisjoint(HEAD) and "node" in named


def test_a_record_is_one_line_whatever_it_carries():
    log, stream = make()
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        log.error("bad\nthing\r", text="a\nb", error=error)
    (line,) = stream.getvalue().splitlines()
    assert r"bad\nthing\r" in line and r'text="a\nb"' in line
    assert "Traceback" in line and r"ValueError: first\nsecond" in line


class State(enum.Enum):
    RUNNING = "running"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (list(range(7)), '"<list of 7>"'),
        (np.arange(5), '"<ndarray of 5>"'),
        ({"prompt": "secret"}, '"<dict of 1>"'),
        (b"secret", '"<bytes of 6>"'),
        (object(), "<object>"),
        (State.RUNNING, "running"),
        (True, "True"),
        (RequestKey("r", 255, "id7", 1, 0), "r.ff/id7#1.0"),
    ],
)
def test_only_plain_values_are_shown(value, text):
    log, stream = make()
    log.info("m", value=value)
    assert stream.getvalue().rstrip().endswith(f"value={text}")


def test_long_texts_are_cut():
    log, stream = make()
    log.info("m", text="x" * 1000)
    assert "(1000 characters)" in stream.getvalue() and len(stream.getvalue()) < 500


def test_a_closed_stream_is_no_reason_to_die():
    log, stream = make()
    stream.close()
    log.error("nobody reads this")


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    handlers = root.handlers[:]
    yield root
    root.handlers[:] = handlers
    logging.captureWarnings(False)
    logging.getLogger("shared").setLevel(logging.NOTSET)


def test_libraries_speak_through_our_lines(root_logger):
    log, stream = make()
    capture_libraries(log)
    logging.getLogger("uvicorn.error").warning("slow %s", "client")
    logging.getLogger("uvicorn.error").info("not shown")
    try:
        raise OSError("gone")
    except OSError:
        logging.getLogger("x").exception("failed")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old api", stacklevel=1)
    lines = stream.getvalue().splitlines()
    assert "WARNING decode-0 slow client logger=uvicorn.error" in lines[0]
    assert "ERROR   decode-0 failed logger=x" in lines[1] and "OSError: gone" in lines[1]
    assert "old api" in lines[2] and len(lines) == 3


def test_our_own_parts_without_a_log_are_heard(root_logger):
    """Models, kernels and engines load in tools too, which have no node's log."""
    log, stream = make()
    capture_libraries(log)
    logging.getLogger("shared.model.loading.load").info("a step runs %s", "kernel by kernel")
    logging.getLogger("shared.model.loading.load").debug("not shown")
    (line,) = stream.getvalue().splitlines()
    assert "INFO    decode-0 a step runs kernel by kernel logger=shared.model.loading.load" in line


def test_what_a_client_can_provoke_again_and_again_is_one_line(root_logger):
    log, stream = make()
    capture_libraries(log)
    for _ in range(100):
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    for number in range(3):
        logging.getLogger("uvicorn.error").error("failed %d", number)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for word in ("old", "older"):
            warnings.warn(word, stacklevel=1)
    assert len(stream.getvalue().splitlines()) == 1 + 3 + 2


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_kind_has_few_lines_and_the_rest_are_counted():
    log, stream = make()
    clock = Clock()
    once = LogOnce(log, lines=2, interval_s=60, clock=clock)
    assert [once.warning("bad frame", "bad frame", peer="p0") for _ in range(6)] == [True] * 2 + [False] * 4
    assert once.error("other", "other kind")
    clock.now = 61
    assert once.warning("bad frame", "bad frame", peer="p0")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[1].endswith("peer=p0") and lines[3].endswith("peer=p0 more_since=4")


def test_memory_of_kinds_is_bounded():
    log, stream = make()
    once = LogOnce(log, max_kinds=2, clock=Clock())
    for kind in ("a", "b", "c"):
        once.warning(kind, kind)
    assert once.warning("a", "a again")  # forgotten, so written
    assert not once.warning("c", "c again")
    assert len(stream.getvalue().splitlines()) == 4


def test_the_newest_faults_are_kept_for_the_status() -> None:
    faults = LastFaults(now=noon)
    log, stream = make(heed=faults.heed, level="error")
    log.info("nothing wrong")
    log.warning("node is lost", node="decode-0", ids=[1, 2], silent_s=5.25)
    log.error("a request failed", error=ValueError("a prompt"))
    time = "2026-01-31T12:00:00.123+00:00"
    lost = {"node": "decode-0", "ids": "<list of 2>", "silent_s": 5.25}
    assert faults.newest_first() == [
        {"time": time, "level": "error", "message": "a request failed", "fields": {"error": "ValueError"}},
        {"time": time, "level": "warning", "message": "node is lost", "fields": lost},
    ]
    assert "node is lost" not in stream.getvalue(), "also what the log's level leaves out"
    for number in range(MOST + 1):
        log.warning("again", number=number)
    numbers = [fault["fields"]["number"] for fault in faults.newest_first()]
    assert numbers == list(range(MOST, 0, -1))
