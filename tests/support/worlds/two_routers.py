"""Routers that share nodes, without sockets: the production gateways and nodes, in turns, in a time that the test
tells."""

from __future__ import annotations

import io
from collections import defaultdict

from prometheus_client import CollectorRegistry

from router.dispatch.gateway import TICK_S, Gateway
from router.queue.rate_limit import RateLimits
from router.queue.spending import Ledger
from router.requests.effects import Failure, Update
from router.requests.mailbox import Mailbox
from router.requests.new_request import NewRequest
from router.tenants.book import Tenants
from router.tenants.keys_file import NO_KEYS, parse_keys
from shared.core.sampling_params import SamplingParams
from shared.node.loop.node import Node
from shared.node.records.mail import Dial, HangUp, Outgoing
from shared.node.routers.dialled import Routers
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.observe.metrics import ClusterMetrics
from shared.wire.codec import decode, encode
from shared.wire.messages import Message
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.worlds.node_pair import make_node, name_of
from tests.support.worlds.router_rig import RouterRig

A, B = "tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"


class Router:
    """One life of a router, and the link in which its messages wait for the nodes."""

    def __init__(self, site: Site, endpoint: str, router_id: str, epoch: int) -> None:
        self._site, self.endpoint = site, endpoint
        self.rig = RouterRig(max_attempts=1, resume_wait_s=10.0, identity=(router_id, epoch), policy=site.policy)
        self._lines, self.metrics = io.StringIO(), CollectorRegistry()
        self.tenants, self.limits = Tenants(parse_keys(site.keys_text) if site.keys_text else NO_KEYS), RateLimits()
        books = (self.tenants.now.stream_secret, self.tenants, self.limits, self.rig.dispatcher.queue)
        ledger = Ledger((router_id, epoch), *books, site.now)
        parts = (self.rig.registry, self.rig.dispatcher, self, ClusterMetrics(self.metrics))
        log = Logger(router_id, self._lines)
        self.gateway = Gateway((router_id, epoch), *parts, log, lambda: site.now, ledger=ledger)

    async def receive(self) -> list[Received]:
        return []

    def send(self, peer: str, message: Message) -> bool:
        self._site.inboxes[peer].append(Received(self.endpoint, decode(encode(message))))
        return True

    def open(self, job: Job) -> Mailbox:
        return self.gateway.open([NewRequest(list(job.prompt), 1, job.sampling, seed=job.seed)])

    def nodes(self) -> list[str]:
        return sorted(node.node_id for node in self.rig.registry.usable(self._site.now))

    def log(self, *words: str) -> list[str]:
        """Lines that hold any of these words."""
        return [line for line in self._lines.getvalue().splitlines() if any(word in line for word in words)]

    @property
    def num_resumed(self) -> float:
        return self.metrics.get_sample_value("baton_resumed_total") or 0.0


class Site:
    """Time goes in ticks of a gateway; a node takes a step or two in each."""

    def __init__(self, policy: str = "least_load", keys_text: str = "") -> None:
        self.now, self.policy, self.keys_text = 0.0, policy, keys_text
        self.routers: dict[str, Router] = {}
        self.nodes: dict[str, Node] = {}
        self.inboxes: dict[str, list[Inbound]] = defaultdict(list)
        self.hung_up: list[tuple[str, str]] = []  # (node, router that is not on its list)

    def router(self, endpoint: str, router_id: str, epoch: int) -> Router:
        """Start one; what was there is gone, its connections too."""
        self.lose(endpoint)
        router = self.routers[endpoint] = Router(self, endpoint, router_id, epoch)
        for name, node in self.nodes.items():
            if endpoint in node.ctx.routers.dialled:
                self.inboxes[name].append(PeerUp(endpoint))
        return router

    def lose(self, endpoint: str) -> None:
        if self.routers.pop(endpoint, None) is not None:
            for name in self.nodes:
                self.inboxes[name].append(PeerClosed(endpoint))

    def node(self, role: str, node_id: str, listed: tuple[str, ...] = (A, B)) -> Node:
        node = make_node(role, node_id, CoreKnobs())
        node.ctx.routers, node.ctx.clock = Routers(listed), lambda: self.now
        node.ctx.log = LogOnce(Logger(node_id, io.StringIO()))
        self.nodes[name_of(node)] = node
        self.inboxes[name_of(node)].extend(PeerUp(endpoint) for endpoint in self.routers if endpoint in listed)
        return node

    def list_routers(self, node: Node, *endpoints: str) -> None:
        """Its list says something else now."""
        for action in node.listed(endpoints, self.now):
            self._carry(name_of(node), action)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            for name, node in self.nodes.items():
                inbox, self.inboxes[name] = self.inboxes[name], []
                for action in node.tick(inbox, self.now):
                    self._carry(name, action)
            for router in list(self.routers.values()):
                router.gateway.tick()
            self.now += TICK_S

    def _carry(self, name: str, action: Dial | Outgoing | HangUp) -> None:
        if isinstance(action, Outgoing) and action.peer in self.routers:
            message = Received(name, decode(encode(action.message)))
            self.routers[action.peer].gateway.handle(message)
        elif isinstance(action, HangUp) and action.peer not in self.nodes[name].ctx.routers.listed():
            self.hung_up.append((name, action.peer))
            if action.peer in self.routers:
                self.routers[action.peer].gateway.handle(PeerClosed(name))
        elif isinstance(action, Dial) and action.peer in self.routers:
            self.inboxes[name].append(PeerUp(action.peer))


def job(number: int, max_tokens: int = 300) -> Job:
    return Job(number, tuple(range(20 + number)), SamplingParams(max_tokens=max_tokens, temperature=0.0), number)


def ids_of(mailbox: Mailbox) -> list[int]:
    return [token for news in mailbox._news if isinstance(news, Update) for token in news.ids]


def failures_of(mailbox: Mailbox) -> list[str]:
    return [news.error.code for news in mailbox._news if isinstance(news, Failure)]
