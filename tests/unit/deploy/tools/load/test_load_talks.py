"""The figures of sessions: by turn, of requests sent at once, and the share of prompt tokens that no cache had."""

from __future__ import annotations

import dataclasses
import io
import math

import msgspec
import pytest
from rich.console import Console

from deploy.tools.load.compare import lines_of
from deploy.tools.load.page import page_of
from deploy.tools.traffic.figures import table
from deploy.tools.traffic.figures.outcome import LoadReport, encode, read_report, row_of, series_of
from deploy.tools.traffic.figures.slo import Slo
from deploy.tools.traffic.figures.summary import Reader, Window, summarize
from deploy.tools.traffic.figures.talk_figures import AT_ONCE, NO_TALKS
from deploy.tools.traffic.workloads.driver import Driver, Limits
from deploy.tools.traffic.workloads.workload import Session, Turn
from tests.support.web.virtual_load import Script, play, talks

FAN_OUT = Session((Turn("task", 2), Turn("a", 2, 0.0, ("b", "c")), *(Turn(str(i), 2) for i in range(5))))
PROMPT, CACHED = 100, 75


def agents(cached=CACHED, error=lambda request: ""):
    """Two sessions of seven turns; TTFT in seconds is the number of the turn."""
    driver = Driver(iter([FAN_OUT, FAN_OUT]), None, 2, Limits())
    records = play(driver, lambda request: Script(ttft=1.0 + request.turn, itl=0.0, error=error(request)))
    for record in records:
        record.prompt_tokens = PROMPT
        record.cached_tokens = cached if record.turn else 0
    return records


def summary_of(records):
    return summarize(records, Window(0.0, 100.0), Slo(), Reader())


def report_of(records):
    series, rows = series_of(records, 1.0), [row_of(one) for one in records]
    return LoadReport("m", "2026", "http://x", "m", "baton load", summary_of(records), [], series, rows)


def shown(report):
    console = Console(file=io.StringIO(), width=200)
    table.show(report, console)
    return console.file.getvalue()


def test_turns_are_told_apart():
    figures = summary_of(agents()).talks
    assert (figures.num_sessions, figures.num_turns, figures.num_failed) == (2, 14, 0)
    assert [(row.turns, row.num_requests, row.ttft["p50"].value) for row in figures.by_turn] == [
        ("1", 2, 1.0), ("2", 6, 2.0), ("3-5", 6, 4.0), ("6+", 4, 6.0), (AT_ONCE, 6, 2.0),
    ]  # fmt: skip


def test_the_computed_share_is_what_no_cache_had():
    figures = summary_of(agents()).talks
    assert [row.computed.value for row in figures.by_turn] == [1.0, 0.25, 0.25, 0.25, 0.25]
    assert figures.computed.value == pytest.approx((2 * PROMPT + 16 * (PROMPT - CACHED)) / (18 * PROMPT))
    assert figures.computed.low <= figures.computed.value <= figures.computed.high


def test_a_server_that_hides_its_cache_gets_no_share():
    """Not all prompts: a request that failed has no usage either."""
    records = agents()
    records[3].cached_tokens = None
    assert summary_of(records).talks.computed.value == pytest.approx((200 + 15 * 25) / 1700)
    for record in records:
        record.cached_tokens = None
    silent = report_of(records)
    assert math.isnan(silent.summary.talks.computed.value) and "the server does not tell" in shown(silent)


def test_a_session_fails_with_one_of_its_requests():
    figures = summary_of(agents(error=lambda request: "503 no" * (request.number == 3))).talks
    assert (figures.num_sessions, figures.num_failed) == (2, 1)
    assert [row.num_failed for row in figures.by_turn] == [0, 1, 0, 0, 1]


def test_golden_prompts_are_no_sessions_of_the_load():
    records = agents()
    for record in records[:2]:
        record.probe = 0
    assert summary_of(records).talks.by_turn[0].turns == "2"


def test_figures_by_turn_are_shown_where_there_are_turns():
    report = report_of(agents())
    text, page = shown(report), page_of(report)
    assert "2 sessions, 14 turns" in text and "several at once" in text and "33.33" in text
    assert "<h2>Sessions</h2>" in page and "several at once" in page
    single = report_of(play(Driver(talks([1, 1]), iter([0.0, 1.0]), 0, Limits()), lambda request: Script()))
    assert "turns" not in shown(single) and "<h2>Sessions</h2>" not in page_of(single)


def test_figures_by_turn_are_read_as_they_were_written(tmp_path):
    first = report_of(agents())
    (tmp_path / "report.json").write_bytes(encode(first))
    assert encode(read_report(tmp_path)) == encode(first)
    old = msgspec.json.decode(encode(first))
    del old["summary"]["talks"]
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(old))
    assert read_report(tmp_path).summary == dataclasses.replace(read_report(tmp_path).summary, talks=NO_TALKS)


def test_a_comparison_shows_what_a_cache_gained():
    """Of a report with fewer turns, only common turns are compared."""
    full, empty = report_of(agents()), report_of(agents(cached=0))
    found = {one.name: one for one in lines_of(empty, full)}
    assert found["prompt tokens computed, %"].verdict == "better"
    assert found["TTFT p50 ms, turn 6+"].first.value == 6.0
    short = report_of([one for one in agents() if one.turn < 2])
    names = [one.name for one in lines_of(full, short)]
    assert [name for name in names if "turn" in name] == [f"TTFT p50 ms, turn {turns}" for turns in ("1", "2", AT_ONCE)]
