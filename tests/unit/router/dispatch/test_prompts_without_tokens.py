"""Who pays for a prompt that a node has computed, if the answer ends before its first token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from router.api.answer.generation_plan import PromptJob
from router.api.site.generation import DEADLINE, Generation
from router.http.connection import Connection
from router.text.hashlm import HashTokenizer
from shared.observe.metrics import RequestMetrics
from shared.wire.messages import Begun
from shared.wire.peers import PeerClosed, Received
from tests.support.worlds.gateway_rig import GatewayRig
from tests.support.worlds.router_rig import RouterRig
from tests.unit.router.answers.test_router_exchange import PLAN, CollectorRegistry, written

PROMPTS = ([1, 2, 3, 4], [5, 6])


class Answer(GatewayRig):
    """An answer to two prompts, from one decode node. The node begins only the first `num_begun` of them."""

    def __init__(self, num_begun: int, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(RouterRig())
        self.node = self.rig.join("decode", "d")
        plan = replace(PLAN, jobs=tuple(PromptJob(ids, 0, "") for ids in PROMPTS))
        metrics = RequestMetrics(CollectorRegistry())
        self.generation = Generation(plan, written, HashTokenizer(), self.gateway, metrics, time.monotonic())
        self._connection = Connection({"headers": list(headers)}, None, None, 5.0)  # type: ignore[arg-type]
        self._num_begun = num_begun

    async def run(self, ends: str) -> None:
        task = asyncio.create_task(self.generation.run(self._connection))
        await asyncio.sleep(0)
        keys = [generate.key for _, generate in self.link.generates[: self._num_begun]]
        self.gateway.handle(Received(self.node.peer, Begun("d", 1, keys)))
        if ends == "hangs up":
            task.cancel()
        elif ends == "is lost":
            self.gateway.handle(PeerClosed(self.node.peer))
        else:
            self.rig.now = 61.0  # the rig's time limit is 60 seconds
            self.rig.registry.seen(self.node, self.rig.now)
            self.gateway.tick()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is not None


def num_used(num_begun: int, ends: str, *headers: tuple[bytes, bytes]) -> int:
    answer = Answer(num_begun, *headers)
    asyncio.run(answer.run(ends))
    return answer.generation.num_used


@pytest.mark.parametrize(("num_begun", "expected"), [(0, 0), (1, 4), (2, 6)])
def test_a_client_that_hangs_up_pays_the_prompts_begun(num_begun: int, expected: int) -> None:
    assert num_used(num_begun, "hangs up") == expected


def test_a_client_whose_own_deadline_passes_pays_too() -> None:
    assert num_used(2, "is late", (DEADLINE, b"30000")) == 6


@pytest.mark.parametrize("ends", ["is lost", "is late"])
def test_a_client_that_we_fail_pays_nothing(ends: str) -> None:
    assert num_used(2, ends) == 0
