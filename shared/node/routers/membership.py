"""Join routers (dialling, Hello, Welcome) and leave routers that are no longer listed. Sans-IO.

    listed: dialled --PeerUp: Hello--> --Welcome--> served
    no longer listed: served --heartbeats say so--> --Release: no request needs us--> Goodbye --> hung up

When a router's epoch ends, its requests end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from shared.kv.window_cache import WindowCache
from shared.node.context import NodeContext
from shared.node.routers.lives import RouterLife, RoutersWord
from shared.node.routers.unanswered import UnansweredRouters
from shared.wire.messages import Adapter, Goodbye, Hello, Unwelcome, Welcome
from shared.wire.ranges import MAX_NAME, MAX_NAMES, MAX_TEXT

HELLO_AGAIN_S = 2.0  # after this time without a Welcome, Hello is sent again
LAST_WORD_S = 0.5  # time from Goodbye to hanging up, which drops queued messages


class Membership:
    """Owned by the node. Calls `over` to end the requests of a router's epoch."""

    def __init__(self, ctx: NodeContext, over: Callable[[RouterLife], None]) -> None:
        self._ctx = ctx
        self._over = over
        self._hello_due: dict[str, float] = {}  # connected router without a Welcome -> time of the next Hello
        self._hello_said: dict[str, float] = {}  # connected router -> time of the last Hello
        self._hang_up_at: dict[str, float] = {}  # router that the node has left -> time to hang up
        self._unanswered = UnansweredRouters()
        self.connections: Counter[str] = Counter()  # connections so far, by router

    # ---- the list

    def listed(self, endpoints: Sequence[str], now: float) -> None:
        """Ignore an empty list, because a node needs routers."""
        if not endpoints:
            return
        routers = self._ctx.routers
        before, routers.listed = routers.listed, frozenset(endpoints)
        self._ctx.metrics.count("router_list_changes", len(routers.listed ^ before))
        for peer in sorted(routers.listed - before):
            self._ctx.log.info(("listed", peer), "a router is on the list", router=peer)
            self._come_back(peer)
        for peer in sorted(before - routers.listed):
            self._ctx.log.info(("left", peer), "a router has left the list", router=peer)
            self._leave(peer, now)

    def _come_back(self, peer: str) -> None:
        """Keep a router that we were leaving, or dial it again. After a Goodbye, `go_on` dials it."""
        routers = self._ctx.routers
        routers.leaving.discard(peer)
        if peer not in routers.peers:
            routers.peers[peer] = None
            self._ctx.outbox.dial(peer, peer)

    def _leave(self, peer: str, now: float) -> None:
        if self._ctx.routers.life(peer) is None:  # the router has no requests here
            self._forget(peer, now)
        else:
            self._ctx.routers.leaving.add(peer)

    def released(self, peer: str, now: float) -> None:
        if peer in self._ctx.routers.leaving:
            facts = self._ctx.facts
            self._ctx.outbox.send(peer, Goodbye(facts.node_id, facts.epoch))
            self._forget(peer, now, LAST_WORD_S)

    def _forget(self, peer: str, now: float, after_s: float = 0.0) -> None:
        self._life_over(self._ctx.routers.closed(peer), now)
        self._ctx.routers.leaving.discard(peer)
        self._hello_due.pop(peer, None)
        self._hello_said.pop(peer, None)
        self._unanswered.closed(peer)
        self._hang_up_at[peer] = now + after_s

    def lacking(self) -> list[str]:
        """Return the listed routers that don't serve this node."""
        return sorted(peer[:MAX_NAME] for peer in self._unserved())[:MAX_NAMES]

    def _unserved(self) -> list[str]:
        routers = self._ctx.routers
        return [peer for peer in routers.listed if routers.life(peer) is None]

    # ---- connections

    def up(self, peer: str, now: float) -> None:
        self.connections[peer] += 1
        self._unanswered.up(peer, now)
        self._say_hello(peer, now)

    def closed(self, peer: str, now: float, *, gave_up: bool = False) -> None:
        life = self._ctx.routers.closed(peer)
        self._hello_due.pop(peer, None)
        self._hello_said.pop(peer, None)
        self._unanswered.closed(peer)
        if peer not in self._ctx.routers.listed:
            self._forget(peer, now)
        if life is None and not gave_up:
            return  # this router isn't served yet; the link keeps trying
        self._life_over(life, now)
        self._ctx.outbox.hang_up(peer)  # drops messages queued for the dead router
        if peer in self._ctx.routers.listed:
            self._ctx.outbox.dial(peer, peer)

    def go_on(self, now: float) -> None:
        """Call this with every heartbeat."""
        for peer in [peer for peer, due in self._hello_due.items() if due <= now]:
            self._say_hello(peer, now)
        for peer in [peer for peer, at in self._hang_up_at.items() if at <= now]:
            del self._hang_up_at[peer]
            self._ctx.outbox.hang_up(peer)
            self._ctx.routers.peers.pop(peer, None)
            if peer in self._ctx.routers.listed:
                self._come_back(peer)
        self._tell_unanswered(now)

    def _tell_unanswered(self, now: float) -> None:
        """Log the routers that don't answer. A refused router has a line of its own."""
        refused_for = self._ctx.routers.refused_for
        found = self._unanswered.look([peer for peer in self._unserved() if refused_for(peer) is None], now)
        if found is not None:
            self._ctx.log.warning(
                ("unanswered", now),
                "no router answers at this address; still trying. Does the router run, is the address its "
                "--node-endpoint, and do router and node allow each other's keys?",
                router=found.router,
                for_s=found.for_s,
                is_connected=found.is_connected,
                num_others=found.num_others,
            )

    def _say_hello(self, peer: str, now: float) -> None:
        facts, core = self._ctx.facts, self._ctx.core
        self._hello_said[peer], self._hello_due[peer] = now, now + HELLO_AGAIN_S
        self._ctx.outbox.send(
            peer,
            Hello(
                role=facts.role,
                node_id=facts.node_id,
                epoch=facts.epoch,
                node_endpoint=facts.endpoint,
                fingerprint=facts.fingerprint,
                max_context=facts.max_context,
                max_running=facts.max_running,
                host_id=facts.host_id,
                transports=list(facts.transports),
                connection=self.connections[peer],
                adapters=[Adapter(own.name, own.digest) for own in core.spec.adapters],
                key_lookahead=core.settings.key_lookahead,
                has_window=isinstance(core.kv.cache, WindowCache),
            ),
        )

    # ---- epochs of routers

    def welcomed(self, peer: str, message: Welcome, now: float) -> bool:
        """Return whether the router now serves this node, and so needs the node's load."""
        if peer in self._hang_up_at:
            return False
        if message.connection != self.connections[peer]:  # the router hasn't heard our Hello on this connection
            self._ctx.drop(peer, "Welcome to another connection")
            if peer in self._hello_said:
                self._hello_due.setdefault(peer, self._hello_said[peer] + HELLO_AGAIN_S)
            return False
        self._hello_due.pop(peer, None)
        routers, life = self._ctx.routers, RouterLife(message.router_id, message.router_epoch)
        rival = routers.rival(peer, life)
        if rival is not None:
            self._ctx.drop(peer, f"Welcome of a second router of the same name: the first is at {rival}")
            self._life_over(routers.refuse(peer, life, rival), now)
            self.say_unwelcome(peer, rival)
            return False
        word = RoutersWord(message.ticket_key, now - message.clock_ms / 1000, now)
        if self._unanswered.answers(peer) or routers.life(peer) is None and message.connection == 1:
            kind = ("served", peer, now)
            self._ctx.log.info(kind, "a router serves this node", router=peer, router_id=life.router_id)
        self._life_over(routers.welcome(peer, life, word), now)
        return True

    def say_unwelcome(self, peer: str, rival: str) -> None:
        facts = self._ctx.facts
        self._ctx.outbox.send(peer, Unwelcome(facts.node_id, facts.epoch, rival[:MAX_TEXT]))

    def _life_over(self, life: RouterLife | None, now: float) -> None:
        """End the requests of a router's epoch. Say Hello to routers that were refused because this router had their
        name."""
        if life is None or self._ctx.routers.serves(life):
            return
        self._over(life)
        for heir in self._ctx.routers.take_heirs(life):
            self._say_hello(heir, now)
