"""The truth checks on records and pages made by hand: each can fail, and says why."""

from __future__ import annotations

import math
import types

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from deploy.metrics_page import parse_page, unrest
from deploy.tools.load.sweep import Sweep
from deploy.tools.traffic import golden
from deploy.tools.traffic.drills import find_process, has_node_id, is_node, parse_drill
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.figures.summary import Lag
from deploy.tools.traffic.golden import Golden, check_tokens, first_difference, parting
from deploy.tools.traffic.loop_lag import LoopLag
from deploy.tools.traffic.truth import (
    Drill,
    check_agreement,
    check_answers,
    check_client,
    check_drill,
    check_rest,
    check_stalls,
)
from shared.core import launcher
from shared.core.errors import ConfigError
from shared.observe.metrics import ClusterMetrics, NodeReport, RequestMetrics, render


def record(number=0, times=(1.0, 1.1, 1.2), *, ids=(), probe=None, error="", hung_up=False, sent=0.0):
    made = RequestRecord(number, number, 0, sent, 8, probe, sent=sent, status=200, error=error, hung_up=hung_up)
    for at in times:
        made.token(at, 0.0, 1)
    made.ids = list(ids)
    made.pieces = [chr(97 + one) for one in ids]
    made.end = times[-1] if times else sent
    return made


def gold(ids, margins=(), with_ids=True):
    return Golden((("user", "q"),), 8, "".join(chr(97 + i) for i in ids), tuple(ids) if with_ids else (), margins)


def test_answers():
    whole = [record(0), record(1, hung_up=True)]
    assert check_answers(whole).verdict == "ok" and "1 left by us" in check_answers(whole).text
    failed = check_answers([*whole, record(2, error="503 no nodes")])
    assert failed.verdict == "failed" and "503 no nodes" in failed.details[0]


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8), st.booleans())
def test_where_two_answers_part(wanted, got, is_whole):
    position = parting(wanted, got, is_whole)
    if position is None:
        assert got == wanted[: len(got)] and (not is_whole or got == wanted)
    else:
        assert got[:position] == wanted[:position]
        assert got[position : position + 1] != wanted[position : position + 1]


def test_tokens_are_compared_by_id_else_by_text():
    assert first_difference(gold([1, 2, 3]), record(ids=[1, 2, 3])) is None
    found = first_difference(gold([1, 2, 3], (9.0, 8.0, 7.0)), record(4, ids=[1, 5, 3]))
    assert (found.position, found.margin, found.unit) == (1, 8.0, "token")
    assert "[5, 3] instead of [2, 3]" in str(found)
    by_text = first_difference(gold([1, 2, 3], with_ids=False), record(ids=[1, 2, 4]))
    assert (by_text.position, by_text.margin, by_text.unit) == (2, None, "character")
    too_short = first_difference(gold([1, 2, 3]), record(ids=[1, 2]))
    assert too_short is not None and too_short.position == 2


def test_an_answer_that_was_left_is_judged_as_far_as_it_came():
    assert first_difference(gold([1, 2, 3]), record(ids=[1, 2], hung_up=True)) is None
    assert first_difference(gold([1, 2, 3]), record(ids=[1, 9], hung_up=True)).position == 1


@pytest.mark.parametrize(
    ("margin", "near", "verdict"), [(0.05, 0.1, "doubtful"), (0.2, 0.1, "failed"), (0.0, 0.0, "failed")]
)
def test_near_ties(margin, near, verdict):
    answers = [record(0, ids=[1, 2, 3], probe=0), record(1, ids=[1, 7, 3], probe=0), record(2, ids=[9])]
    check = check_tokens([gold([1, 2, 3], (5.0, margin, 5.0))], answers, near)
    assert check.verdict == verdict and "of 2" in check.text


def test_a_run_without_a_request_proves_nothing():
    assert check_answers([]).verdict == "doubtful"
    assert "nan" not in check_client(Lag()).text


def test_a_golden_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--golden-file.*No such file"):
        golden.save(tmp_path / "none" / "golden.json", "m", [])


