"""Requests that wait for the memory of a full decode node go where there is room, at no cost, and not to and fro."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from router.dispatch.moves import MAX_MOVES, MOVE_AFTER_S
from router.fleet.leaving import By, Leaving
from router.fleet.node_room import sequences_in
from router.fleet.registry import RegisteredNode
from router.policy.interface import Wanted
from router.policy.least_load import LeastLoad
from shared.wire.messages import Generate, Heartbeat, Key
from tests.support.worlds.router_rig import FINGERPRINT, RouterRig, aborts, generates, load

PAGE = 16  # tokens


def pages(node: RegisteredNode, free: int, *, cached: int = 0, waiting: int = 0, running: int = 0) -> None:
    """What the node reports next."""
    used = 100 - free - cached
    states = {"free": free, "cached": cached, "active": used}
    report = load(running=running)
    node.reported(
        msgspec.structs.replace(report, pages_total=100, pages=states, waiting=waiting, waiting_tokens=waiting)
    )


# ---- who is picked


def test_a_node_without_free_pages_is_not_preferred(rig: RouterRig) -> None:
    full, busy = rig.join("decode", "a"), rig.join("decode", "b")
    pages(full, 0, running=1)
    pages(busy, 99, running=7)
    assert LeastLoad().pick([full, busy], Wanted(20)).node is busy


def test_cached_pages_are_room(rig: RouterRig) -> None:
    cached, busy = rig.join("decode", "a"), rig.join("decode", "b")
    pages(cached, 0, cached=50, running=1)
    pages(busy, 99, running=7)
    assert LeastLoad().pick([cached, busy], Wanted(20)).node is cached


def test_pages_that_a_node_keeps_are_no_room(rig: RouterRig) -> None:
    """The node would not admit the request: it keeps pages for the growth of answers under way."""
    small, busy = rig.join("decode", "a"), rig.join("decode", "b")
    pages(small, 4, running=2)
    assert small.report.load is not None
    small.reported(msgspec.structs.replace(small.report.load, kept_pages=2))
    pages(busy, 99, running=7)
    assert LeastLoad().pick([small, busy], Wanted(2 * PAGE)).node is small
    assert LeastLoad().pick([small, busy], Wanted(2 * PAGE + 1)).node is busy


def test_beside_an_older_node_kept_pages_do_not_count(rig: RouterRig) -> None:
    """Protocol 14 does not report them. Else all requests would go to the older nodes, until these retract some."""
    before = msgspec.structs.replace(FINGERPRINT, protocol=14)
    new, old = rig.join("decode", "a"), rig.join("decode", "b", fingerprint=before)
    prefill = rig.join("prefill", "p", fingerprint=before)

    def rooms() -> list[float]:
        """In pages, of nodes with 20 free pages. Steps of the three running rows take two pages each."""
        report = msgspec.structs.replace(load(running=3, held=2), pages={"free": 20}, spec_width=PAGE + 1)
        for node, kept in ((new, 15), (old, 0)):
            told = msgspec.structs.replace(report, kept_pages=kept)
            rig.registry.heartbeat(Heartbeat(node.node_id, 1, told, False), rig.now)
        return [node.figures.room.free_tokens / PAGE for node in (new, old)]

    assert rooms() == [14, 14]
    rig.registry.remove(old)
    assert rooms()[0] == 5 and prefill.is_there, "only nodes of one role are compared"


# ---- who moves


@pytest.fixture
def rig() -> RouterRig:
    return RouterRig(max_attempts=2)


class Waiting:
    """Requests that were prefilled, and wait for the memory of decode node `a`; `b` has room."""

    def __init__(self, rig: RouterRig, count: int = 1, prompt: int = 32) -> None:
        self.rig = rig
        self.p, self.a = rig.join("prefill", "p"), rig.join("decode", "a")
        self.keys = [generate.key for generate in rig.open([1] * prompt, rounds=count)]
        self.b = rig.join("decode", "b")
        for key in self.keys:
            rig.run(self.p, key, 0, [5])
        self.report()

    def report(self, room: int = 99) -> None:
        pages(self.a, 0, waiting=3, running=7)
        pages(self.b, room)

    def tick(self, seconds: float) -> list[Generate]:
        """As time passes and nodes report, twice a second."""
        sent: list[Generate] = []
        for _ in range(round(seconds * 4)):
            self.rig.now += 0.25
            effects = self.rig.dispatcher.tick(self.rig.now)
            sent += generates(effects)
            assert effects.num_resumed == 0
        return sent

    @property
    def key(self) -> Key:
        return self.keys[0]


def test_who_waits_for_memory_goes_where_there_is_room(rig: RouterRig) -> None:
    story = Waiting(rig)
    assert not story.tick(MOVE_AFTER_S)
    rig.now += 0.25
    effects = rig.dispatcher.tick(rig.now)
    (moved,) = generates(effects)
    assert (moved.decode_node, moved.output_ids, moved.key.attempt) == ("b", [[5]], 1)
    assert effects.sends[-1][0] == "p@1", "the prefill node stays: its cache has the prompt"
    assert aborts(effects) == [("p@1", 0, True), ("a@1", 0, True)] and effects.num_moved == 1
    request = rig.journal.find(story.key.rid)
    assert request is not None and (request.num_failed, request.num_excused, request.num_moves) == (0, 0, 1)
    assert all(node.breaker._faults == 0 for node in rig.registry) and story.a.ours.open_sequences == 0
    rig.run(story.b, moved.key, 1, [6])
    rig.end(story.b, moved.key, 2)
    rig.check_quiet()


def test_where_several_have_room_the_roomiest_is_taken(rig: RouterRig) -> None:
    story = Waiting(rig)
    for name, room in (("c", 200), ("d", 150)):
        pages(rig.join("decode", name), room)
    (moved,) = story.tick(MOVE_AFTER_S + 0.25)
    assert moved.decode_node == "c"


def leave(story: Waiting) -> None:
    story.b.leaving = Leaving(By.NODE)


STAYS: dict[str, Callable[[Waiting], object]] = {
    "its node has begun": lambda story: story.rig.run(story.a, story.key, 0, [5]),
    "its node has room, and is only slow": lambda story: pages(story.a, 3, waiting=1),
    "nobody waits at its node": lambda story: pages(story.a, 0),
    "the other has room for its 3 pages, not for twice as many": lambda story: story.report(room=4),
    "others wait at the other": lambda story: pages(story.b, 99, waiting=1),
    "the other leaves": leave,
}


@pytest.mark.parametrize("why", STAYS)
def test_who_stays(rig: RouterRig, why: str) -> None:
    story = Waiting(rig)
    STAYS[why](story)
    assert not story.tick(10)


def test_a_large_node_may_have_a_quarter_of_its_rows_ahead() -> None:
    large = msgspec.structs.replace(load(running=800), rows_total=800)
    assert sequences_in(large, 800) == 1000 and sequences_in(load(running=8), 8) == 10


def test_who_waits_behind_a_sibling_that_has_ended_goes(rig: RouterRig) -> None:
    """What the node had begun is over: nothing is computed twice."""
    p, a = rig.join("prefill", "p"), rig.join("decode", "a")
    key = rig.open([1] * 32, n=2)[0].key
    second = msgspec.structs.replace(key, seq_index=1)
    b = rig.join("decode", "b")
    for one in (key, second):
        rig.run(p, one, 0, [5])
    rig.run(a, key, 1, [6])
    pages(a, 0, waiting=3, running=7)
    pages(b, 99)
    for _ in range(40):
        rig.now += 0.25
        assert not generates(rig.dispatcher.tick(rig.now)), "one of them runs there"
    request = rig.journal.find(key.rid)
    assert request is not None and request.runs_on(a) and request.num_tokens == 32 + 2
    rig.end(a, key, 2)
    assert not request.runs_on(a) and request.num_tokens == 32 + 1, "what has ended needs no memory"
    rig.now += 0.25
    assert not generates(rig.dispatcher.tick(rig.now))
    rig.now += MOVE_AFTER_S
    (moved,) = generates(rig.dispatcher.tick(rig.now))
    assert (moved.decode_node, moved.output_ids, moved.ended) == ("b", [[], [5]], [0])


def test_waiting_counts_from_the_last_moment_with_room(rig: RouterRig) -> None:
    story = Waiting(rig)
    for _ in range(5):
        assert not story.tick(MOVE_AFTER_S - 0.5)
        pages(story.a, 50, waiting=3)
        assert not story.tick(0.25)
        story.report()


def test_a_node_is_not_flooded_by_one_report(rig: RouterRig) -> None:
    """Room for five twice over, and twenty that wait."""
    story = Waiting(rig, count=20)
    story.report(room=21)  # 336 tokens: five times 66
    assert len(story.tick(10)) == 5
    story.report(room=9)
    assert len(story.tick(1)) == 2


def test_where_there_is_room_for_one_who_has_waited_longest_goes(rig: RouterRig) -> None:
    """Not who came first: the first one's prompt took longer."""
    p, a = rig.join("prefill", "p"), rig.join("decode", "a")
    first, second = (generate.key for generate in rig.open([1] * 32, rounds=2))
    b = rig.join("decode", "b")
    pages(a, 0, waiting=3, running=7)
    pages(b, 0)
    for rig.now, key in ((1.0, second), (2.0, first)):
        rig.run(p, key, 0, [5])
        assert not generates(rig.dispatcher.tick(rig.now))
    rig.now += 2 * MOVE_AFTER_S
    pages(b, 5)  # 80 tokens: once 66
    moved = generates(rig.dispatcher.tick(rig.now))
    assert [generate.key.rid for generate in moved] == [second.rid]


