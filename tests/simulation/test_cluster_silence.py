"""How soon a host that vanished is missed, and how long one may be frozen: default settings, in virtual time."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from shared.core.sampling_params import SamplingParams
from tests.support.cores.core_rig import CoreKnobs
from tests.support.sim.cluster import Cluster
from tests.support.sim.plan import ClientPlan, ClusterPlan, FaultPlan, RequestPlan, RouterPlan, draw_base

CLIENTS = 8
STRIKE_AT = 1.4  # streams flow
LONGEST_PAUSE_S = 2.0
GIVEN_UP = "has heard nothing for too long"


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("shared.sched.loop").setLevel(logging.CRITICAL)


def plan_of(seed: int) -> ClusterPlan:
    """Two nodes of each kind with memory for all, and answers that take two seconds."""
    rng = random.Random(seed)
    base = next(plan for plan in map(draw_base, itertools.count(seed)) if len(plan.nodes) == 4)
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    same = {"knobs": CoreKnobs(num_pages=600, max_running=32), "transports": ("zmq",), "step_s": 0.01}
    nodes = tuple(
        replace(node, node_id=name, role=name.partition("-")[0], max_waiting=1024, clock_rate=1.0, **same)  # type: ignore[arg-type]
        for node, name in zip(base.nodes, names, strict=True)
    )
    clients = tuple(ClientPlan(1.0 + rng.uniform(0, 0.2), (request(rng),)) for _ in range(CLIENTS))
    return replace(
        base, mood="normal", nodes=nodes, clients=clients, routers=(RouterPlan("r0", "tcp://r0:7001", "least_load"),),
        faults=(FaultPlan(STRIKE_AT, "skew", 5.0, 0.0),), message_faults=(0.0, 0.0, 0.0, 0.0), local_tokens=0,
        max_attempts=3, resume_wait_s=10.0, queue_messages=4096,
    )  # fmt: skip


def request(rng: random.Random) -> RequestPlan:
    prompt = tuple(rng.randrange(95) for _ in range(60))
    return RequestPlan(prompt, 1, SamplingParams(max_tokens=200, temperature=0.0), seed=rng.getrandbits(60))


def run(seed: int, strike: Callable[[Cluster], None]) -> tuple[Cluster, dict[str, list[float]]]:
    """The cluster at its end, and the times at which each client's tokens came, after the one at which it asked."""
    cluster = Cluster(plan_of(seed))
    cluster.faults.strike = lambda _: None  # type: ignore[method-assign]
    cluster.timers.at(STRIKE_AT, lambda: strike(cluster))
    times = {client.name: [client.plan.at] for client in cluster.clients}
    for client in cluster.clients:
        client.read = noting(client.read, client, times[client.name])  # type: ignore[method-assign]
    try:
        cluster.run()
    finally:
        cluster.close()
    assert [client.outcome for client in cluster.clients[:CLIENTS]] == ["done"] * CLIENTS
    return cluster, times


def noting(read: Callable[[float], None], client: object, times: list[float]) -> Callable[[float], None]:
    def read_and_note(now: float) -> None:
        before = client.num_tokens  # type: ignore[attr-defined]
        read(now)
        if client.num_tokens > before:  # type: ignore[attr-defined]
            times.append(now)

    return read_and_note


@pytest.mark.parametrize("seed", range(2))
def test_streams_go_on_two_seconds_after_their_host_has_vanished(seed: int) -> None:
    def vanish(cluster: Cluster) -> None:
        host = next(host for host in cluster.nodes if host.name == "decode-0")
        host.kill(in_the_dark=True)
        cluster.timers.after(5.0, host.restart)

    cluster, times = run(seed, vanish)
    pauses = {name: max(b - a for a, b in itertools.pairwise(each)) for name, each in times.items()}
    assert max(pauses.values()) < LONGEST_PAUSE_S, pauses
    assert cluster.watch.steps["router", "P+D handed over", "retry"], "nothing was lost"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "r0"])
def test_a_host_frozen_for_a_second_is_given_up_by_nobody(victim: str, seed: int) -> None:
    def freeze(cluster: Cluster) -> None:
        host = next(host for host in (*cluster.nodes, *cluster.routers) if host.name == victim)
        host.freeze()
        cluster.timers.after(1.0, host.thaw)

    cluster, _ = run(seed, freeze)
    assert not [entry for entry in cluster.trace.entries if GIVEN_UP in entry.what]
    assert not [step for step in cluster.watch.steps if step[2] == "retry"]
