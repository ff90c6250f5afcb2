"""Split a node's load by router, so that each router knows the load from other routers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shared.core.request import Request, RequestState
from shared.node.records.core import NodeCore
from shared.node.routers.lives import RouterLife
from shared.wire.parts import OthersLoad


@dataclass(slots=True)
class LoadShare:
    sequences: int = 0
    pages: int = 0
    waiting_tokens: int = 0

    def add(self, other: LoadShare) -> None:
        self.sequences += other.sequences
        self.pages += other.pages
        self.waiting_tokens += other.waiting_tokens


class LoadShares:
    """`offers`: requests that wait for memory and are not in the scheduler yet."""

    def __init__(self, core: NodeCore, offers: Iterable[Request]) -> None:
        self._shares: dict[RouterLife, LoadShare] = {}
        for req in (*core.requests.values(), *offers):
            waits = req.state is RequestState.WAITING
            pages = core.kv.num_held(req.row) if req.row else 0
            life = RouterLife(req.key.router_id, req.key.router_epoch)
            share = LoadShare(1, pages, req.num_tokens if waits else 0)
            self._shares.setdefault(life, LoadShare()).add(share)

    def beside(self, life: RouterLife | None) -> OthersLoad:
        """Return the load of all routers except this one."""
        total = LoadShare()
        others = [share for other, share in self._shares.items() if other != life]
        for share in others:
            total.add(share)
        return OthersLoad(len(others), total.sequences, total.pages, total.waiting_tokens)
