"""Which request goes out when, in virtual time: an open loop never waits, a closed one always does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.tools.traffic.workloads.arrivals import parse_arrivals
from deploy.tools.traffic.workloads.driver import PAUSE_S, Driver, HangUps, Limits
from deploy.tools.traffic.workloads.workload import Session, Turn
from tests.support.web.virtual_load import Script, always, play, single_turns, talks


def open_loop(times, sessions=None, limits=None, hang_ups=None):
    return Driver(sessions or single_turns(), iter(times), 0, limits or Limits(), hang_ups)


@given(st.floats(0.001, 1e4), st.integers(0, 50))
def test_an_open_loop_never_waits_for_answers(ttft, seed):
    times = list(itertools.islice(parse_arrivals("poisson", 5.0, 60.0).offsets(seed), 60))
    records = play(open_loop(times), always(Script(ttft=ttft)))
    assert [record.due for record in records] == times == [record.sent for record in records]


def test_late_calls_take_all_that_is_due_and_keep_the_times():
    driver = open_loop([0.0, 1.0, 2.0, 9.0])
    assert [request.due for request in driver.take_requests(5.0)] == [0.0, 1.0, 2.0]
    assert driver.next_at() == 9.0 and driver.num_open == 3


@given(st.integers(1, 8), st.floats(0.1, 3.0))
def test_a_closed_loop_keeps_its_users_busy(users, ttft):
    driver = Driver(single_turns(), None, users, Limits(duration_s=6.0))
    records = play(driver, always(Script(ttft=ttft, itl=0.0)))
    for record in records:
        beside = sum(other.sent <= record.sent < other.end for other in records)
        assert beside == users
    assert len(records) >= users


FAN_OUT = Session((Turn("task", 2), Turn("a", 2, 1.0, ("b", "c")), Turn("result", 2)))


def test_what_is_asked_at_once_shares_its_history():
    seen = []

    def script(request):
        seen.append(request)
        return Script(ttft={"a": 1.0, "b": 9.0}.get(request.messages[-1][1], 2.0), itl=0.0)

    records = play(open_loop([0.0], iter([FAN_OUT])), script)
    assert [(record.turn, record.due) for record in records] == [(0, 0.0), (1, 3.0), (1, 3.0), (1, 3.0), (2, 12.0)]
    history = (("user", "task"), ("assistant", "answer 0"))
    assert [one.messages for one in seen[1:4]] == [(*history, ("user", text)) for text in "abc"]
    together = (("user", "a b c"), ("assistant", "answer 1 answer 2 answer 3"))
    assert seen[4].messages == (*history, *together, ("user", "result"))


def test_a_user_waits_for_all_answers_even_if_one_failed():
    driver = Driver(iter([FAN_OUT, *talks([1])]), None, 1, Limits())
    records = play(
        driver, lambda request: Script(ttft=1.0 + request.number, itl=0.0, error="503" * (request.number == 1))
    )
    assert [(record.session, record.turn) for record in records] == [(0, 0), (0, 1), (0, 1), (0, 1), (1, 0)]
    assert records[4].due == records[3].end + PAUSE_S == max(record.end for record in records[:4]) + PAUSE_S


def test_a_limit_of_requests_cuts_what_is_asked_at_once():
    for most in (2, 3):
        driver = Driver(itertools.repeat(FAN_OUT), None, 1, Limits(num_requests=most))
        assert len(play(driver, always(Script()))) == most and driver.is_done


@given(st.integers(0, 200), st.floats(0.5, 30.0))
def test_limits_hold(count, seconds):
    limits = Limits(seconds, count or None)
    driver = open_loop(itertools.count(0.0, 0.1), limits=limits)
    records = play(driver, always(Script()))
    assert all(record.due < seconds for record in records)
    assert len(records) <= (count or len(records))
    assert driver.is_done


def test_stopped_it_sends_nothing_more():
    driver = open_loop(itertools.count(0.0, 1.0), talks([3] * 9))
    driver.take_requests(3.0)
    driver.stop()
    assert driver.take_requests(99.0) == [] and driver.num_open == 4
    for number in range(4):
        driver.ended(number, "an answer that came all the same", 3.5, may_go_on=True)
    assert driver.take_requests(99.0) == [] and driver.is_done
    closed = Driver(single_turns(), None, 2, Limits())
    closed.take_requests(0.0)
    closed.stop()
    closed.ended(0, "", 1.0, may_go_on=True)
    assert closed.take_requests(99.0) == []


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_that_share_of_clients_hangs_up(share):
    times = [0.1 * i for i in range(400)]
    records = play(open_loop(times, single_turns(8), hang_ups=HangUps(share, 3)), always(Script()))
    left = [record for record in records if record.hung_up]
    assert len(left) / 400 == pytest.approx(share, abs=0.07)
    assert {len(record.at) for record in left} == (set(range(8)) if left else set())


def test_an_agent_brings_its_tools_results_and_what_others_said():
    turns = (Turn("task", 2), Turn("a", 2, 0.0, ("b", "c")), Turn("d", 2), Turn("e", 2))
    driver = Driver(iter([Session(turns, has_tools=True)]), None, 1, Limits())
    asked = []
    while not driver.is_done:
        due = driver.take_requests(0.0)
        asked += due
        for one in due:
            is_call = one.tool_choice == "required" and one.turn != 2
            driver.ended(one.number, f"{one.number}", 0.0, may_go_on=True, is_call=is_call)
    assert [(one.turn, one.tool_choice) for one in asked] == [
        (0, "required"), (1, "required"), (1, "auto"), (1, "auto"), (2, "required"), (3, "auto"),
    ]  # fmt: skip
    history = (("user", "task"), ("call", "0"))
    assert [one.messages for one in asked[1:4]] == [(*history, ("tool", text)) for text in "abc"]
    together = (*history, ("tool", "a"), ("call", "1"), ("tool", "2 3 d"))
    assert asked[4].messages == together
    assert asked[5].messages == (*together, ("assistant", "4"), ("user", "e")), "an answer without the call goes on too"
