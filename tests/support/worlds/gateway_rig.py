"""A router's gateway without sockets: what it sends, logs and counts."""

from __future__ import annotations

import io

from prometheus_client import CollectorRegistry

from router.dispatch.gateway import Gateway
from shared.observe.log import Logger
from shared.observe.metrics import ClusterMetrics
from shared.wire.messages import Generate, Message
from shared.wire.peers import Inbound
from tests.support.worlds.router_rig import RouterRig


class StandIn:
    """In a link's place: keeps (peer, message)."""

    endpoint = "tcp://127.0.0.1:1"

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    async def receive(self) -> list[Inbound]:
        return []

    def send(self, peer: str, message: Message) -> bool:
        self.sent.append((peer, message))
        return True

    @property
    def generates(self) -> list[tuple[str, Generate]]:
        return [(peer, message) for peer, message in self.sent if isinstance(message, Generate)]


class GatewayRig:
    """`log`: lines; `metrics`: of the cluster."""

    def __init__(self, rig: RouterRig) -> None:
        self.rig, self.link, self.log, self.metrics = rig, StandIn(), io.StringIO(), CollectorRegistry()
        told = (ClusterMetrics(self.metrics), Logger("r", self.log))
        self.gateway = Gateway(("r", 9), rig.registry, rig.dispatcher, self.link, *told, lambda: rig.now)
