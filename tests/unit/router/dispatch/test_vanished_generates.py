"""A router places anew what a node never took. The key of an unreadable Generate can be read."""

from __future__ import annotations

from collections.abc import Callable

import msgpack
import msgspec
import pytest

from router.dispatch.attempts import MAX_EXCUSED
from router.dispatch.progress import VANISHED_ALARM
from router.fleet.registry import RegisteredNode
from router.fleet.unconfirmed import Unconfirmed
from router.requests.effects import Effects
from shared.core.errors import WireError
from shared.wire.codec import decode, encode
from shared.wire.messages import Abort, Begun, Generate, Key, Welcome
from shared.wire.parts import Taken
from shared.wire.ranges import MAX_NAME
from shared.wire.unreadable import Unreadable, unreadable
from tests.support.wire.wire_samples import GENERATE, WIRE_KEY
from tests.support.worlds.router_rig import RouterRig, aborts, failures, generates, hello

LONGEST = Key("\U0001f980" * MAX_NAME, 2**64 - 1, "\U0001f980" * MAX_NAME, 2**53 - 1, 127)
BROKEN = WireError("broken")


# ---- unreadable


def renamed(data: bytes) -> bytes:
    return data.replace(b"prompt_ids", b"prompt_idx")


@pytest.mark.parametrize("key", [WIRE_KEY, LONGEST], ids=["usual", "longest"])
@pytest.mark.parametrize("spoil", [renamed, lambda data: data[:-1], lambda data: data + b"x"])
def test_the_key_of_an_unreadable_generate_can_be_read(key: Key, spoil: Callable[[bytes], bytes]) -> None:
    data = spoil(encode(msgspec.structs.replace(GENERATE, key=key)))
    with pytest.raises(WireError):
        decode(data)
    assert unreadable("r", data, BROKEN) == [Unreadable("r", key, BROKEN)]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\x81", encode(Abort(WIRE_KEY, True)), encode(GENERATE)[:20],
        encode(GENERATE).replace(b"key", b"kez", 1),
        msgpack.packb({"t": "Generate", "key": ["r", 1, "x", 0]}), msgpack.packb({"t": "Generate", "key": [b"r"] * 5}),
        msgpack.packb({"t": "Generate", "key": ["r", -1, "x", 0, 0]}), b"\x82\xa1t\xa8Generate\xa3key" + b"\x91" * 5000,
        b"\x82\xa1t\xa8Generate\xa3key\xdd\xff\xff\xff\xff",
    ],
)  # fmt: skip
def test_nonsense_has_no_key(data: bytes) -> None:
    assert unreadable("r", data, BROKEN) == []


# ---- a router


class Site(RouterRig):
    """Two nodes that run whole prompts."""

    def __init__(self, max_attempts: int = 1) -> None:
        super().__init__(max_attempts=max_attempts)
        self.a, self.b = self.join("decode", "a"), self.join("decode", "b")

    def ask(self) -> tuple[RegisteredNode, Key]:
        self.open()
        ((peer, generate),) = sent(self.opened)
        return self.by_peer(peer), generate.key

    def by_peer(self, peer: str) -> RegisteredNode:
        node = self.registry.by_peer(peer)
        assert node is not None
        return node

    def beats(self, node: RegisteredNode, *times: float, clock_ms: int = 1) -> list[Effects]:
        """Heartbeats that list nothing."""
        found = []
        for self.now in times:
            found.append(self.beat(node, clock_ms=clock_ms))
        return found


def sent(effects: Effects) -> list[tuple[str, Generate]]:
    return [(peer, message) for peer, message in effects.sends if isinstance(message, Generate)]


def welcomes(effects: Effects) -> list[tuple[str, int]]:
    return [(peer, message.clock_ms) for peer, message in effects.sends if isinstance(message, Welcome)]


@pytest.mark.rule("H47")
def test_the_second_beat_without_a_generate_is_asked_about() -> None:
    site = Site()
    for node in (site.a, site.b):
        site.beats(node, 1.0)
    site.now = 1.1
    node, _ = site.ask()
    first, second = site.beats(node, 1.4, 1.9)
    assert not first.sends, "it may be on its way"
    assert welcomes(second) == [(node.peer, 1900)] and len(second.sends) == 1
    assert not site.beats(node, 2.4)[0].sends, "the question is on its way, and its answer goes to all routers"


