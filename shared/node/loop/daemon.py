"""Run a node: poll sockets and step completions together, and handle signals and the clock.

poll (sleeps while nothing happens)  ->  take_in, then its actions  ->  go_on, then its actions
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Protocol

from shared.core.errors import ConfigError, PeerUnreachable
from shared.core.exit_codes import exit_code_after
from shared.core.stop_signals import stop_signals
from shared.device.cpu import do_nothing
from shared.node.loop.node import Node
from shared.node.machine.cores import NodeCores
from shared.node.machine.ready_port import ReadyPort
from shared.node.records.departure import Departure
from shared.node.records.mail import Dial, HangUp, Outgoing
from shared.node.routers.watch import RouterWatch
from shared.observe.log import Logger
from shared.observe.service_manager import ServiceManager
from shared.wire.codec import Buffer
from shared.wire.messages import Message
from shared.wire.peers import Inbound, PeerClosed

LAST_WORDS_S = 0.1  # time to send the last messages, because sockets don't linger
SHORTEST_WAIT_S = 0.001


class LoopWakeup(Protocol):
    def set(self) -> None: ...


class Links(Protocol):
    """A node's connections: `shared.wire.zeromq.link.NodeLinks`, or a simulated network."""

    @property
    def wakeup(self) -> LoopWakeup: ...

    def dial(self, peer: str, endpoint: str, *, brings_pages: bool = False) -> None: ...

    def hang_up(self, peer: str) -> None: ...

    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = (), *, back: bool = False) -> bool: ...

    def poll(self, timeout_s: float) -> Sequence[Inbound]: ...


class Daemon:
    """Runs the node on the main thread until a signal, then drains it for at most drain_s.

    A second signal ends the node immediately. After a router's Drain with a nonempty `then`, the node ends once it is
    idle, with an exit code for its parent process.
    """

    def __init__(
        self,
        node: Node,
        links: Links,
        log: Logger,
        drain_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        check: Callable[[], None] = do_nothing,
        cores: NodeCores | None = None,
        watch: RouterWatch | None = None,
        ready: ReadyPort | None = None,
        manager: ServiceManager | None = None,
    ) -> None:
        """- check: called every round; raises if the node can't continue.
        - cores: offered to other nodes while this node has nothing to compute.
        - watch: follows the list of routers. The caller starts and closes `watch`.
        - ready: told every round whether the node takes requests. The caller closes `ready`.
        - manager: told every round, so that systemd notices a loop that hangs. The caller closes `manager`.
        """
        self._node = node
        self._links = links
        self._log = log
        self._drain_s = drain_s
        self._clock = clock
        self._check = check
        self._cores = cores
        self._watch = watch or RouterWatch()
        self._ready = ready
        self._manager = manager
        self._signals = 0
        self._unreachable: list[PeerClosed] = []

    def run(self) -> int:
        previous = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        try:
            self.dial_routers()
            while not self.finished:
                self.round()
            self.say_goodbye()
            time.sleep(LAST_WORDS_S)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        leaving = self._node.ctx.leaving
        assert leaving is not None
        return 0 if self._signals else exit_code_after(leaving.then)

    def round(self) -> None:
        inbox = self._wait()
        self._check()
        self._note_signals()
        now = self._clock()
        self._follow_list(now)
        self._carry_out(self._node.take_in(inbox, now))
        self._carry_out(self._node.go_on(now))
        if self._ready is not None:
            ctx = self._node.ctx
            self._ready.tell(is_served=bool(ctx.routers.served()), is_leaving=ctx.leaving is not None)
        if self._manager is not None:
            self._manager.tell(is_leaving=self._signals > 0)

    def dial_routers(self) -> None:
        for endpoint in self._node.ctx.routers.dialled:
            self._links.dial(endpoint, endpoint)

    def _follow_list(self, now: float) -> None:
        listed = self._watch.take_list()
        if listed is not None:
            self._carry_out(self._node.listed(listed, now))

    def _wait(self) -> Sequence[Inbound]:
        busy = self._node.busy or bool(self._unreachable)
        if self._cores is not None:
            self._cores.clear_up()
            if not busy and self._node.ctx.core.loop.idle:
                self._cores.rest()
        timeout_s = 0.0 if busy else max(SHORTEST_WAIT_S, self._node.wakes_at - self._clock())
        inbox = self._links.poll(min(timeout_s, self._node.ctx.facts.heartbeat_s))
        closed, self._unreachable = self._unreachable, []
        return [*inbox, *closed]

    def _carry_out(self, actions: Sequence[Dial | Outgoing | HangUp]) -> None:
        for action in actions:
            if isinstance(action, Dial):
                self._dial(action)
            elif isinstance(action, HangUp):
                self._links.hang_up(action.peer)
                # what the ended connection refused
                refused = PeerClosed(action.peer, gave_up=True)
                self._unreachable = [closed for closed in self._unreachable if closed != refused]
            elif not self._links.send(action.peer, action.message, action.frames, back=action.back):
                closed = PeerClosed(action.peer, accepted=action.back, gave_up=True)
                self._give_up(closed, "it no longer takes messages")

    def _dial(self, action: Dial) -> None:
        try:
            self._links.dial(action.peer, action.endpoint, brings_pages=action.brings_pages)
        except (ConfigError, PeerUnreachable) as error:  # a forbidden address; no descriptor left
            self._give_up(PeerClosed(action.peer), error.message)

    def _give_up(self, closed: PeerClosed, why: str) -> None:
        """Let the next tick see an unusable connection as closed."""
        if closed not in self._unreachable:
            self._unreachable.append(closed)
            self._log.warning("peer given up", peer=closed.peer, why=why)

    # ---- the end

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Make the node drain. A second call ends the node immediately."""
        self._signals += 1
        self._links.wakeup.set()

    def _note_signals(self) -> None:
        leaving = self._node.ctx.leaving or Departure()
        if not self._signals or leaving.is_signalled:
            return
        self._node.ctx.leaving = replace(leaving, until=self._clock() + self._drain_s)
        self._node.next_heartbeat = 0.0
        self._log.info("draining", requests=len(self._node.ctx.core.requests), at_most_s=self._drain_s)

    @property
    def finished(self) -> bool:
        leaving = self._node.ctx.leaving
        if leaving is None:
            return False
        return self._signals > 1 or leaving.is_over(self._clock(), is_idle=self._node.idle)

    def say_goodbye(self) -> None:
        if not self._node.idle:
            self._node.fail_all(f"{self._node.ctx.facts.node_id} was shut down")
            self._carry_out(self._node.tick((), self._clock()))
        self._carry_out(self._node.goodbye())
        self._links.poll(0.0)