def test_nothing_compared_is_no_proof():
    assert check_tokens([], [record()], 0.1).verdict == "skipped"
    assert check_tokens([gold([1])], [record()], 0.1).verdict == "doubtful"
    assert check_tokens([gold([1])], [record(probe=0, error="x")], 0.1).verdict == "doubtful"
    left_before_its_first = record(1, (), probe=0, hung_up=True)
    assert check_tokens([gold([1])], [left_before_its_first], 0.1).verdict == "doubtful"
    both = [left_before_its_first, record(2, (1.0,), ids=[1], probe=0)]
    assert "1 of 1 answers" in check_tokens([gold([1])], both, 0.1).text


def test_golden_files(tmp_path):
    path = tmp_path / "g.json"
    answers = [gold([1, 2], (0.5, math.pi)), gold([3], with_ids=False)]
    golden.save(path, "m", answers)
    assert golden.read(path, "m") == answers
    with pytest.raises(ConfigError, match="answers of m"):
        golden.read(path, "other")
    path.write_text("{}")
    with pytest.raises(ConfigError, match="--golden-file"):
        golden.read(path, "m")


ON_TIME = LoopLag(0.0)


def test_stalls():
    smooth = [record(0), record(1)]
    assert check_stalls(smooth, 0.5, ON_TIME).verdict == "ok"
    check = check_stalls([*smooth, record(2, (1.0, 3.0, 3.1, 4.2))], 1.0, ON_TIME)
    assert check.verdict == "failed" and "2 waits of 1 s and more, in 1 streams" in check.text
    assert check.details[0].startswith("request 2: 2.00 s before chunk 1")


@pytest.mark.parametrize("how", [{}, {"hung_up": True}, {"error": "no end within 600 s"}])
def test_a_stream_that_stands_still_to_its_end_is_a_stall(how):
    stuck = record(3, **how)
    stuck.end = stuck.at[-1] + 5.0
    check = check_stalls([record(0), record(1, ()), stuck], 1.0, ON_TIME)
    assert check.verdict == "failed" and check.details == ("request 3: 5.00 s after its last chunk, until 6.2 s",)


def pulse_of(*beats):
    loop_lag = LoopLag(0.01)
    for at in beats:
        loop_lag.beat(at)
    return loop_lag


def test_a_pause_of_our_loop_is_seen_by_all_that_fall_into_it():
    loop_lag = pulse_of(0.01, 0.02, 0.53, 0.54)
    assert [round(late, 3) for late in loop_lag.late] == [0.0, 0.0, 0.5, 0.0]
    samples = loop_lag.samples()
    assert len(samples) in (53, 54) and max(samples) == pytest.approx(0.5)
    assert sum(late > 0.24 for late in samples) == pytest.approx(26, abs=1)
    within, before, after, ends_in_it = ((0.0, 1.0), (0.0, 0.02), (0.53, 0.9), (0.0, 0.1))
    assert [round(loop_lag.worst_between(*one), 3) for one in (within, before, after, ends_in_it)] == [
        0.5,
        0.0,
        0.0,
        0.5,
    ]


def test_a_stall_that_may_be_our_own_pause_is_doubtful():
    stuck = record(0, (0.5, 2.0, 2.1))
    assert check_stalls([stuck], 1.0, pulse_of(0.01, 1.7)).verdict == "doubtful"
    assert check_stalls([stuck], 1.0, pulse_of(0.01, 0.3)).verdict == "failed"  # a pause of ours, but not then
    surely = record(1, (0.5, 9.0, 9.1))
    assert check_stalls([stuck, surely], 1.0, pulse_of(0.01, 1.7)).verdict == "failed"


