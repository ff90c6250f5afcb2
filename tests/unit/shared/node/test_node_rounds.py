"""The order of one round of a daemon: what is said before a step is launched."""

from __future__ import annotations

import io
from collections.abc import Sequence

from shared.engine.lease import StepLease
from shared.engine.plan import StepPlan
from shared.node.loop.daemon import Daemon
from shared.node.loop.node import Node
from shared.node.records.mail import HangUp, Outgoing
from shared.node.routers.dialled import Routers
from shared.observe.log import Logger
from shared.wire.codec import Buffer
from shared.wire.messages import Drain, Goodbye, Heartbeat, Hello, Installed, Message, Prebuilt, Welcome
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received
from tests.support.cores.core_rig import CoreKnobs
from tests.support.cores.scripted_core import job
from tests.support.worlds.node_pair import Net, expected, make_node, name_of


class Line:
    """A daemon's links: gives what the test puts in, and writes down what is sent."""

    def __init__(self, inbox: Sequence[Inbound], log: list[str]) -> None:
        self.wakeup = self
        self.sent: list[tuple[str, Message, Sequence[Buffer]]] = []
        self._inbox, self._log = list(inbox), log

    def set(self) -> None:
        """Nobody sleeps."""

    def dial(self, peer: str, endpoint: str, *, brings_pages: bool = False) -> None:
        self._log.append("Dial")

    def hang_up(self, peer: str) -> None:
        self._log.append("HangUp")

    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = (), *, back: bool = False) -> bool:
        self._log.append(type(message).__name__)
        self.sent.append((peer, message, frames))
        return True

    def poll(self, timeout_s: float) -> Sequence[Inbound]:
        inbox, self._inbox = self._inbox, []
        return inbox


def one_round(node: Node, inbox: Sequence[Inbound]) -> tuple[list[str], Line]:
    """What happens in it, in order: messages by their names, and launches."""
    log: list[str] = []
    launch = node.ctx.core.engine.launch

    def watched(plan: StepPlan) -> StepLease:
        log.append("launch")
        return launch(plan)

    node.ctx.core.engine.launch = watched  # type: ignore[method-assign]
    line = Line(inbox, log)
    Daemon(node, line, Logger("d", io.StringIO()), drain_s=1.0, clock=lambda: 0.0).round()
    node.ctx.core.engine.launch = launch  # type: ignore[method-assign]
    return log, line


def test_installed_leaves_before_the_installed_row_s_first_step() -> None:
    """The prefill node keeps its pages until it hears of it."""
    p, d = make_node("prefill", "p0", CoreKnobs()), make_node("decode", "d0", CoreKnobs())
    net, one = Net([p, d]), job(1, 40, 8)
    net.hold = lambda src, dst, message: isinstance(message, Prebuilt)
    key = net.generate(p, one, d)
    net.run()
    (handoff,) = d.side.transfers.open.values()  # type: ignore[attr-defined]
    assert handoff.ranges.complete, "only its record is missing"
    net.release_held()
    inbox = list(net.inboxes[name_of(d)])
    net.inboxes[name_of(d)].clear()
    log, line = one_round(d, inbox)
    assert log.count("launch") == 1 and log.index(Installed.__name__) < log.index("launch")
    for peer, message, _ in line.sent:
        if isinstance(message, Installed):
            net.to_node(peer, message, name_of(d))
    net.run()
    assert not p.side.inflight.granted  # type: ignore[attr-defined]
    assert net.router.streams[key][-3:] == expected(one)[-3:]


ROUTER = "tcp://127.0.0.1:7001"


class StuffedLine(Line):
    """No Hello can leave until the connection is dialled anew."""

    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = (), *, back: bool = False) -> bool:
        return "Dial" in self._log and super().send(peer, message, frames, back=back)


