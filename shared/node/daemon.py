"""The shell around a node: one poll over sockets and step completions, signals, the clock. No decisions about requests.

poll (sleeps while nothing happens)  ->  both halves of a tick, and after each: carry out its actions
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Protocol

from shared.core.errors import ConfigError, PeerUnreachable
from shared.core.exit_codes import exit_code_after
from shared.device.cpu import do_nothing
from shared.node.cores import NodeCores
from shared.node.mail import Dial, HangUp, Outgoing
from shared.node.node import Node
from shared.observe.log import Logger
from shared.wire.codec import Buffer
from shared.wire.messages import Message
from shared.wire.peers import Inbound, PeerClosed

LAST_WORDS_S = 0.1  # sockets are closed without lingering: what was said last needs a moment to leave
SHORTEST_WAIT_S = 0.001


class Alarm(Protocol):
    def set(self) -> None: ...


class Links(Protocol):
    """What the daemon needs of `shared.wire.link.NodeLinks`; a simulated network has it too."""

    @property
    def wakeup(self) -> Alarm: ...

    def dial(self, peer: str, endpoint: str) -> None: ...

    def hang_up(self, peer: str) -> None: ...

    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = ()) -> bool: ...

    def poll(self, timeout_s: float) -> Sequence[Inbound]: ...


class Daemon:
    """Runs on the main thread until a signal; then drains for at most drain_s. A second signal ends it at once.

    A router may drain it too: then it ends when it is idle, with a status that says how to go on.
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
    ) -> None:
        """`check` is called every round, and raises when the node can't go on. `cores` rest while nothing is to be
        computed."""
        self._node = node
        self._links = links
        self._log = log
        self._drain_s = drain_s
        self._clock = clock
        self._check = check
        self._cores = cores
        self._signals = 0
        self._drain_until = float("inf")
        self._unreachable: list[str] = []

    def run(self) -> int:
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.dial_routers()
            while not self.finished:
                self.round()
            self.say_goodbye()
            time.sleep(LAST_WORDS_S)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return 0 if self._signals else exit_code_after(self._node.ctx.then)

    def round(self) -> None:
        """One poll and what follows from it."""
        inbox = self._wait()
        self._check()
        self._note_signals()
        now = self._clock()
        self._carry_out(self._node.take_in(inbox, now))
        self._carry_out(self._node.go_on(now))

    def dial_routers(self) -> None:
        for endpoint in self._node.ctx.routers.peers:
            self._links.dial(endpoint, endpoint)

    def _wait(self) -> Sequence[Inbound]:
        """Sleeps for a message, a completion or the next heartbeat; not at all while there is work to do."""
        busy = self._node.busy or bool(self._unreachable)
        if self._cores is not None:
            self._cores.clear_up()
            if not busy and self._node.ctx.core.loop.idle:
                self._cores.rest()
        timeout_s = 0.0 if busy else max(SHORTEST_WAIT_S, self._node.next_heartbeat - self._clock())
        inbox = self._links.poll(min(timeout_s, self._node.ctx.facts.heartbeat_s))
        closed, self._unreachable = self._unreachable, []
        return [*inbox, *(PeerClosed(peer) for peer in closed)]

    def _carry_out(self, actions: Sequence[Dial | Outgoing | HangUp]) -> None:
        for action in actions:
            if isinstance(action, Dial):
                self._dial(action)
            elif isinstance(action, HangUp):
                self._links.hang_up(action.peer)
            elif not self._links.send(action.peer, action.message, action.frames):
                self._give_up(action.peer, "it takes no messages any more")

    def _dial(self, action: Dial) -> None:
        try:
            self._links.dial(action.peer, action.endpoint)
        except (ConfigError, PeerUnreachable) as error:  # an address that may not be dialled, or no descriptor is left
            self._give_up(action.peer, error.message)

    def _give_up(self, peer: str, why: str) -> None:
        """A peer that can't be told something counts as gone, with the next tick."""
        if peer not in self._unreachable:
            self._unreachable.append(peer)
            self._log.warning("peer given up", peer=peer, why=why)

    # ---- the end

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Drain; a second call: at once."""
        self._signals += 1
        self._links.wakeup.set()

    def _note_signals(self) -> None:
        if not self._signals or self._drain_until != float("inf"):
            return
        self._drain_until = self._clock() + self._drain_s
        self._node.ctx.draining = True
        self._node.next_heartbeat = 0.0
        self._log.info("draining", requests=len(self._node.ctx.core.requests), at_most_s=self._drain_s)

    @property
    def finished(self) -> bool:
        if self._drain_until == float("inf"):
            return bool(self._node.ctx.then) and self._node.idle
        return self._node.idle or self._signals > 1 or self._clock() >= self._drain_until

    def say_goodbye(self) -> None:
        if not self._node.idle:
            self._node.fail_all(f"{self._node.ctx.facts.node_id} was shut down")
            self._carry_out(self._node.tick((), self._clock()))
        self._carry_out(self._node.goodbye())
        self._links.poll(0.0)
