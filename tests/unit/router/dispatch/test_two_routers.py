"""Two routers share the nodes: a drain ends for both, and one name is one router's."""

from __future__ import annotations

import pytest

from router.dispatch.gateway import TICK_S
from router.requests.effects import Update
from shared.core.errors import NoNodes
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Drain
from tests.support.cores.core_rig import Job
from tests.support.worlds.two_routers import A, B, Router, Site, failures_of, ids_of, job

LIMIT_S = 5.0


def test_when_a_drain_s_time_is_over_each_router_moves_its_own() -> None:
    """The router that was not asked waited for the end of its streams, ten minutes and more; 30 s were promised."""
    site = Site()
    first, second = site.router(A, "a", 1), site.router(B, "b", 1)
    leaving = site.node("decode", "d0")
    site.run(1.0)
    mailboxes = [first.open(job(0)), second.open(job(1))]
    site.node("decode", "d1")
    site.run(1.0)
    drained = first.rig.registry.named("d0")
    assert drained is not None
    first.gateway.drain(drained, Drain("d0", "stop"), LIMIT_S)
    site.run(LIMIT_S - 1.0)
    assert len(leaving.ctx.core.requests) == 2, "the time is not over"
    site.run(3.0)
    assert leaving.idle and [first.num_resumed, second.num_resumed] == [1, 1]
    site.run(120.0)
    for number, mailbox in enumerate(mailboxes):
        assert not failures_of(mailbox) and ids_of(mailbox) == job(number).expected_of(number)


def test_a_drain_that_is_said_again_gives_no_more_time() -> None:
    """Its first word met a full queue."""
    site = Site()
    router = site.router(A, "a", 1)
    node = site.node("decode", "d0")
    site.run(1.0)
    known = router.rig.registry.named("d0")
    assert known is not None
    router.gateway.drain(known, Drain("d0", "stop"), LIMIT_S)
    site.inboxes["d0@1"].clear()
    assert known.leaving is not None
    move_at = known.leaving.until
    site.run(3.0)
    leaving = node.ctx.leaving
    assert leaving and leaving.move_at == pytest.approx(move_at, abs=2 * TICK_S)  # on its way for a tick
    assert known.leaving.until == pytest.approx(move_at, abs=2 * TICK_S)


def test_a_second_router_of_a_name_is_refused_not_the_first() -> None:
    """Each took the other for its own former life, and the nodes dropped the requests of both, without a line."""
    site = Site()
    first = site.router(A, "r", 1)
    for node_id in ("d0", "d1"):
        site.node("decode", node_id)
    site.run(1.0)
    mailbox = first.open(job(0))
    site.run(1.0)
    second = site.router(B, "r", 2)
    site.run(10.0)
    assert first.nodes() == ["d0", "d1"] and second.nodes() == []
    with pytest.raises(NoNodes):
        second.open(job(1))
    (line,) = second.log("--router-id")
    assert "another router" in line and "node=d0" in line
    assert not first.log("WARNING", "ERROR") and not second.log("is lost", "is gone")
    site.run(120.0)
    assert ids_of(mailbox) == job(0).expected_of(0) and first.num_resumed == 0


def test_what_a_refused_router_has_sent_already_costs_no_attempt() -> None:
    """The request was under way to a node that then said no; another one may be free."""
    site = Site()
    site.router(A, "r", 1)
    taken = site.node("decode", "d0")
    site.run(1.0)
    second = site.router(B, "r", 2)
    site.run(0.25)  # Hello is heard, and answered with Welcome
    assert second.nodes() == ["d0"]
    mailbox = second.open(job(1, max_tokens=20))
    site.run(1.0)
    assert second.nodes() == [] and taken.idle and not failures_of(mailbox)
    assert [(one.num_failed, one.num_excused) for one in second.rig.journal.all()] == [(0, 0)]
    site.lose(A)
    site.run(20.0)
    assert second.nodes() == ["d0"] and ids_of(mailbox) == job(1).expected_of(1)[:20]
    assert second.num_resumed == 1


@pytest.mark.parametrize("where", [A, B])
def test_a_router_that_is_started_again_takes_over(where: str) -> None:
    """At its own endpoint, or at another one when its former connection has closed."""
    site = Site()
    first = site.router(A, "r", 1)
    node = site.node("decode", "d0")
    site.run(1.0)
    first.open(job(0))
    site.run(1.0)
    site.lose(A)
    again = site.router(where, "r", 2)
    site.run(1.0)
    assert again.nodes() == ["d0"] and node.idle, "nobody waits for what its former life had asked"
    mailbox = again.open(job(1, max_tokens=20))
    site.run(20.0)
    assert ids_of(mailbox) == job(1).expected_of(1)[:20]


def test_a_refused_router_gets_the_nodes_once_the_first_is_gone() -> None:
    """A router was moved to another machine, and its former connection still seemed open."""
    site = Site()
    site.router(A, "r", 1)
    site.node("decode", "d0")
    site.run(1.0)
    second = site.router(B, "r", 2)
    site.run(5.0)
    assert second.nodes() == []
    site.lose(A)
    site.run(1.0)
    assert second.nodes() == ["d0"]


def said(site: Site, router: Router, prompt: tuple[int, ...]) -> tuple[str, list[int], int]:
    """(the node, the answer, cached tokens) of a prompt, when it has ended."""
    mailbox = router.open(Job(0, prompt, SamplingParams(max_tokens=40, temperature=0.0), 0))
    (node,) = [node.node_id for node in router.rig.registry if node.ours.open_sequences]
    site.run(20.0)
    (end,) = [news.end for news in mailbox._news if isinstance(news, Update) and news.end is not None]
    return node, ids_of(mailbox), end.cached_tokens


def test_a_chat_that_goes_on_at_another_router_finds_its_pages() -> None:
    site = Site("prefix_aware")
    routers = [site.router(A, "a", 1), site.router(B, "b", 1)]
    for number in range(4):
        site.node("decode", f"d{number}")
    site.run(1.0)
    places = set()
    for chat in range(4):
        history: tuple[int, ...] = (chat, *range(70))
        where, answer, cached = said(site, routers[chat % 2], history)
        places.add(where)
        for turn in range(1, 3):
            history += (*answer, turn, *range(10))
            again, answer, cached = said(site, routers[(chat + turn) % 2], history)
            assert again == where and cached >= len(history) - 40, "the other router knew what the node has"
    assert len(places) > 1
