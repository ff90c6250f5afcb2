"""What a seed is in all: the base (see plan.py), or one of the loads that are about one thing each.

    base        normal, harsh or gentle; some with 8 to 12 nodes, up to three routers, paths that break in part
    overload    all is healthy, and the queue of the decode nodes is longer than several leases (once E1 is mended)
    one way     a prefill node can't reach a decode node, for as long as clients come
    drains      long streams of two or three routers, and nodes that are told to leave
    twins       a second router says the id of the first
    lost        single Generates come to nothing on their way, between a router and a node that are well
    pulls       prefill nodes copy cached pages from each other; faults and moods of the base
    tight pulls the same with pools that hold a few prompts, slow frames between prefill nodes, and nodes that die
                or freeze while they lend or copy

In overload, one way, drains, twins and lost generates nothing may fail. What is drawn here comes from a second source,
so that the base stays what it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.support.sim.plan import (
    ARRIVALS_FROM_S,
    GENERATE_FAULTS,
    PATH_FAULTS,
    PULL_FAULTS,
    ClientPlan,
    ClusterPlan,
    FaultPlan,
    NodePlan,
    RequestPlan,
    RouterPlan,
    draw_base,
    draw_nodes_of,
    draw_request,
)
from tests.support.sim.waiting import is_due

MOODS = 0x300D5
MANY_NODES, MANY_ROUTERS, PARTIAL, LOSING = 0.30, 0.15, 0.35, 0.25  # shares of the base's seeds
FROM_NODES, MOST_NODES = 8, 12
NO_FAULTS = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Load:
    """`defect`: what it is about; `waits`: drawn only when that is mended."""

    name: str
    share: float
    defect: str
    waits: bool
    make: Callable[[ClusterPlan, random.Random], ClusterPlan]

    def plan(self, seed: int) -> ClusterPlan:
        return self.make(draw_base(seed), random.Random(seed ^ MOODS))


def draw_plan(seed: int) -> ClusterPlan:
    base, rng = draw_base(seed), random.Random(seed ^ MOODS)
    chance = rng.random()
    for load in LOADS:
        if 0 <= chance < load.share and (is_due(load.defect) or not load.waits):
            return load.plan(seed)
        chance -= load.share
    return widened(base, rng)


# ---- the base, wider


def widened(plan: ClusterPlan, rng: random.Random) -> ClusterPlan:
    if rng.random() < MANY_NODES:
        plan = replace(plan, nodes=many_nodes(rng, has_limits=not plan.is_gentle))
    if rng.random() < MANY_ROUTERS:
        plan = replace(plan, routers=routers(rng.choice((2, 3)), plan.routers[0].policy))
    if rng.random() < PARTIAL and not plan.is_gentle:
        plan = replace(plan, faults=tuple(in_part(fault, PATH_FAULTS, rng) for fault in plan.faults))
    if rng.random() < LOSING and not plan.is_gentle:
        plan = replace(plan, faults=tuple(in_part(fault, GENERATE_FAULTS, rng) for fault in plan.faults))
    return plan


def many_nodes(rng: random.Random, *, has_limits: bool) -> tuple[NodePlan, ...]:
    count = rng.randint(FROM_NODES, MOST_NODES)
    prefills = rng.randint(2, count - 3)
    return draw_nodes_of(rng, prefills, count - prefills, has_limits=has_limits)


def routers(count: int, policy: str) -> tuple[RouterPlan, ...]:
    return tuple(RouterPlan(f"r{i}", f"tcp://r{i}:7001", policy) for i in range(count))


def in_part(fault: FaultPlan, kinds: tuple[str, ...], rng: random.Random) -> FaultPlan:
    return replace(fault, kind=rng.choice(kinds)) if rng.random() < 0.5 else fault


# ---- loads that are about one thing


def quiet(plan: ClusterPlan, mood: str, rng: random.Random, prefills: int, decodes: int) -> ClusterPlan:
    """Nothing breaks by itself, and no limit is so small that a request may be refused."""
    nodes = draw_nodes_of(rng, prefills, decodes, has_limits=False)
    page_size = nodes[0].knobs.page_size
    healthy = (replace(n, knobs=replace(n.knobs, page_size=page_size), max_waiting=1024) for n in nodes)
    return replace(
        plan,
        mood=mood,
        nodes=tuple(healthy),
        faults=(),
        message_faults=NO_FAULTS,
        max_attempts=5,
        resume_wait_s=20.0,
        queue_messages=4096,
        local_tokens=0,
        request_timeout_s=300.0,  # a node that is three times as slow gets as much, and does it in its time
    )


def sized(node: NodePlan, pages_of_16: int, max_running: int, step_s: float) -> NodePlan:
    pages = pages_of_16 * 16 // node.knobs.page_size
    knobs = replace(node.knobs, num_pages=pages + 1, max_running=max_running)
    return replace(node, knobs=knobs, step_s=step_s)


def long_requests(rng: random.Random, count: int, spread: float, max_tokens: tuple[int, ...]) -> tuple[ClientPlan, ...]:
    """One prompt each, without a stop before its length."""
    stems = [tuple(rng.randrange(95) for _ in range(rng.randrange(5, 100))) for _ in range(3)]
    clients = []
    for _ in range(count):
        request = draw_request(rng, stems)
        sampling = replace(
            request.sampling, max_tokens=rng.choice(max_tokens), stop_token_ids=(), min_tokens=0, grammar=""
        )
        request = RequestPlan(request.prompt, request.num_sequences, sampling, request.seed)
        clients.append(ClientPlan(ARRIVALS_FROM_S + rng.uniform(0, spread), (request,)))
    return tuple(sorted(clients, key=lambda client: client.at))


def alone(client: ClientPlan) -> ClientPlan:
    """One sequence of each prompt."""
    return replace(client, requests=tuple(replace(request, num_sequences=1) for request in client.requests))


def overload(plan: ClusterPlan, rng: random.Random) -> ClusterPlan:
    """A few rows at a time, for some thirty answers at once. All nodes have memory for a few prompts only: what prefill
    nodes computed without a grant gives way and is computed again, and a long offer waits where a short one fits. Four
    routers send them, each what it sees room for: one alone would keep the rest in its queue."""
    plan = quiet(plan, "overload", rng, rng.choice((1, 1, 2)), rng.choice((1, 1, 2)))
    nodes = tuple(overloaded(node, rng) for node in plan.nodes)
    num_decodes = sum(node.role == "decode" for node in nodes)
    clients = long_requests(rng, 22 * num_decodes, 0.5, (40, 60, 80))
    several = routers(4, plan.routers[0].policy)
    return replace(plan, nodes=nodes, clients=clients, routers=several, lease_s=2.0 if is_due("E1") else 60.0)


def overloaded(node: NodePlan, rng: random.Random) -> NodePlan:
    """Steps of many rows, and those with drafts, bring many tokens: they take longer."""
    if node.role == "prefill":
        return sized(replace(node, knobs=replace(node.knobs, chunk_size=32)), rng.choice((14, 16, 30)), 8, 0.02)
    rows = rng.choice((2, 4, 6))
    return sized(node, rng.choice((14, 16, 30)), rows, 0.015 * rows * (1 + node.knobs.width // 2))


def one_way(plan: ClusterPlan, rng: random.Random) -> ClusterPlan:
    """Few requests at a time, a lease that nobody would like to wait for, and one pair that does not get together."""
    prefills, decodes = rng.choice(((1, 2), (1, 3), (2, 3)))  # whatever the policy, each pair gets its turn
    plan = quiet(plan, "one way", rng, prefills, decodes)
    nodes = tuple(sized(node, 200, 8, 0.005) for node in plan.nodes)
    clients = long_requests(rng, 30, 15.0, (5, 17, 40))
    pair = (rng.choice([n.node_id for n in nodes if n.role == "prefill"]), rng.choice(("decode-0", "decode-1")))
    kind, at = rng.choice((("one way", 0.0), ("one way", 2.0), ("no answer", 0.0)))
    path = pair if kind == "no answer" or rng.random() < 0.5 else (pair[1], pair[0])
    fault = FaultPlan(at, kind, clients[-1].at + 4.0, 0.0, path)
    return replace(plan, nodes=nodes, clients=clients, faults=(fault,), lease_s=20.0)


def drains(plan: ClusterPlan, rng: random.Random) -> ClusterPlan:
    plan = quiet(plan, "drains", rng, 2, 3)
    nodes = tuple(sized(node, 200, 8, 0.04 * (1 + node.knobs.width // 2)) for node in plan.nodes)
    clients = tuple(map(alone, long_requests(rng, 20, 3.0, (40, 200))))
    kinds = ("admin drain", "role change", *(("drain at one router",) * 4 if is_due("E18") else ()))
    times = sorted(rng.uniform(1.5, 3.0) for _ in range(3))
    faults = tuple(FaultPlan(at, rng.choice(kinds), rng.choice((0.2, 0.5, 1.0)), 0.0) for at in times)
    return replace(
        plan, nodes=nodes, clients=clients, faults=faults, routers=routers(rng.choice((2, 3)), plan.routers[0].policy)
    )


def twins(plan: ClusterPlan, rng: random.Random) -> ClusterPlan:
    """The second one starts when the first has work."""
    plan = quiet(plan, "twins", rng, rng.choice((1, 2)), 2)
    first = routers(1, plan.routers[0].policy)[0]
    late = replace(first, endpoint="tcp://twin:7001", name="twin", first_epoch=100, starts_at=rng.uniform(1.2, 3.0))
    nodes = tuple(sized(node, 200, 8, 0.01) for node in plan.nodes)
    clients = long_requests(rng, 24, 4.0, (17, 40, 80))
    return replace(plan, nodes=nodes, clients=clients, routers=(first, late))


def lost_generates(plan: ClusterPlan, rng: random.Random) -> ClusterPlan:
    """Bursts and pauses: some are followed by others on the same connection, and some are the last for long."""
    plan = quiet(plan, "lost generates", rng, *rng.choice(((1, 2), (2, 2), (2, 3), (0, 3))))
    nodes = tuple(sized(node, 200, 8, 0.01) for node in plan.nodes)
    clients = long_requests(rng, 30, 12.0, (5, 17, 40, 80))
    times = sorted(rng.uniform(0.5, clients[-1].at) for _ in range(8))
    faults = tuple(FaultPlan(at, rng.choice(GENERATE_FAULTS), 0.0, rng.random()) for at in times)
    several = routers(rng.choice((1, 2)), plan.routers[0].policy)
    return replace(plan, nodes=nodes, clients=clients, faults=faults, routers=several)


def pulls(plan: ClusterPlan, rng: random.Random) -> ClusterPlan:
    """The base with its faults; but long prompts begin alike and come to several prefill nodes in turn, so that these
    pull pages from each other."""
    prefills, decodes = rng.choice(((2, 1), (3, 1), (3, 2), (4, 2), (2, 0), (3, 0)))
    nodes = draw_nodes_of(rng, prefills, decodes, has_limits=not plan.is_gentle)
    cached = (replace(node, knobs=replace(node.knobs, prefix_cache=True)) for node in nodes)
    spread = rng.choice((3.0, 8.0))
    stems = [tuple(rng.randrange(95) for _ in range(rng.randrange(80, 150))) for _ in range(3)]
    clients = [pulling_client(rng, stems, spread) for _ in range(rng.randint(24, 32))]
    first = replace(plan.routers[0], policy=rng.choice(("round_robin", "round_robin", "least_load", "prefix_aware")))
    return replace(
        plan,
        nodes=tuple(cached),
        clients=tuple(sorted(clients, key=lambda client: client.at)),
        routers=tuple(replace(router, policy=first.policy) for router in plan.routers),
        local_tokens=0,
    )


def in_page_groups(plan: ClusterPlan, lower_window: int | None = 0) -> ClusterPlan:
    """The same, with a model whose upper layer has a window: its pages are in a group of their own."""
    window = 5 + plan.seed % 40
    model = {"window": window, "lower_window": lower_window}
    nodes = tuple(
        replace(node, knobs=replace(node.knobs, num_pages=2 * node.knobs.num_pages, **model)) for node in plan.nodes
    )
    clients = tuple(
        replace(client, requests=tuple(replace(one, windows=(window, lower_window)) for one in client.requests))
        for client in plan.clients
    )
    return replace(plan, nodes=nodes, clients=clients)


def pulling_client(rng: random.Random, stems: list[tuple[int, ...]], spread: float) -> ClientPlan:
    request = draw_request(rng, stems)
    prompt = rng.choice(stems) + tuple(rng.randrange(95) for _ in range(rng.randrange(1, 20)))
    hangs_up_after = rng.choice((None, None, None, None, rng.uniform(0.0, 0.3)))
    return ClientPlan(ARRIVALS_FROM_S + rng.uniform(0, spread), (replace(request, prompt=prompt),), hangs_up_after)


def tight_pulls(plan: ClusterPlan, rng: random.Random) -> ClusterPlan:
    """Prompts come in waves. Loans and pulls take a good part of each pool, so they give way to the rest of a wave and
    to rows that grow."""
    plan = pulls(plan, rng)
    stems = [tuple(rng.randrange(95) for _ in range(rng.randrange(80, 150))) for _ in range(5)]
    clients = [growing(pulling_client(rng, stems, 0.5), rng) for _ in range(64)]
    clients = [replace(client, at=client.at + 1.2 * (number % 4)) for number, client in enumerate(clients)]
    clients.sort(key=lambda client: client.at)
    prefills, decodes = rng.choice(((3, 0), (4, 0), (4, 1)))
    nodes = draw_nodes_of(rng, prefills, decodes, has_limits=not plan.is_gentle)
    names = [node.node_id for node in nodes if node.role == "prefill"]
    until = clients[-1].at
    ways: dict[frozenset[str], FaultPlan] = {}
    while len(ways) < 3:  # on pairs of their own: the end of one way would end another one there
        at, (first, second) = rng.uniform(0.5, until), rng.sample(names, 2)
        ways.setdefault(frozenset((first, second)), FaultPlan(at, "slow frames", until, 0.0, (first, second)))
    deaths = [pull_fault(rng, until) for _ in range(rng.randint(1, 3))] if not plan.is_gentle else []
    return replace(
        plan,
        clients=tuple(clients),
        routers=tuple(replace(router, policy="round_robin") for router in plan.routers),
        nodes=tuple(tight(node, rng) for node in nodes),
        faults=tuple(sorted((*plan.faults, *ways.values(), *deaths), key=lambda fault: fault.at)),
    )


def tight(node: NodePlan, rng: random.Random) -> NodePlan:
    """A decode node has room for all: it must not keep prompts waiting until their time is over."""
    knobs = replace(node.knobs, prefix_cache=True, chunk_size=32)
    pages = 400 if node.role == "decode" else rng.choice((32, 40, 48))
    return sized(replace(node, knobs=knobs), pages, 32 if node.role == "decode" else 8, 0.01)


def growing(client: ClientPlan, rng: random.Random) -> ClientPlan:
    """Its row grows by a few pages."""
    (request,) = client.requests
    sampling = replace(request.sampling, max_tokens=rng.choice((40, 60, 100)))
    return replace(client, requests=(replace(request, sampling=sampling, closes=()),))


def pull_fault(rng: random.Random, until: float) -> FaultPlan:
    return FaultPlan(rng.uniform(ARRIVALS_FROM_S, until), rng.choice(PULL_FAULTS), rng.choice((0.5, 2.0)), rng.random())


LOADS = (
    Load("overload", 0.05, "E1", False, overload),
    Load("one way", 0.04, "E2", True, one_way),
    Load("drains", 0.04, "E18", False, drains),
    Load("twins", 0.03, "E19", True, twins),
    Load("pulls", 0.04, "E1", False, pulls),
    Load("tight pulls", 0.05, "E1", False, tight_pulls),
    Load("lost generates", 0.05, "unanswered", False, lost_generates),
)
