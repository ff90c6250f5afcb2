"""A node's list of routers changes while it runs: new ones are dialled, others are left when they need it no more."""

from __future__ import annotations

import io

import pytest

from router.fleet.leaving import By, Leaving, leaving_also
from shared.core.errors import NoNodes
from shared.node.records.mail import HangUp
from shared.node.routers.dialled import RouterState
from shared.node.routers.unanswered import PATIENCE_S, TELL_AGAIN_S
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.wire.messages import Welcome
from shared.wire.peers import PeerUp, Received
from tests.support.worlds.two_routers import A, B, Router, Site, failures_of, ids_of, job


def state(router: Router, node_id: str) -> tuple[bool, bool]:
    """(known, left)"""
    node = router.rig.registry.named(node_id)
    leaving = None if node is None else node.leaving
    return node is not None, leaving is not None and By.LIST in leaving.by


def test_a_router_off_the_list_keeps_its_streams_to_their_end() -> None:
    site = Site()
    first, second = site.router(A, "a", 1), site.router(B, "b", 1)
    for node_id in ("d0", "d1"):
        site.node("decode", node_id)
    site.run(1.0)
    mailboxes = [second.open(job(number)) for number in range(2)]
    site.run(1.0)
    for node in site.nodes.values():
        site.list_routers(node, A)
    site.run(2.0)
    assert second.nodes() == [] and first.nodes() == ["d0", "d1"], "it gets nothing new"
    with pytest.raises(NoNodes):
        second.open(job(9))
    assert state(second, "d0") == state(second, "d1") == (True, True) and not site.hung_up
    site.run(120.0)
    for number, mailbox in enumerate(mailboxes):
        assert not failures_of(mailbox) and ids_of(mailbox) == job(number).expected_of(number)
    assert second.num_resumed == 0, "none of them was moved"
    assert sorted(site.hung_up) == [("d0@1", B), ("d1@1", B)]
    assert state(second, "d0") == (False, False) and not second.log("is lost")
    assert all(B not in node.ctx.routers.dialled for node in site.nodes.values())


def test_who_is_drained_and_unlisted_leaves_for_both_reasons() -> None:
    """Back on the list it still drains."""
    both = leaving_also(Leaving(By.LIST), By.US)
    assert both.by == By.LIST | By.US and both.is_draining


def test_a_node_stays_until_the_other_half_of_a_hand_off_comes() -> None:
    """The decode node knew nothing of the request yet, said goodbye, and its pages found nobody."""
    site = Site()
    second = site.router(B, "b", 1)
    prefill, decode = site.node("prefill", "p0"), site.node("decode", "d0")
    site.run(1.0)
    second.open(job(0))
    assert not decode.ctx.core.requests
    for node in (prefill, decode):
        site.list_routers(node, A)
    site.run(3.0)
    assert state(second, "d0") == state(second, "p0") == (True, True) and not site.hung_up


NO_ANSWER, SERVED = "no router answers at this address", "a router serves this node"


class Logged:
    """A site with a node whose log is read."""

    def __init__(self, *listed: str) -> None:
        self.site, self._lines = Site(), io.StringIO()
        self.node = self.site.node("decode", "d0", listed)
        self.node.ctx.log = LogOnce(Logger("d0", self._lines), clock=lambda: self.site.now)

    def lines(self, word: str) -> list[str]:
        return [line for line in self._lines.getvalue().splitlines() if word in line]


def test_the_log_names_a_router_that_does_not_answer() -> None:
    """A node with a wrong --router said that it was ready, and nothing more."""
    logged = Logged(A, B)
    logged.site.router(A, "a", 1)
    logged.site.run(PATIENCE_S - 0.5)
    assert not logged.lines(NO_ANSWER)
    logged.site.run(30.0)
    told = logged.lines(NO_ANSWER)
    assert len(told) == 1 and f"router={B} for_s=5 is_connected=False num_others=0" in told[0]
    logged.site.run(TELL_AGAIN_S)
    assert len(logged.lines(NO_ANSWER)) == 2
    logged.site.router(B, "b", 1)
    logged.site.run(2 * TELL_AGAIN_S)
    assert len(logged.lines(NO_ANSWER)) == 2


def test_a_lost_router_gets_its_time_anew() -> None:
    logged = Logged(A)
    logged.site.run(PATIENCE_S + 1.0)
    logged.site.router(A, "a", 1)
    logged.site.run(2 * TELL_AGAIN_S)
    logged.site.lose(A)
    logged.site.run(PATIENCE_S - 0.5)
    assert len(logged.lines(NO_ANSWER)) == 1
    logged.site.run(2.0)
    assert len(logged.lines(NO_ANSWER)) == 2


def test_the_log_s_last_word_is_that_a_router_serves_the_node() -> None:
    """If the log has said that a router doesn't answer, the log says later that it answers."""
    logged = Logged(A)
    logged.site.router(A, "a", 1)
    for number in range(2):
        logged.site.run(10.0)
        assert len(logged.lines(SERVED)) == 1 + number
        logged.site.lose(A)
        logged.site.run(1.0 if number else PATIENCE_S + 2.0)
        assert len(logged.lines(NO_ANSWER)) == 1
        logged.site.router(A, "a", 2 + number)
    logged.site.run(10.0)
    assert len(logged.lines(SERVED)) == 2, "nobody read that it was away"


