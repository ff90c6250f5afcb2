"""What is asked of the server when the load is over: scripted /metrics, no load; and a real loop's loop_lag."""

from __future__ import annotations

import asyncio
import time
import types

import pytest

from deploy.tools.traffic import one_run as play
from deploy.tools.traffic.figures.summary import Lag
from deploy.tools.traffic.loop_lag import BEAT_S, watching_lag
from shared.core.errors import ConfigError

PAGE = """baton_kv_pool_pages{{node="d"}} 4
baton_kv_pages{{node="d",state="free"}} {free}
baton_kv_pages{{node="d",state="held"}} {held}
baton_open_requests {open}
"""
RESTED = (200, PAGE.format(free=4, held=0, open=0).encode())
HELD = (200, PAGE.format(free=3, held=1, open=0).encode())
GONE = ConfigError("no answer")


class Server:
    """Its answers one after another, the last one for ever."""

    def __init__(self, *answers):
        self.answers, self.num_asked = list(answers), 0

    def get(self, path):
        answer = self.answers[min(self.num_asked, len(self.answers) - 1)]
        self.num_asked += 1
        if isinstance(answer, ConfigError):
            raise answer
        return answer


def stage_of(*answers):
    builder = types.SimpleNamespace(target=types.SimpleNamespace(is_ours=True))
    return types.SimpleNamespace(server=Server(*answers), builder=builder, others=())


def own_checks(rest_s, *answers):
    stage = stage_of(RESTED, *answers)
    plan = types.SimpleNamespace(truth=types.SimpleNamespace(rest_s=rest_s))
    checks = play.own_checks(plan, stage, [], play.metrics_of(stage), Lag())
    return {check.name: check for check in checks}, stage.server.num_asked - 1


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(play, "POLL_S", 0.0)


def test_memory_may_take_its_time_and_must_stay():
    checks, num_asked = own_checks(60.0, HELD, RESTED, HELD, RESTED)
    assert checks["leaks"].verdict == "ok" and num_asked == 3 + play.RESTED_POLLS


@pytest.mark.parametrize("answer", [(503, b"no"), GONE], ids=["refused", "gone"])
def test_a_server_that_no_longer_answers_is_a_finding(answer):
    checks, _ = own_checks(0.0, answer)
    assert checks["leaks"].verdict == "failed" and "/metrics no longer answers" in checks["leaks"].text
    assert checks["agreement"].verdict == "skipped"


def test_a_router_without_metrics_is_not_called_another_server():
    stage = stage_of((503, b""))
    plan = types.SimpleNamespace(truth=types.SimpleNamespace(rest_s=0.0))
    checks = play.own_checks(plan, stage, [], play.metrics_of(stage), Lag())
    assert [(one.verdict, "before the load" in one.text) for one in checks] == [("doubtful", True)] * 2


def test_a_server_that_comes_back_while_it_is_asked_is_believed():
    checks, _ = own_checks(60.0, GONE, (503, b""), RESTED)
    assert checks["leaks"].verdict == "ok"


def test_a_loop_that_was_blocked_shows_in_its_pulse():
    async def blocked():
        loop = asyncio.get_running_loop()
        with watching_lag(loop.time) as loop_lag:
            while not loop_lag.at:
                await asyncio.sleep(BEAT_S)
            begin = loop.time()
            time.sleep(5 * BEAT_S)
            await asyncio.sleep(2 * BEAT_S)
            return loop_lag.worst_between(begin, loop.time())

    assert asyncio.run(blocked()) >= 3.9 * BEAT_S


def test_several_routers_add_requests_but_count_each_node_once():
    """All of them show the same nodes."""
    page = 'baton_requests_total{outcome="done"} %d\nbaton_kv_pool_pages{node="d",role="decode"} 9\n'
    stage = stage_of((200, (page % 3).encode()))
    stage.others = (Server((200, (page % 4).encode())), Server((200, (page % 5).encode())))
    found = play.metrics_of(stage)
    assert (found.total("baton_requests_total"), found.total("baton_kv_pool_pages")) == (12, 9)
    stage.others[1].answers = [(503, b"")]
    assert play.metrics_of(stage) is None