def test_a_router_whose_queue_takes_no_hello_is_dialled_anew() -> None:
    """The defect (seed 496649): the connection stayed up, so no PeerUp came, and the node never said Hello again."""
    node, log = make_node("decode", "d0", CoreKnobs()), list[str]()
    node.ctx.routers = Routers((ROUTER,))
    line = StuffedLine([PeerUp(ROUTER)], log)
    daemon = Daemon(node, line, Logger("d", io.StringIO()), drain_s=1.0, clock=lambda: 0.0)
    for _ in range(3):
        daemon.round()
    assert log == ["HangUp", "Dial"]
    line._inbox.append(PeerUp(ROUTER))
    daemon.round()
    assert [type(message) for _, message, _ in line.sent] == [Hello]


def test_a_router_refused_twice_is_dialled_once() -> None:
    """The defect: the second refusal, of the connection that ended a moment later, ended the new connection too."""
    node, log = make_node("decode", "d0", CoreKnobs()), list[str]()
    node.ctx.routers = Routers((ROUTER,))
    line = StuffedLine([PeerUp(ROUTER)], log)
    daemon = Daemon(node, line, Logger("d", io.StringIO()), drain_s=1.0, clock=lambda: 0.0)
    daemon.round()
    line._inbox.append(PeerUp(ROUTER))  # its Hello is refused too, ahead of the hang-up
    for _ in range(3):
        daemon.round()
    assert log == ["HangUp", "Dial"]


def test_a_hang_up_forgets_its_own_refused_sends_only() -> None:
    log = list[str]()
    line = StuffedLine([], log)
    daemon = Daemon(make_node("decode", "d0", CoreKnobs()), line, Logger("d", io.StringIO()), 1.0, lambda: 0.0)
    sends = [Outgoing(peer, Goodbye("d0", 1), back=back) for peer, back in (("p0", False), ("p0", True), ("p1", False))]
    daemon._carry_out([*sends, HangUp("p0")])
    assert daemon._unreachable == [PeerClosed("p0", accepted=True, gave_up=True), PeerClosed("p1", gave_up=True)]


def test_a_link_that_lost_an_unserved_router_redials_it_alone() -> None:
    node = make_node("decode", "d0", CoreKnobs())
    node.ctx.routers = Routers((ROUTER,))
    log, _ = one_round(node, [PeerUp(ROUTER), PeerClosed(ROUTER)])
    assert "HangUp" not in log and "Dial" not in log


# ---- the end


class Stopping:
    """A daemon whose node has a long request, by a clock that the test sets."""

    def __init__(self) -> None:
        self.now, self.node = 0.0, make_node("decode", "d0", CoreKnobs())
        self.node.ctx.routers = Routers((ROUTER,))
        self.line = Line([PeerUp(ROUTER), Received(ROUTER, Welcome("r", 1, connection=1))], [])
        self.daemon = Daemon(self.node, self.line, Logger("d", io.StringIO()), 10.0, lambda: self.now)
        self.daemon.round()
        self.node.ctx.core.submit(job(1, 8, 200).request())

    def drain(self) -> None:
        self.line._inbox.append(Received(ROUTER, Drain("d0", "stop", move_after_ms=3000)))
        self.daemon.round()

    def stop(self) -> None:
        self.daemon.stop()
        self.daemon.round()

    def move_after_ms(self) -> int | None:
        """What the newest heartbeat says."""
        return next(sent.move_after_ms for _, sent, _ in reversed(self.line.sent) if isinstance(sent, Heartbeat))


def test_a_signal_during_a_drain_changes_no_time_of_the_drain() -> None:
    stopping = Stopping()
    stopping.drain()
    stopping.now = 1.0
    stopping.stop()
    assert stopping.move_after_ms() == 2000 and not stopping.daemon.finished
    stopping.now = 11.0
    assert stopping.daemon.finished


def test_a_drain_after_a_signal_gives_no_more_time() -> None:
    stopping = Stopping()
    stopping.stop()
    assert stopping.move_after_ms() is None and not stopping.daemon.finished
    stopping.now = 1.0
    stopping.drain()
    assert stopping.move_after_ms() == 3000 and not stopping.daemon.finished
    stopping.now = 10.0
    assert stopping.daemon.finished


def test_a_second_signal_ends_a_node_at_once() -> None:
    stopping = Stopping()
    stopping.stop()
    stopping.stop()
    assert stopping.daemon.finished and not stopping.node.idle
