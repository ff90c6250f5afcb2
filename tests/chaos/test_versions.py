"""Two versions of the protocol in one cluster: all routers serve through all pairs of nodes, under load and kills."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.wire.messages import Installed, Tokens
from tests.support.clusters.chaos_cluster import ChaosCluster, chaos_cluster
from tests.support.clusters.neighbours import next_version, version_before
from tests.support.machine.installed import Environment, build_wheel
from tests.support.web.sdk_clients import fresh_clients, stream_all
from tests.support.wire.proxy import Seen, Trap

OTHERS = ("router1", "p1", "d1")  # these run the other version, and router0, p0 and d0 run ours
PAIRINGS = {(router, p, d) for router in ("router0", "router1") for p in ("p0", "p1") for d in ("d0", "d1")}
MOST_ROUNDS = 20  # until chance has sent requests through every pairing


def installed_neighbour(folder: Path) -> list[str]:
    """Build the neighbour's wheel and install it. Return its `baton` command."""
    environment = Environment(folder, build_wheel(folder, version_before(folder / "source")))
    environment.use_kernels_of_checkout()
    return [str(environment.bin / "baton")]


def patched_copy(folder: Path) -> list[str]:
    return [sys.executable, "-P", str(next_version(folder) / "shared/core/launcher.py"), "deploy.cli"]


COMMANDS = {"before": installed_neighbour, "next": patched_copy}


@pytest.fixture(params=COMMANDS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    folder = tmp_path_factory.mktemp("versions")
    others = dict.fromkeys(OTHERS, COMMANDS[version](folder / version))
    with chaos_cluster(folder, routers=2, others=others) as cluster:
        yield cluster


def test_two_versions_serve_in_every_pairing(cluster: ChaosCluster, version: str) -> None:
    served: set[tuple[str, str, str]] = set()

    def note(seen: Seen) -> bool:
        if isinstance(seen.message, Installed):
            served.add((seen.message.key.router_id, seen.receiver, seen.sender))
        return False

    cluster.proxy.traps.append(Trap(note, lambda seen: None))
    for _ in range(MOST_ROUNDS):
        run_at_both(cluster)
        if served == PAIRINGS:
            break
    assert served == PAIRINGS
    for victims in (("p1", "d0"), ("p0", "d1")):  # a prefill node of one version and a decode node of the other stay
        run_and_kill(cluster, *victims)
    cluster.check_whole()
    assert "dropped a message" not in cluster.logs() and "do not fit together" not in cluster.logs()
    if version == "next":
        check_news(cluster)


def run_at_both(cluster: ChaosCluster) -> None:
    async def both() -> None:
        await asyncio.gather(*(stream_all(router.url, clients) for router, clients in asked))

    asked = [(router, fresh_clients()) for router in cluster.routers]
    asyncio.run(both())
    for _, clients in asked:
        for client in clients:
            client.check()


def run_and_kill(cluster: ChaosCluster, prefill: str, decode: str) -> None:
    """Kill both in mid answer. The streams go on at the other two."""

    def is_token(seen: Seen) -> bool:
        return isinstance(seen.message, Tokens) and seen.sender == decode and bool(seen.message.runs)

    def strike(seen: Seen) -> None:
        cluster.kill(prefill)
        cluster.kill(decode)

    trap = Trap(is_token, strike, nth=10)
    cluster.proxy.traps.append(trap)
    run_at_both(cluster)
    assert trap.fired.is_set()
    cluster.heal()


def check_news(cluster: ChaosCluster) -> None:
    """Newer processes exchange their news, and no others hear of them."""
    ours, newer = ("\n".join(router.lines) for router in cluster.routers)
    for node in ("p", "d"):
        assert f"a mood of={node}1 mood=content" in newer and f"a mood of={node}0 mood=unsaid" in newer
        assert f"a cheer of={node}1" in newer and f"a cheer of={node}0" not in newer
        assert "a cheer of=router1" in cluster.nodes[f"{node}1"].log and "a cheer" not in cluster.nodes[f"{node}0"].log
    assert "a cheer" not in ours and "a mood" not in ours
