"""One node of a busy cluster goes, in every way there is, and every stream still comes out whole and equal to the
unbroken one: 32 clients, two nodes of each kind, time and steps bounded."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest

from tests.support.cores.core_rig import CoreKnobs
from tests.support.sim.cluster import Cluster
from tests.support.sim.plan import ClientPlan, ClusterPlan, FaultPlan, RequestPlan, RouterPlan, draw_base, draw_request

CLIENTS = 32
OTHER_ENDS = ("power loss", "partition", "freeze", "reset", "stop signal", "role change")
STRIKE_AT = {"prefill": 1.06, "decode": 1.25}  # prompts are computed, answers stream
MOST_S = 10.0  # of simulated time, for all streams to go on and end


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("shared.sched.loop").setLevel(logging.CRITICAL)


def plan_of(seed: int, transport: str = "zmq") -> ClusterPlan:
    """Two and two, with memory for all; long answers, sequences that stop at different times, and no hang-ups."""
    base = next(plan for plan in map(draw_base, range(seed, seed + 1000)) if len(plan.nodes) == 4)
    rng = random.Random(seed)
    stems = [tuple(rng.randrange(95) for _ in range(80)) for _ in range(3)]
    requests = [draw_request(rng, stems) for _ in range(CLIENTS)]
    requests = [
        replace(r, sampling=replace(r.sampling, max_tokens=80, stop_token_ids=(), grammar="")) for r in requests
    ]
    clients = tuple(ClientPlan(1.0 + rng.uniform(0, 0.1), (request,)) for request in requests)
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    knobs = CoreKnobs(num_pages=400, max_running=32)
    nodes = tuple(
        replace(node, node_id=name, role=name.partition("-")[0], knobs=knobs, transports=(transport,), step_s=0.01,
                max_waiting=1024, clock_rate=1.0)
        for node, name in zip(base.nodes, names, strict=True)
    )  # fmt: skip
    return replace(
        base,
        seed=seed,
        mood="normal",
        nodes=nodes,
        routers=(RouterPlan("r0", "tcp://r0:7001", "least_load"),),
        clients=clients,
        message_faults=(0.0, 0.0, 0.0, 0.0),
        local_tokens=0,
        max_attempts=3,
        resume_wait_s=5.0,
        queue_messages=4096,
    )


def run(plan: ClusterPlan, victim: str, kind: str) -> Cluster:
    cluster = Cluster(replace(plan, faults=(FaultPlan(0.0, "skew", 0.0, 0.0),)))
    host = next(host for host in cluster.nodes if host.name == victim)
    at = STRIKE_AT[host.plan.role]
    fault = FaultPlan(at, kind, 3.0, 0.0)
    cluster.faults.strike = lambda _: None  # type: ignore[method-assign]

    def strike() -> None:
        assert any(node.node_id == victim for r in cluster.routers[0].journal.all() for node in r.attempt.nodes)
        cluster.faults.hit(host, fault)

    cluster.timers.at(at, strike)
    try:
        cluster.run()
    finally:
        cluster.close()
    return cluster


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("kind", ["crash", *OTHER_ENDS])
@pytest.mark.parametrize("transport", ["zmq", "gloo"])
def test_every_stream_survives_one_node(transport: str, kind: str, victim: str) -> None:
    cluster = run(plan_of(len(kind) + len(victim), transport), victim, kind)
    clients = cluster.clients[:CLIENTS]
    assert [client.outcome for client in clients] == ["done"] * CLIENTS
    assert max(client.ended_at for client in clients) - STRIKE_AT["prefill"] < MOST_S


def read_by_an_encoder(request: RequestPlan) -> RequestPlan:
    """Routers refuse to have such a prompt scored."""
    return replace(request, encoder=True, sampling=replace(request.sampling, prompt_logprobs=-1, grammar=""))


def test_what_a_decoder_said_is_no_encoder_s_input_elsewhere() -> None:
    """The next node gets the encoder's input and the decoder's text so far, and must not read the one as the other."""
    plan = plan_of(9)
    nodes = tuple(replace(node, knobs=replace(node.knobs, encoder=True)) for node in plan.nodes)
    clients = tuple(replace(c, requests=tuple(map(read_by_an_encoder, c.requests))) for c in plan.clients)
    cluster = run(replace(plan, nodes=nodes, clients=clients), "decode-0", "crash")
    assert [client.outcome for client in cluster.clients[:CLIENTS]] == ["done"] * CLIENTS
    assert sum(count for (_, _, how), count in cluster.watch.steps.items() if how == "retry") > 0


def test_death_costs_only_the_work_that_was_lost() -> None:
    """Steps of the broken run against those of a whole one: what was emitted is prefilled again, nothing more."""
    whole = run(plan_of(5), "decode-0", "slow path")
    broken = run(plan_of(5), "decode-0", "crash")
    assert broken.watch.steps["router", "P+D handed over", "retry"] > 0
    assert broken.num_steps < 2 * whole.num_steps
