"""Join routers (dialling, Hello, Welcome) and leave routers that are no longer listed. Sans-IO.

dialled.py draws the states of a router. When a router's epoch ends, its requests end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.model.math.interface import ModelSpec
from shared.node.loop.context import NodeContext
from shared.node.routers.dialled import INFINITY, DialledRouter, RouterState
from shared.node.routers.lives import RouterLife, SessionKey
from shared.node.routers.unanswered import UnansweredRouters
from shared.wire.messages import Adapter, Goodbye, Hello, Unwelcome, Weights, Welcome
from shared.wire.ranges import MAX_NAME, MAX_NAMES, MAX_TEXT

HELLO_AGAIN_S = 2.0  # after this time without a Welcome, Hello is sent again
LAST_WORD_S = 0.5  # time from Goodbye to hanging up, which drops queued messages


def weights_of(spec: ModelSpec) -> Weights | None:
    stored = spec.stored
    if stored is None:
        return None
    held = spec.dtype if spec.weight_dtype == "auto" else spec.weight_dtype
    return Weights(stored.format, held, stored.file_bytes, stored.memory_bytes)


class Membership:
    """Owned by the node. Calls `over` to end the requests of a router's epoch."""

    def __init__(self, ctx: NodeContext, over: Callable[[RouterLife], None]) -> None:
        self._ctx = ctx
        self._over = over
        self._unanswered = UnansweredRouters()

    # ---- the list

    def listed(self, endpoints: Sequence[str], now: float) -> None:
        """Ignore an empty list, because a node needs routers."""
        if not endpoints:
            return
        routers = self._ctx.routers
        before, after = routers.listed(), frozenset(endpoints)
        self._ctx.metrics.count("router_list_changes", len(after ^ before))
        for peer in sorted(after - before):
            self._ctx.log.info(("listed", peer), "a router is on the list", router=peer)
            self._come_back(peer)
        for peer in sorted(before - after):
            self._ctx.log.info(("left", peer), "a router has left the list", router=peer)
            self._leave(routers.dialled[peer], now)

    def _come_back(self, peer: str) -> None:
        """Keep a router that we were leaving, or dial it. After a Goodbye, `go_on` dials it."""
        link = self._ctx.routers.dialled.get(peer)
        if link is None:
            self._ctx.routers.add_router(peer)
            self._ctx.outbox.dial(peer, peer)
        else:
            link.state = RouterState.SERVED if link.state is RouterState.LEAVING else RouterState.RETURNING

    def _leave(self, link: DialledRouter, now: float) -> None:
        if link.state is RouterState.SERVED:
            link.state = RouterState.LEAVING
        else:  # the router has no requests here
            self._part(link, now)

    def released(self, peer: str, now: float) -> None:
        link = self._ctx.routers.dialled[peer]
        if link.state is RouterState.LEAVING:
            facts = self._ctx.facts
            self._ctx.outbox.send(peer, Goodbye(facts.node_id, facts.epoch))
            self._part(link, now, LAST_WORD_S)

    def _part(self, link: DialledRouter, now: float, after_s: float = 0.0) -> None:
        self._life_over(link.end(RouterState.PARTING, now + after_s), now)

    def lacking(self) -> list[str]:
        """Return the listed routers that don't serve this node."""
        routers = self._ctx.routers.dialled.values()
        return sorted(link.peer[:MAX_NAME] for link in routers if link.is_listed and link.life is None)[:MAX_NAMES]

    # ---- connections

    def up(self, peer: str, now: float) -> None:
        link = self._ctx.routers.dialled[peer]
        link.num_connections += 1
        link.session.up_since = now
        if not link.is_ending:
            self._say_hello(link, now)

    def closed(self, peer: str, now: float, *, gave_up: bool = False) -> None:
        link = self._ctx.routers.dialled[peer]
        if link.is_ending:
            link.due = now
            return
        is_listed = link.is_listed
        life = link.end(RouterState.DIALLED) if is_listed else link.end(RouterState.PARTING, now)
        if life is None and not gave_up:
            return  # this router isn't served yet; the link keeps trying
        self._life_over(life, now)
        self._ctx.outbox.hang_up(peer)  # drops messages queued for the dead router
        if is_listed:
            self._ctx.outbox.dial(peer, peer)

    def go_on(self, now: float) -> None:
        """Call this with every heartbeat."""
        for link in [link for link in self._ctx.routers.dialled.values() if link.due <= now]:
            if link.is_ending:
                self._hang_up(link)
            else:
                self._say_hello(link, now)
        self._tell_unanswered(now)

    def _hang_up(self, link: DialledRouter) -> None:
        self._ctx.outbox.hang_up(link.peer)
        if link.state is RouterState.RETURNING:
            link.end(RouterState.DIALLED)
            self._ctx.outbox.dial(link.peer, link.peer)
        else:
            self._ctx.routers.remove(link)

    def _tell_unanswered(self, now: float) -> None:
        """Log the routers that don't answer."""
        found = self._unanswered.look(self._ctx.routers.dialled.values(), now)
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

    def say_hello_again(self, now: float) -> None:
        """Tell the routers of other adapters, even before their first answer. Each answers with a Welcome, or hears the
        Hello again."""
        for link in self._ctx.routers.dialled.values():
            if link.state in (RouterState.GREETED, RouterState.SERVED) and not link.is_ending:
                self._say_hello(link, now)

    def _say_hello(self, link: DialledRouter, now: float) -> None:
        facts, core = self._ctx.facts, self._ctx.core
        link.session.hello_at, link.due = now, now + HELLO_AGAIN_S
        if link.state is RouterState.DIALLED:
            link.state = RouterState.GREETED
        self._ctx.outbox.send(
            link.peer,
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
                connection=link.num_connections,
                adapters=[Adapter(*own) for own in core.settings.adapters.named.items()],
                key_lookahead=core.settings.drafts.key_lookahead,
                has_window=bool(core.kv.cache.windows[0]),  # routers are told the first group's pages
                weights=weights_of(core.spec),
                short_context=core.spec.short_context,
            ),
        )

    # ---- epochs of routers

    def welcomed(self, peer: str, message: Welcome, now: float) -> bool:
        """Return whether the router now serves this node, and so needs the node's load."""
        routers, link = self._ctx.routers, self._ctx.routers.dialled[peer]
        if link.is_ending:
            return False
        if message.connection != link.num_connections:  # the router hasn't heard our Hello on this connection
            self._ctx.drop(peer, "Welcome to another connection")
            link.due = link.session.hello_at + HELLO_AGAIN_S
            return False
        link.due = INFINITY
        life = RouterLife(message.router_id, message.router_epoch)
        rival = routers.rival(peer, life)
        if rival is not None:
            self._refuse(link, life, rival, now)
            return False
        key = SessionKey(message.ticket_key, now - message.clock_ms / 1000, now, message.clock_ms)
        if link.is_reported or link.life is None and message.connection == 1:
            kind = ("served", peer, now)
            self._ctx.log.info(kind, "a router serves this node", router=peer, router_id=life.router_id)
        link.is_reported = False
        self._life_over(link.welcome(life, key), now)
        return True

    def _refuse(self, link: DialledRouter, life: RouterLife, rival: str, now: float) -> None:
        self._ctx.drop(link.peer, f"Welcome of a second router of the same name: the first is at {rival}")
        if link.state is RouterState.LEAVING:
            self._part(link, now, LAST_WORD_S)
        else:
            self._life_over(link.refuse(life, rival), now)
        self.say_unwelcome(link.peer, rival)

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
