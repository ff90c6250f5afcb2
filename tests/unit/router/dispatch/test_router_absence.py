"""A router that was frozen or cut off, and one whose nodes were: what is heard late costs nobody anything."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.dispatch.attempts import MAX_EXCUSED
from router.dispatch.gateway import TICK_S
from router.requests.mailbox import Mailbox
from router.requests.new_request import NewRequest
from shared.config.settings.silence import link_silence
from shared.core.errors import Aborted
from shared.core.sampling_params import SamplingParams
from shared.wire.peers import PeerClosed, Received, peer_name
from tests.support.worlds.gateway_rig import GatewayRig
from tests.support.worlds.router_rig import RouterRig, hello

NODES = ("a", "b", "c")


class Story(GatewayRig):
    """Three decode nodes; as a rule, one attempt for each request."""

    def __init__(self, max_attempts: int = 1, silence_s: float = 5.0) -> None:
        super().__init__(RouterRig(max_attempts=max_attempts, resume_wait_s=5.0, silence_s=silence_s))
        self.say_hello(1)
        self.tick(4)

    def say_hello(self, connection: int, names: Sequence[str] = NODES) -> None:
        for name in names:
            self.gateway.handle(Received(peer_name(name, 1), hello("decode", name, connection=connection)))

    def nodes_speak(self) -> None:
        for node in self.rig.registry:
            self.rig.registry.seen(node, self.rig.now)

    def tick(self, times: int) -> None:
        for _ in range(times):
            self.rig.now += TICK_S
            self.gateway.tick()

    def open(self) -> Mailbox:
        return self.gateway.open([NewRequest([1, 2, 3], 1, SamplingParams(max_tokens=5), seed=7)])

    def has_been_away(self) -> bool:
        return "was frozen" in self.log.getvalue()

    def lose_the_first(self) -> None:
        self.gateway.handle(PeerClosed(self.link.generates[-1][0]))


def test_what_a_frozen_router_missed_costs_no_attempt() -> None:
    """Every connection broke. The request is sent to one node after the other, each time before the router knows that
    this one is gone too; then they are back."""
    story = Story()
    mailbox = story.open()
    story.nodes_speak()
    story.rig.now += 4.0
    for _ in NODES:
        story.lose_the_first()
        story.tick(1)
    assert len({peer for peer, _ in story.link.generates}) == 3 and not mailbox._news
    story.tick(2)
    story.say_hello(2)
    story.tick(1)
    assert len(story.link.generates) == 4 and not mailbox._news


def test_an_answer_of_several_requests_is_aborted_whole() -> None:
    story = Story()
    mailbox = story.gateway.open([NewRequest([1, 2, 3], 1, SamplingParams(max_tokens=5), seed=7)] * 2)
    assert story.gateway.abort(mailbox.answer_id, Aborted("stop")) and len(mailbox._news) == 2


def test_an_absence_that_only_links_count_is_excused_too() -> None:
    """Nodes give a router up as soon as its host does not answer, long before its loop would count as silent."""
    story = Story()
    mailbox = story.open()
    story.nodes_speak()
    story.rig.now += link_silence(story.rig.registry.silence_s).longest_s
    story.lose_the_first()
    assert len(story.link.generates) == 2 and not mailbox._news


def test_a_tick_may_be_the_first_to_see_it() -> None:
    """All nodes seem silent then."""
    story = Story()
    mailbox = story.open()
    story.rig.now += 6.0
    story.gateway.tick()
    assert not mailbox._news
    story.say_hello(2)
    story.tick(1)
    assert len(story.link.generates) == 2 and not mailbox._news


def test_a_router_without_its_cable_does_not_count_each_node() -> None:
    """Its links end one after the other, within one ping. After the first loss, the request goes to nodes that have
    been mute for as long; what was sent to them counts for nothing."""
    story = Story(max_attempts=2)
    story.nodes_speak()
    mailbox = story.open()
    story.nodes_speak()
    story.tick(6)
    for _ in NODES:
        story.lose_the_first()
        story.tick(1)
    assert len({peer for peer, _ in story.link.generates}) == 3 and not mailbox._news
    story.tick(4)
    story.say_hello(2)
    story.tick(1)
    assert len(story.link.generates) == 4 and not mailbox._news


def test_a_second_mute_node_makes_a_request_wait_for_the_others() -> None:
    """Where a hundred nodes are lost within a tick, a request does not try them all."""
    story = Story(max_attempts=2)
    story.nodes_speak()
    story.open()
    story.nodes_speak()
    story.tick(6)
    story.lose_the_first()
    assert len(story.link.generates) == 2, "at once: most losses are of one host"
    story.lose_the_first()
    assert len(story.link.generates) == 2, "at the next tick"
    story.tick(1)
    assert len(story.link.generates) == 3


def test_what_takes_mute_nodes_along_ends_all_the_same() -> None:
    """A request that ends each machine before it can say a word has a few attempts for nothing, and no more."""
    story = Story(max_attempts=2)
    mailbox = story.open()
    for connection in range(2, 4 + MAX_EXCUSED):
        assert not mailbox._news
        lost, _ = story.link.generates[-1]
        story.tick(6)
        story.lose_the_first()
        story.say_hello(connection, [lost.partition("@")[0]])
        story.tick(1)
    assert [type(item).__name__ for item in mailbox._news] == ["Failure"]


def test_a_router_that_was_awake_counts_every_loss() -> None:
    story = Story()
    mailbox = story.open()
    story.nodes_speak()
    story.tick(8)
    story.lose_the_first()
    assert [type(item).__name__ for item in mailbox._news] == ["Failure"]


def test_a_tick_that_comes_a_little_late_is_no_absence() -> None:
    """The defect: with a short silence nearly every tick said that the router was away, and excused the next losses."""
    story = Story(silence_s=1.5)
    mailbox = story.open()
    story.nodes_speak()
    for _ in range(3):
        story.rig.now += 0.1
        story.tick(1)
    story.lose_the_first()
    assert not story.has_been_away()
    assert [type(item).__name__ for item in mailbox._news] == ["Failure"]


@pytest.mark.parametrize("silence_s", [1.5, 5.0])
def test_whatever_ends_a_link_is_an_absence(silence_s: float) -> None:
    story = Story(silence_s=silence_s)
    story.rig.now += link_silence(silence_s).shortest_s
    story.gateway.tick()
    assert story.has_been_away()


def test_the_excuse_ends() -> None:
    story = Story()
    story.rig.now += 4.0
    story.gateway.tick()
    mailbox = story.open()
    for _ in range(24):
        story.tick(1)
        story.nodes_speak()
    story.lose_the_first()
    assert [type(item).__name__ for item in mailbox._news] == ["Failure"]
