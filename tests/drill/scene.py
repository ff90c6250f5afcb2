"""One scenario: load on the cluster, something happens to a host, all is mended, and what must hold then.

streams equal HashLM's reference        pools are whole, on every node and at every router
a router gave up the nodes that the scenario takes from it, and no others; nothing resumes where nothing is lost
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.drill.chats import Chats, Hits
from tests.drill.cluster import NODES, ROUTERS, URL, DrillCluster, Pair
from tests.drill.load import MAX_TOKENS, SLOTS, Load, Strangers
from tests.support.web.sdk_clients import check_whole_or_broken

STRETCH = 1.2  # a machine that froze somebody for so many times what it was asked to proves nothing


@dataclass(frozen=True, slots=True)
class Figure:
    """What a scenario did to the streams. attempts: at all of its requests. hits: of chats."""

    scenario: str
    longest_pause_s: float
    streams: int
    resumes: int
    attempts: int
    hits: Hits | None = None


def missing_everywhere(node: str) -> frozenset[Pair]:
    return frozenset((router, node) for router in ROUTERS)


def alone(router: str) -> frozenset[Pair]:
    """It can reach none of its nodes."""
    return frozenset((router, node) for node in NODES)


def without(host: str) -> frozenset[Pair]:
    """Who misses whom while this host is away."""
    return alone(host) if host in ROUTERS else missing_everywhere(host)


class Scene:
    """`under_load` is the scenario; all else happens inside of it."""

    def __init__(self, cluster: DrillCluster, title: str, figures: list[Figure], numbers: itertools.count[int]) -> None:
        self.cluster = cluster
        self.site = cluster.site
        self._title = title
        self._figures = figures
        self._numbers = numbers
        self._pardoned: set[Pair] = set()

    def new_chats(self) -> Chats:
        """As many as the slots of both routers' loads."""
        return Chats(self._numbers, ROUTERS, SLOTS)

    @contextlib.contextmanager
    def under_load(
        self,
        *routers: str,
        loses: frozenset[Pair] = frozenset(),
        moves: bool = False,
        max_tokens: int = MAX_TOKENS,
        chats: Chats | None = None,
    ) -> Iterator[list[Load]]:
        """`loses`: pairs of a router and a node that it must give up. `moves`: streams may go elsewhere, though no
        node is lost. `chats`: they ask, instead of strangers with answers of `max_tokens`."""
        cluster, clients = self.cluster, chats or Strangers(self._numbers, max_tokens)
        lost, resumed = cluster.lost_nodes(), self._resumed()
        loads = [Load(self.site.hosts[router], URL, clients) for router in routers]
        try:
            for load in loads:
                load.begin()
            for load in loads:
                load.meet_tokens()
            assert (cluster.lost_nodes(), self._resumed()) == (lost, resumed), "before anything happened"
            yield loads
            cluster.heal()
        finally:
            for load in loads:
                load.ask_no_more()
        for load in loads:
            load.end()
        resumes = sum(max(0, now - resumed[router]) for router, now in self._resumed().items())
        self._note(loads, resumes, chats)
        refused = [
            load.host.name for load in loads if load.refusals and not alone(load.host.name) <= loses | self._pardoned
        ]
        assert not refused, f"no nodes, said {refused}, and had some"
        self._check_causes(set(cluster.lost_nodes() - lost), loses)
        assert loses or moves or self._pardoned or not resumes, f"{resumes} resumes, and nothing was lost"

    def _resumed(self) -> dict[str, int]:
        return {router: self.cluster.resumed(router) for router in ROUTERS}

    def _check_causes(self, lost: set[Pair], loses: frozenset[Pair]) -> None:
        assert loses - self._pardoned <= lost, f"never noticed: {sorted(loses - lost)}"
        assert lost <= loses | self._pardoned, f"given up without a cause: {sorted(lost - loses)}"

    def _note(self, loads: Sequence[Load], resumes: int, chats: Chats | None) -> None:
        requests = [request for load in loads for request in load.requests]
        pause_s = max(load.longest_pause_s for load in loads)
        attempts, hits = len(requests) + resumes, chats.hits() if chats else None
        self._figures.append(Figure(self._title, round(pause_s, 2), len(requests), resumes, attempts, hits))

    # ---- what happens

    def let_pass(self, seconds: float) -> None:
        """A link that is down for a while is down for that while: no event ends it."""
        time.sleep(seconds)

    def unplug(self, host: str, seconds: float) -> None:
        self.site.unplug(host)
        self.let_pass(seconds)
        self.site.plug_in(host)

    def freeze(self, host: str, seconds: float) -> None:
        """The whole process stops: no thread of it answers."""
        began = time.monotonic()
        self.cluster.freeze(host)
        self.let_pass(seconds)
        self.cluster.thaw(host)
        took = time.monotonic() - began
        if took > STRETCH * seconds:
            self._pardoned |= without(host)
            self._title += f" ({took:.1f} s)"

    # ---- what must hold

    def check_streams(self, loads: Sequence[Load]) -> None:
        for load in loads:
            for request in load.requests:
                request.client.check()

    def check_broken_streams(self, load: Load) -> None:
        """What came before the declared error is the beginning of the unbroken run."""
        for client in [request.client for request in load.requests]:
            check_whole_or_broken(client)