def test_a_router_that_has_just_connected_gets_time_to_answer() -> None:
    logged = Logged(A)
    logged.site.run(PATIENCE_S - 0.5)
    logged.site.inboxes["d0@1"].append(PeerUp(A))
    logged.site.run(PATIENCE_S - 1.0)
    assert not logged.lines(NO_ANSWER)
    logged.site.run(2.0)
    assert len(logged.lines(NO_ANSWER)) == 1 and "is_connected=True" in logged.lines(NO_ANSWER)[0]


def test_many_routers_that_do_not_answer_get_one_line() -> None:
    logged = Logged(*(f"tcp://127.0.0.1:{port}" for port in range(7000, 7040)))
    logged.site.run(PATIENCE_S + 20.0)
    assert len(logged.lines(NO_ANSWER)) == 1 and "router=tcp://127.0.0.1:7000" in logged.lines(NO_ANSWER)[0]
    assert "num_others=39" in logged.lines(NO_ANSWER)[0]


def test_a_refused_router_is_not_said_to_be_away() -> None:
    logged = Logged(A, B)
    logged.site.router(A, "a", 1), logged.site.router(B, "a", 2)
    logged.site.run(PATIENCE_S + 10.0)
    assert logged.lines("second router of the same name") and not logged.lines(NO_ANSWER)
    logged.site.lose(B)
    logged.site.run(PATIENCE_S - 0.5)
    assert not logged.lines(NO_ANSWER), "PATIENCE_S begins when the refusal ends"


def test_a_router_that_comes_back_while_it_is_left_goes_on() -> None:
    site = Site()
    second = site.router(B, "b", 1)
    node = site.node("decode", "d0")
    site.run(1.0)
    mailbox = second.open(job(0))
    site.run(1.0)
    site.list_routers(node, A)
    site.run(1.0)
    assert second.nodes() == []
    site.list_routers(node, A, B)
    site.run(1.0)
    assert second.nodes() == ["d0"] and not site.hung_up
    site.run(60.0)
    assert ids_of(mailbox) == job(0).expected_of(0)


def test_a_router_that_comes_back_after_goodbye_is_dialled_anew() -> None:
    site = Site()
    second = site.router(B, "b", 1)
    node = site.node("decode", "d0")
    site.run(1.0)
    site.list_routers(node, A)
    while node.ctx.routers.dialled[B].state is RouterState.LEAVING:
        site.run(0.25)
    site.list_routers(node, A, B)
    site.run(2.0)
    assert second.nodes() == ["d0"]
    mailbox = second.open(job(1, max_tokens=20))
    site.run(20.0)
    assert ids_of(mailbox) == job(1).expected_of(1)[:20]


def test_a_router_that_ends_while_being_left_is_not_redialled() -> None:
    site = Site()
    second = site.router(B, "b", 1)
    node = site.node("decode", "d0")
    site.run(1.0)
    second.open(job(0))
    site.run(1.0)
    site.list_routers(node, A)
    site.lose(B)
    site.run(2.0)
    assert node.idle and list(node.ctx.routers.dialled) == [A]


def test_a_left_router_that_takes_another_s_name_is_hung_up() -> None:
    """It is neither served nor listed, so no later change of the list may count it."""
    site = Site()
    first, second = site.router(A, "a", 1), site.router(B, "b", 1)
    node = site.node("decode", "d0")
    site.run(1.0)
    second.open(job(0))
    site.run(1.0)
    site.list_routers(node, A)
    site.inboxes["d0@1"].append(Received(B, Welcome("a", 2, connection=1)))
    site.run(0.25)
    assert node.ctx.routers.dialled[B].state is RouterState.PARTING and node.idle
    site.run(2.0)
    assert list(node.ctx.routers.dialled) == [A] and first.nodes() == ["d0"]
    assert node.ctx.metrics.counters()["router_list_changes"] == 1


def test_a_router_that_is_hung_up_hears_no_more_hello() -> None:
    site = Site()
    node = site.node("decode", "d0")
    site.run(1.0)
    site.list_routers(node, A)
    assert node.tick([PeerUp(B)], site.now) == [HangUp(B)] and B not in node.ctx.routers.dialled


def test_connections_of_a_router_that_returns_are_counted_on() -> None:
    """To the router, the Hello of a connection that it knows already comes late."""
    site = Site()
    second = site.router(B, "b", 1)
    node = site.node("decode", "d0")
    site.run(1.0)
    site.list_routers(node, A)
    site.run(2.0)
    assert B not in node.ctx.routers.dialled
    site.list_routers(node, A, B)
    site.run(1.0)
    assert node.ctx.routers.dialled[B].num_connections == 2 and second.nodes() == ["d0"]


def test_an_empty_list_changes_nothing() -> None:
    site = Site()
    first = site.router(A, "a", 1)
    node = site.node("decode", "d0")
    site.run(1.0)
    site.list_routers(node)
    site.run(1.0)
    assert first.nodes() == ["d0"] and not site.hung_up


def test_routers_hear_which_ones_a_node_misses() -> None:
    """Of many, as many as fit into a heartbeat."""
    site = Site()
    first = site.router(A, "a", 1)
    node = site.node("decode", "d0")
    site.run(1.0)
    known = first.rig.registry.named("d0")
    assert known is not None and known.report.lacks == (B,)
    site.router(B, "b", 1)
    site.run(1.0)
    assert known.report.lacks == ()
    site.list_routers(node, A, *(f"ipc:///{number}/{'x' * 300}" for number in range(400)))
    site.run(1.0)
    assert len(known.report.lacks) == 256