class Server:
    """Metrics as the router's own code writes them."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.requests, self.nodes = RequestMetrics(self.registry), ClusterMetrics(self.registry)

    def page(self, pages=None, rows=None, total=10):
        pages, rows = pages or {"free": 7, "cached": 3}, rows or {"free": 4}
        self.nodes.update(NodeReport("decode-0", "decode", 1, total, pages, rows, 0, 0, counters={}, observations={}))
        return parse_page(render(self.registry).decode())

    def serve(self, ttft=1.0, itl=0.1, tokens=3):
        self.requests.started()
        self.requests.first_token(ttft)
        for _ in range(tokens - 1):
            self.requests.next_token(itl)
        self.requests.ended("length", ttft)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pages": {"free": 9, "held": 1}}, "1 pages held"),
        ({"pages": {"free": 8, "active": 2}}, "2 pages active"),
        ({"pages": {"free": 9}}, "1 of 10 pages in no state"),
        ({"rows": {"free": 3, "running": 1}}, "1 rows running"),
    ],
)
def test_every_kind_of_leak(changes, words):
    server = Server()
    before = server.page()
    assert check_rest([], before, server.page(), 5.0).verdict == "ok"
    check = check_rest([], before, server.page(**changes), 5.0)
    assert check.verdict == "failed" and words in check.details[0]
    assert unrest(server.page()) == []


def test_others_requests_say_nothing_about_leaks():
    server = Server()
    before = server.page()
    server.requests.started()
    others = server.page(pages={"free": 9, "active": 1})
    assert check_rest([], before, others, 5.0).verdict == "doubtful"
    assert check_rest([record(0, hung_up=True)], others, server.page(), 5.0).verdict == "doubtful"  # open before


def test_our_own_request_that_never_ends_there_is_a_leak():
    server = Server()
    before = server.page()
    server.serve()
    server.requests.started()
    ours = [record(0), record(1, (), hung_up=True)]
    check = check_rest(ours, before, server.page(), 5.0)
    assert check.verdict == "failed" and "1 of our finished requests" in check.text
    server.requests.started()
    assert check_rest(ours, before, server.page(), 5.0).verdict == "doubtful"


def test_no_page_and_no_node_are_no_memory_that_came_back():
    before, empty = Server().page(), parse_page(render(Server().registry).decode())
    assert "no longer answers" in check_rest([], before, None, 5.0).text
    assert [check_rest([], before, page, 5.0).verdict for page in (None, empty)] == ["failed", "failed"]


@pytest.mark.parametrize(
    ("ttft", "itl", "verdict"),
    [(1.0, 0.1, "ok"), (0.93, 0.1, "ok"), (0.8, 0.1, "failed"), (1.2, 0.1, "failed"), (1.0, 0.12, "failed")],
)
def test_agreement(ttft, itl, verdict):
    server = Server()
    server.serve(ttft=50.0)  # before the run: no part of it
    before = server.page()
    for _ in range(3):
        server.serve(ttft, itl)
    check = check_agreement([record(i) for i in range(3)], before, server.page(), Lag())
    assert check.verdict == verdict


def test_agreement_needs_the_server_for_itself():
    server = Server()
    before = server.page()
    server.serve()
    server.serve()
    assert check_agreement([record()], before, server.page(), Lag()).verdict == "skipped"


def test_a_client_that_was_late_does_not_accuse_the_server():
    server = Server()
    before = server.page()
    server.serve(ttft=0.5)
    late = Lag(send_p99=0.1)
    assert check_agreement([record(0)], before, server.page(), Lag()).verdict == "failed"
    assert check_agreement([record(0)], before, server.page(), late).verdict == "doubtful"


def test_requests_that_were_left_may_never_have_been_read():
    server = Server()
    before = server.page()
    server.serve()
    left = [record(1, hung_up=True), record(2, hung_up=True)]
    assert check_agreement([record(0), *left], before, server.page(), Lag()).verdict == "ok"


def test_the_client_as_bottleneck():
    assert check_client(Lag(0.001, 0.004, 0.1, 0.001, 0.003, 0.1)).verdict == "ok"
    assert check_client(Lag(0.001, 0.030, 0.1, 0.001, 0.003, 0.1)).verdict == "doubtful"
    assert check_client(Lag(0.001, 0.003, 0.1, 0.001, 0.050, 0.1)).verdict == "doubtful"
    assert check_client(Lag()).verdict == "ok"


def test_drills():
    drill = Drill("kill", "decode-0", 1.05, back_after_s=3.0)
    paused = record(0, (1.0, 1.9, 2.0))
    ended_before = record(1, (0.1, 0.2))
    check = check_drill(drill, [paused, ended_before])
    assert check.verdict == "ok" and "under 1 streams" in check.text and "pause 0.90 s" in check.text
    assert check_drill(drill, [paused, record(2, (1.0, 1.5), error="gone")]).verdict == "failed"
    assert check_drill(drill, [ended_before]).verdict == "doubtful"
    assert "not back" in check_drill(Drill("drain", "n", 1.0), [paused]).text


def test_drill_flags():
    assert parse_drill("kill:decode-1@20s").at_s == 20.0
    for wrong in ("kill", "kill:x", "shoot:x@3", "kill:x@y", "kill:@3", "kill:x@1.2.3"):
        with pytest.raises(ConfigError, match="--drill"):
            parse_drill(wrong)


class Uids:
    def __init__(self, real):
        self.real = real


def test_only_a_node_of_this_user_with_this_name_is_killed():
    argv = launcher.command("deploy.cli", "decode", "--parent-pid=1", "--node-id=decode-1")
    assert is_node({"cmdline": argv, "uids": Uids(7)}, "decode-1", 7)
    assert not is_node({"cmdline": argv, "uids": Uids(7)}, "decode-11", 7)
    assert not is_node({"cmdline": argv, "uids": Uids(7)}, "decode", 7)
    assert not is_node({"cmdline": argv, "uids": Uids(8)}, "decode-1", 7)
    assert not is_node({"cmdline": ["vi", "--node-id=decode-1"], "uids": Uids(7)}, "decode-1", 7)
    assert not is_node({"cmdline": None, "uids": None}, "decode-1", 7)
    assert has_node_id(["--node-id", "a"], "a") and not has_node_id(["--node-id", "a"], "b")
    with pytest.raises(ConfigError, match="of that name: none"):
        find_process("no-node-has-this-name", 1)


class Process:
    def __init__(self, pid, port):
        self.pid, self.port = pid, port
        self.info = {"cmdline": ["decode", "--node-id=decode-1"], "uids": psutil.Process().uids()}

    def net_connections(self, kind):
        return [types.SimpleNamespace(raddr=types.SimpleNamespace(port=self.port)), types.SimpleNamespace(raddr=())]


def test_of_two_clusters_the_routers_own_node_is_meant(monkeypatch):
    """Routers: process 1 listens on 8000 and 7001, process 2 on 9000 and 7002."""
    listening = [(1, 8000), (1, 7001), (2, 9000), (2, 7002), (None, 8000)]
    sockets = [
        types.SimpleNamespace(pid=pid, status=psutil.CONN_LISTEN, laddr=types.SimpleNamespace(port=port))
        for pid, port in listening
    ]
    monkeypatch.setattr(psutil, "net_connections", lambda kind: sockets)
    monkeypatch.setattr(psutil, "process_iter", lambda fields: iter([Process(11, 7001), Process(12, 7002)]))
    assert find_process("decode-1", 8000).pid == 11
    monkeypatch.setattr(psutil, "process_iter", lambda fields: iter([Process(11, 7001), Process(12, 7002)]))
    assert find_process("decode-1", 9000).pid == 12
    monkeypatch.setattr(psutil, "process_iter", lambda fields: iter([Process(12, 7002)]))
    with pytest.raises(ConfigError, match="of that name: 12, connected to it: 0"):
        find_process("decode-1", 8000)


@given(st.floats(0.5, 500.0), st.floats(0.1, 50.0))
def test_a_sweep_closes_in_on_the_capacity(capacity, first):
    sweep = Sweep(first, 0.9)
    runs = 0
    while (rate := sweep.next_rate()) is not None:
        sweep.went(rate, 1.0 if rate <= capacity else 0.1)
        runs += 1
    assert runs <= 12
    if runs < 12:
        assert sweep.best <= capacity <= 1.1 * sweep.best * 1.0001


def test_a_lucky_run_beyond_a_miss_does_not_count():
    sweep = Sweep(1.0, 0.9)
    for rate, share in ((1.0, 1.0), (2.0, 0.5), (4.0, 0.95)):
        sweep.went(rate, share)
    assert (sweep.best, sweep.least_missed) == (1.0, 2.0)
    sweep.went(0.5, math.nan)
    assert sweep.best is None
