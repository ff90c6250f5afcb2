"""Two prefill nodes that pull from each other have a connection each: the end of one is not that of the other."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence

from shared.node.loop.daemon import Daemon
from shared.node.records.mail import HangUp
from shared.observe.log import Logger
from shared.wire.codec import Buffer
from shared.wire.messages import Drain, Key, Message, Pull, Ready
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received
from shared.wire.zeromq.link import NodeLinks
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.worlds.node_pair import name_of
from tests.support.worlds.prefix_pulls import PullPair, job
from tests.unit.shared.node.test_node_rounds import Line


def each_pulls(rig: PullPair) -> tuple[Key, Key]:
    """`p` pulls from `s` and `s` from `p`; no pages come."""
    rig.warm(job(1))
    rig.net.run_until_ended([rig.net.generate(rig.p, job(11, seed=5))])
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    keys = rig.ask(job(2)), rig.pull_back(job(12, seed=5))
    rig.net.run()
    assert all(side.pulls.open and side.loans.open for side in (rig.asker, rig.lender))
    return keys


def test_the_end_of_a_dialled_link_ends_no_loan() -> None:
    rig = PullPair()
    mine, theirs = each_pulls(rig)
    rig.net.inboxes[name_of(rig.p)].append(PeerClosed(name_of(rig.s)))
    rig.net.run()
    assert not rig.asker.pulls.open and rig.count("pull.lost") == 1
    assert rig.asker.loans.open, "`s` goes on over the connection that it dialled"
    assert rig.lender.pulls.open and not rig.lender.loans.open, "`p` has hung up, so `s` lends it nothing more"
    rig.net.at(1.1)
    rig.net.run_until_ended([mine, theirs])
    rig.rest()


def test_the_end_of_an_accepted_link_ends_no_pull() -> None:
    rig = PullPair()
    mine, theirs = each_pulls(rig)
    rig.net.inboxes[name_of(rig.s)].append(PeerClosed(name_of(rig.p), accepted=True))
    actions = rig.s.tick([PeerClosed(name_of(rig.p), accepted=True)], rig.net.now)
    assert not rig.lender.loans.open and rig.lender.pulls.open
    assert not any(isinstance(action, HangUp) for action in actions), "its own dial is up"
    rig.net.run()
    assert rig.asker.pulls.open and rig.asker.loans.open
    rig.net.at(1.1)
    rig.net.run_until_ended([mine, theirs])
    rig.rest()


def test_links_say_whose_connection_has_ended() -> None:
    one, other = NodeLinks("a", 1), NodeLinks("b", 1)
    one.dial("b@1", other.endpoint)
    other.dial("a@1", one.endpoint)
    word, is_open = Drain("x", ""), True
    heard: dict[str, list[Inbound]] = {"a": [], "b": []}

    def until(*wanted: tuple[str, Inbound]) -> None:
        deadline = time.monotonic() + HANG_GUARD_S
        while not all(event in heard[name] for name, event in wanted):
            assert time.monotonic() < deadline, heard
            heard["a"] += one.poll(0.01) if is_open else []
            heard["b"] += other.poll(0.01)

    until(("a", PeerUp("b@1")), ("b", PeerUp("a@1")))
    one.send("b@1", word), other.send("a@1", word)
    until(("b", Received("a@1", word)), ("a", Received("b@1", word)))
    one.hang_up("b@1")
    until(("b", PeerClosed("a@1", accepted=True)))
    assert PeerClosed("a@1") not in heard["b"], "b's own connection is up"
    heard["a"].clear()
    assert other.send("a@1", word)
    until(("a", Received("b@1", word)))
    is_open = False
    one.close()
    until(("b", PeerClosed("a@1")))
    other.close()


class Refusing(Line):
    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = (), *, back: bool = False) -> bool:
        return not back


def test_a_refused_answer_ends_the_loan_alone() -> None:
    """The peer does not read what it pulls; what is pulled from it is another matter."""
    rig = PullPair()
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    rig.warm(job(1))
    rig.net.run_until_ended([rig.net.generate(rig.p, job(11, seed=5))])
    rig.pull_back(job(12, seed=5))
    rig.net.run()
    rig.net.hold = lambda source, target, message: isinstance(message, Pull)
    rig.ask(job(2))
    rig.net.run()
    ((_, _, held),) = rig.net.kept
    assert isinstance(held.message, Pull)
    line = Refusing([Received(name_of(rig.p), held.message)], [])
    daemon = Daemon(rig.s, line, Logger("s", io.StringIO()), drain_s=1.0, clock=lambda: 0.0)
    daemon.round()
    assert rig.lender.loans.open
    daemon.round()
    assert not rig.lender.loans.open and rig.lender.pulls.open
