"""What a node passes on of its routers' tenants: the newest of each, once, to the others, and no more than it may."""

from __future__ import annotations

import pytest

from router.fleet.leaving import By, Leaving
from router.queue.rate_limit import TOKENS
from router.queue.spending import carriers
from shared.node.routers.dialled import DialledRouter, RouterState
from shared.node.routers.lives import RouterLife, SessionKey
from shared.node.routers.spendings import MOST_ROUTERS, Spendings
from shared.wire.messages import Spending
from shared.wire.peers import Received
from tests.support.worlds.router_rig import RouterRig
from tests.support.worlds.spending_world import keys_text
from tests.support.worlds.two_routers import A, B, Router, Site

MINE, THEIRS = RouterLife("mine", 1), RouterLife("theirs", 1)
WORD = SessionKey(b"", 0.0, 0.0)
TEXT = keys_text(["a"], tokens=1000)
C = "tcp://127.0.0.1:7003"


def spending(life: RouterLife, number: int) -> Spending:
    return Spending(life.router_id, life.epoch, number, b"opaque")


def served(peer: str, life: RouterLife) -> DialledRouter:
    link = DialledRouter(peer)
    link.welcome(life, WORD)
    return link


def news(own: Spendings, *links: DialledRouter) -> list[tuple[str, int]]:
    return [(peer, message.number) for peer, message in own.news(links)]


def test_the_newest_goes_to_the_others_once() -> None:
    own, both = Spendings(), (served("m", MINE), served("t", THEIRS))
    for number in (1, 3, 2):
        own.take_spending(spending(MINE, number))
    assert news(own, *both) == [("t", 3)] and news(own, *both) == []
    own.take_spending(spending(MINE, 3))
    assert news(own, *both) == []
    own.take_spending(spending(THEIRS, 7))
    assert news(own, *both) == [("m", 7)]


def test_a_router_that_comes_later_hears_it_too() -> None:
    own, mine = Spendings(), served("m", MINE)
    own.take_spending(spending(MINE, 3))
    assert news(own, mine) == []
    theirs = served("t", THEIRS)
    assert news(own, mine, theirs) == [("t", 3)]
    theirs.end(RouterState.DIALLED)
    theirs.welcome(THEIRS, WORD)
    assert news(own, mine, theirs) == [("t", 3)], "its connection was gone, with what was on it"


def test_a_router_that_leaves_is_forgotten() -> None:
    own, mine, theirs = Spendings(), served("m", MINE), served("t", THEIRS)
    own.take_spending(spending(MINE, 3))
    assert news(own, theirs) == [] and news(own, mine, theirs) == [] and not own._latest
    own.take_spending(spending(MINE, 1))
    assert news(own, mine, theirs) == [("t", 1)]


def test_so_many_routers_are_kept() -> None:
    own, lives = Spendings(), {f"p{number}": RouterLife(f"r{number}", 1) for number in range(MOST_ROUTERS + 3)}
    links = [served(peer, life) for peer, life in lives.items()]
    for life in lives.values():
        own.take_spending(spending(life, 1))
    assert len(own._latest) == MOST_ROUTERS
    assert len(news(own, *links)) == MOST_ROUTERS * (len(lives) - 1)
    own.take_spending(spending(lives["p0"], 2))
    assert len(news(own, *links)) == len(lives) - 1, "who is kept is followed"


# ---- with gateways


def charge(router: Router, num_tokens: int, now: float) -> None:
    (tenant,) = router.tenants.all()
    router.limits.of(tenant).charge(num_tokens, now)


def left(router: Router, now: float) -> int:
    (tenant,) = router.tenants.all()
    return router.limits.of(tenant).meters[TOKENS].remaining(now)


@pytest.fixture
def site() -> Site:
    site = Site(keys_text=TEXT)
    site.router(A, "a", 1)
    site.router(B, "b", 1)
    site.node("decode", "d0", (A, B, C))
    site.run(1.0)
    return site


def test_routers_hear_of_each_other_by_a_node(site: Site) -> None:
    charge(site.routers[A], 900, site.now)
    charge(site.routers[B], 50, site.now)
    site.run(1.5)
    assert left(site.routers[A], site.now) == left(site.routers[B], site.now) == 75
    site.run(6.0)
    assert left(site.routers[A], site.now) == left(site.routers[B], site.now) == 175, "once, however often it is said"


def test_a_node_takes_a_router_s_word_for_itself_only(site: Site) -> None:
    node = site.nodes["d0@1"]
    site.routers[A].send("d0@1", Spending("b", 1, 9, b""))
    site.routers[A].send("d0@1", Spending("a", 2, 9, b""))
    site.run(1.0)
    assert not node._spendings._latest and node.ctx.metrics.counters()["wire_errors"] == 2


def test_three_nodes_carry_it_the_same_for_all_routers() -> None:
    rig = RouterRig()
    for name in ("d9", "d2", "p1", "d5", "d1", "d3"):
        rig.join("decode", name)
    gone, left = rig.registry.named("d1"), rig.registry.named("d3")
    assert gone is not None and left is not None
    gone.is_silent, left.leaving = True, Leaving(By.LIST)
    assert [node.node_id for node in carriers(rig.registry)] == ["d2", "d5", "d9"]


def test_what_our_routers_did_not_sign_is_logged_once(site: Site) -> None:
    for number in (1, 2, 3):
        site.routers[A].gateway.handle(Received("d0@1", Spending("c", 1, number, b"made up")))
    assert len(site.routers[A].log("not signed by our routers")) == 1
    assert left(site.routers[A], site.now) == 1000


def test_without_a_node_nothing_is_told_and_nothing_lost() -> None:
    site = Site(keys_text=TEXT)
    first, second = site.router(A, "a", 1), site.router(B, "b", 1)
    charge(first, 900, site.now)
    site.run(3.0)
    site.node("decode", "d0")
    site.run(2.0)
    assert left(second, site.now) < 900