def test_nothing_goes_to_and_fro(rig: RouterRig) -> None:
    story = Waiting(rig)
    moved: list[Generate] = []
    for _ in range(20):
        sent = story.tick(MOVE_AFTER_S + 0.5)
        for generate in sent:
            rig.run(story.p, generate.key, 1, [6])
        moved += sent
        story.a, story.b = story.b, story.a
        story.report()
    assert len(moved) == MAX_MOVES
    assert all(node.ours.open_sequences <= 1 for node in (story.a, story.b))


def test_nobody_is_moved_to_where_a_suspect_runs_alone(rig: RouterRig) -> None:
    story = Waiting(rig)
    pages(story.b, 99, running=7)
    c = rig.join("decode", "c")
    pages(c, 99)
    suspect = rig.open([1] * 32)[0]
    assert suspect.decode_node == "c"
    rig.run(c, suspect.key, 0, [5])
    rig.registry.remove(c)
    effects = rig.dispatcher.node_lost(c, "its connection closed", rig.now, has_died=True)
    assert [(peer, message.decode_node) for peer, message in effects.sends if isinstance(message, Generate)] == [
        ("b@1", "")
    ]
    story.report()
    assert not story.tick(10)


def test_nobody_is_looked_at_while_no_node_has_room(rig: RouterRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds that wait times hundreds of nodes, four times a second, would stop the router."""
    story = Waiting(rig, count=5)
    asked: list[object] = []
    monkeypatch.setattr("router.policy.placement.Placer.other_decodes", lambda self, *of: asked.append(of) or [])
    pages(story.b, 0)
    story.tick(10)
    assert not asked
    pages(story.b, 99)
    story.tick(10)
    assert asked