@pytest.mark.rule("H47")
def test_what_vanished_is_withdrawn_and_placed_elsewhere() -> None:
    """A beat that answers a later Welcome decides, and the request is not charged for it."""
    site = Site()
    site.now = 1.0
    node, key = site.ask()
    other, its_key = site.ask()  # which is the busier one from now on
    effects = site.beat(node, clock_ms=1001)
    again = msgspec.structs.replace(key, attempt=1)
    assert [(peer, generate.key) for peer, generate in sent(effects)] == [(other.peer, again)]
    assert other is not node and aborts(effects) == [(node.peer, 0, True)]
    assert [(alarm.kind, alarm.subject) for alarm in effects.alarms] == [(VANISHED_ALARM, node.node_id)]
    assert not site.beat(node, clock_ms=1001).sends, "once"
    assert not site.end(node, key, 5).news
    for open_key in (again, its_key):
        site.end(other, open_key, 0)
    site.check_quiet()


def test_a_welcome_of_the_same_moment_decides_nothing() -> None:
    """It may have been the one before the Generate."""
    site = Site()
    site.now = 1.0
    node, _ = site.ask()
    assert not site.beat(node, clock_ms=1000).sends


def test_each_of_several_vanished_generates_is_told_once() -> None:
    unconfirmed, keys = Unconfirmed(), [msgspec.structs.replace(WIRE_KEY, rid=rid) for rid in ("1.n", "2.n")]
    for key in keys:
        unconfirmed.sent(key, 1)
    assert unconfirmed.vanished(Taken(2, [])) == keys and not unconfirmed.vanished(Taken(3, []))


def test_what_a_heartbeat_lists_has_not_vanished() -> None:
    site = Site()
    site.now = 1.0
    node, key = site.ask()
    assert not site.beat(node, key, clock_ms=1).sends
    assert not any(effects.sends for effects in site.beats(node, 2.0, 3.0, 4.0, clock_ms=3500))


def test_what_has_begun_has_not_vanished() -> None:
    """A network that loses single messages lost the heartbeat that listed it."""
    site = Site()
    site.now = 1.0
    node, key = site.ask()
    site.dispatcher.begun(Begun(node.node_id, 1, [key]), site.now)
    assert not site.beat(node, clock_ms=1001).sends


def test_an_attempt_that_is_over_does_not_vanish() -> None:
    site = Site(max_attempts=3)
    site.now = 1.0
    node, key = site.ask()
    site.dispatcher.send_refused(node.peer, msgspec.structs.replace(GENERATE, key=key), site.now)
    request = site.journal.find(key.rid)
    assert request is not None and request.attempt.number == 1
    assert not site.beat(node, clock_ms=1001).sends


def test_an_older_node_that_does_not_tell_is_trusted() -> None:
    site = Site()
    site.now = 1.0
    node, _ = site.ask()
    assert not any(effects.sends for effects in site.beats(node, 2.0, 3.0, 4.0, clock_ms=0))


def test_a_new_connection_owes_no_word_about_the_old_one() -> None:
    site = Site()
    site.now = 1.0
    node, _ = site.ask()
    site.registry.hello(node.peer, hello("decode", node.node_id, connection=2), site.now)
    assert not any(effects.sends for effects in site.beats(node, 2.0, 3.0, clock_ms=2500))


def test_a_generate_that_always_vanishes_fails_in_the_end() -> None:
    site = Site()
    node, _ = site.ask()
    for number in range(MAX_EXCUSED + 1):
        site.now += 1.0
        effects = site.beat(node, clock_ms=round(1000 * site.now))
        assert len(generates(effects)) == (number < MAX_EXCUSED)
        if number < MAX_EXCUSED:
            node = site.by_peer(sent(effects)[0][0])
    assert failures(effects) == ["node_lost"]


def test_a_node_that_loses_generates_is_left_alone_for_a_while() -> None:
    site = Site()
    site.registry.remove(site.b)
    for _ in range(3):
        site.ask()
    site.now = 1.0
    assert site.a.breaker.allows(1.0)
    site.beat(site.a, clock_ms=1000)
    assert not site.a.breaker.allows(1.0)


def test_a_refusal_counts_though_the_first_sequence_has_ended() -> None:
    """A refused Generate names that one."""
    site = Site(max_attempts=2)
    (generate,) = site.open(n=2)
    first = site.by_peer(sent(site.opened)[0][0])
    site.run(first, generate.key, 0, [1])
    site.end(first, generate.key, 1)
    effects = site.dispatcher.node_lost(first, "made up", site.now)
    ((peer, again),) = sent(effects)
    refused = site.end(site.by_peer(peer), again.key, 0, "error", "overloaded")
    assert failures(refused) == ["overloaded"]
