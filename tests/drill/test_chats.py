"""Chats of several turns that go to both routers in turn, with the default policy: prompts find their prefixes, through
whichever router they come, and what happens to a host costs at most hits."""

from __future__ import annotations

from collections.abc import Sequence

from tests.drill.chats import TURNS
from tests.drill.cluster import ROUTERS
from tests.drill.load import Load
from tests.drill.scene import Scene, missing_everywhere, without

SHARE_OF_ONE_NODE = 0.9  # of its hits: the rest is for nodes too busy to be chosen
MORE_THAN_CHATS = len(ROUTERS) + 1  # rounds of one router's slots: each chat asks, and one asks again


def meet_streams(loads: Sequence[Load]) -> None:
    """Second turns, and streams on every node."""
    for load in loads:
        load.go_round(1)
    loads[-1].meet_streams()


def ask_no_more(loads: Sequence[Load]) -> None:
    """Else who comes back starts beside the load, which takes time and shows nothing more."""
    for load in loads:
        load.ask_no_more()


def test_chats_find_their_prefixes_by_both_routers(scene: Scene) -> None:
    chats = scene.new_chats()
    with scene.under_load(*ROUTERS, chats=chats) as loads:
        for load in loads:
            load.go_round(TURNS)
    scene.check_streams(loads)
    hits = chats.hits()
    assert hits.rate >= SHARE_OF_ONE_NODE * hits.one_node, hits


def test_chats_go_on_without_an_unplugged_prefill_node(scene: Scene) -> None:
    with scene.under_load(*ROUTERS, loses=without("p0"), chats=scene.new_chats()) as loads:
        meet_streams(loads)
        scene.unplug("p0", 3)
        for load in loads:
            load.go_round(1)
    scene.check_streams(loads)


def test_chats_go_on_without_a_killed_decode_node(scene: Scene) -> None:
    with scene.under_load(*ROUTERS, loses=missing_everywhere("d0"), chats=scene.new_chats()) as loads:
        meet_streams(loads)
        scene.cluster.kill("d0")
        for load in loads:
            load.go_round(1)
        ask_no_more(loads)
    scene.check_streams(loads)


def test_chats_go_on_without_a_killed_router(scene: Scene) -> None:
    """Turns whose streams it broke are asked again at the other router."""
    chats = scene.new_chats()
    with scene.under_load(*ROUTERS, chats=chats) as (broken, kept):
        meet_streams([kept, broken])
        scene.cluster.kill("router0")
        kept.go_round(MORE_THAN_CHATS)
        ask_no_more([kept])
        assert chats.gone == {"router0"}, "a chat has asked it, and heard nothing"
    scene.check_streams([kept])
    scene.check_broken_streams(broken)
