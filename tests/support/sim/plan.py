"""What one seed is: the shape of the cluster, the requests and the faults, all drawn before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from shared.config.settings.router_settings import BY_COST
from shared.config.settings.settings import TimeoutsConfig
from shared.core.sampling_params import SamplingParams
from tests.support.cores.core_rig import CoreKnobs, draw_sampling
from tests.support.oracles.grammar_oracle import GRAMMARS, following

ARRIVALS_FROM_S = 1.0  # nodes have dialled in by then
PATH_FAULTS = ("one way", "no answer", "full queue", "cut within")
FAULTS = (
    "crash", "power loss", "partition", "short partition", "reset", "half open", "freeze", "slow node", "slow path",
    "stuck loop", "skew", "stop signal", "router restart", "router freeze", "forced retraction", "failed step",
    "admin drain", "role change",
)  # fmt: skip
GENERATE_FAULTS = ("unreadable", "unreadable key", "vanished", "earlier life")  # each hits the next Generate
PULL_FAULTS = ("lender dies", "borrower dies", "lender freezes")  # they hit a node while pages are pulled
GENTLE_FAULTS = ("stop signal", "admin drain", "role change", "slow node", "slow path", "short partition")
GENTLE = ("gentle", "overload", "one way", "drains", "twins", "lost generates")
GRAMMAR_EVERY = 7  # on average one request in seven follows a grammar
SHAPES = ((1, 1), (1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (3, 3), (2, 3), (0, 2), (2, 0))  # prefill, decode


@dataclass(frozen=True)
class NodePlan:
    node_id: str
    role: str
    knobs: CoreKnobs
    transports: tuple[str, ...]
    step_s: float
    clock_offset: float
    clock_rate: float
    wall_offset_us: int
    max_waiting: int


@dataclass(frozen=True)
class RouterPlan:
    """`name`: the host's, where another router says the same id. `starts_at`: seconds."""

    router_id: str
    endpoint: str
    policy: str
    name: str = ""
    first_epoch: int = 0
    starts_at: float = 0.0


@dataclass(frozen=True)
class RequestPlan:
    """One prompt of an HTTP request. `closes`: (sequence, tokens) after which the router finds a stop string."""

    prompt: tuple[int, ...]
    num_sequences: int
    sampling: SamplingParams
    seed: int
    closes: tuple[tuple[int, int], ...] = ()
    encoder: bool = False  # whether the model has one
    windows: tuple[int, int | None] = (0, None)  # of the model: see HashLM


@dataclass(frozen=True)
class ClientPlan:
    """One HTTP request. `hangs_up_after`: seconds, or tokens seen when below zero."""

    at: float
    requests: tuple[RequestPlan, ...]
    hangs_up_after: float | None = None


@dataclass(frozen=True)
class FaultPlan:
    at: float
    kind: str
    lasts: float
    draw: float  # in [0, 1): decides targets
    pair: tuple[str, str] | None = None  # two hosts in order, where the plan itself aims


@dataclass(frozen=True)
class ClusterPlan:
    """Times in seconds. harsh: single messages are lost, repeated, reordered and damaged too. gentle: nothing breaks,
    nodes are only drained, restarted and slow, and then no request may fail; nor in the loads of moods.py."""

    seed: int
    mood: str  # "normal", "harsh" or one of GENTLE
    nodes: tuple[NodePlan, ...]
    routers: tuple[RouterPlan, ...]
    clients: tuple[ClientPlan, ...]
    faults: tuple[FaultPlan, ...]
    message_faults: tuple[float, float, float, float]  # chances: drop, repeat, reorder, corrupt
    local_tokens: int
    max_attempts: int
    resume_wait_s: float
    max_open: int = 1000
    queue_messages: int = 4096
    request_timeout_s: float = 40.0
    silence_s: float = TimeoutsConfig().node_silence_s
    lease_s: float = 6.0
    drain_s: float = 3.0
    pulls: bool = True  # prefill nodes copy cached pages from each other

    @property
    def is_harsh(self) -> bool:
        return self.mood == "harsh"

    @property
    def may_take_long(self) -> bool:
        """Requests may need all of their time: what a harsh network lost is made up for late, a queue may be long."""
        return self.is_harsh or self.mood == "overload"

    @property
    def is_gentle(self) -> bool:
        return self.mood in GENTLE

    @property
    def last_arrival(self) -> float:
        return max(client.at for client in self.clients)


def draw_local_tokens(rng: random.Random, seed: int) -> int:
    """By cost for half of those that don't hand everything over. The seed says for which: nothing more is drawn."""
    drawn = rng.choice((0, 0, 16))
    return BY_COST if drawn and seed % 2 else drawn


def draw_base(seed: int) -> ClusterPlan:
    """One of the first three moods, with 2 to 6 nodes."""
    rng = random.Random(seed)
    mood = rng.choice(("normal",) * 6 + ("harsh",) * 3 + ("gentle",))
    is_gentle = mood == "gentle"
    clients = draw_clients(rng)
    return ClusterPlan(
        seed=seed,
        mood=mood,
        nodes=draw_nodes(rng, has_limits=not is_gentle),
        routers=draw_routers(rng),
        clients=clients,
        faults=draw_faults(rng, max(client.at for client in clients), mood),
        message_faults=draw_message_faults(rng) if mood == "harsh" else (0.0, 0.0, 0.0, 0.0),
        local_tokens=draw_local_tokens(rng, seed),
        max_attempts=5 if is_gentle else rng.choice((1, 2, 3, 5)),
        resume_wait_s=20.0 if is_gentle else rng.choice((0.0, 2.0, 10.0)),
        queue_messages=4096 if is_gentle else rng.choice((4096, 4096, 4096, 40)),
    )


def draw_message_faults(rng: random.Random) -> tuple[float, float, float, float]:
    """Few at a time or many: where most messages are fine, the consequences of one that is not go further."""
    drop, repeat, reorder = (rng.choice((0.0, 0.005, 0.02, 0.1)) for _ in range(3))
    return drop, repeat, reorder, rng.choice((0.0, 0.05))


def draw_routers(rng: random.Random) -> tuple[RouterPlan, ...]:
    count = rng.choice((1, 1, 1, 2))
    policy = rng.choice(("prefix_aware", "least_load", "round_robin"))
    return tuple(RouterPlan(f"r{i}", f"tcp://r{i}:7001", policy) for i in range(count))


def draw_nodes(rng: random.Random, *, has_limits: bool) -> tuple[NodePlan, ...]:
    """2 to 6 nodes."""
    return draw_nodes_of(rng, *rng.choice(SHAPES), has_limits=has_limits)


def draw_nodes_of(rng: random.Random, prefills: int, decodes: int, *, has_limits: bool) -> tuple[NodePlan, ...]:
    """Those of one cluster agree on what their fingerprints say, except one now and then."""
    width = rng.choice((1, 1, 1, 4))
    shared = CoreKnobs(page_size=rng.choice((4, 16, 16)), width=width)
    transports = rng.choice((("zmq",), ("zmq",), ("zmq",), ("shm", "zmq")))
    roles = [f"prefill-{i}" for i in range(prefills)] + [f"decode-{i}" for i in range(decodes)]
    odd = rng.choice(roles) if rng.random() < 0.1 else ""
    nodes = (draw_node(rng, name, shared, transports, is_odd=name == odd) for name in roles)
    return tuple(node if has_limits else replace(node, max_waiting=1024) for node in nodes)


def draw_node(
    rng: random.Random, name: str, shared: CoreKnobs, transports: tuple[str, ...], *, is_odd: bool
) -> NodePlan:
    role = name.partition("-")[0]
    page_size = 8 if is_odd else shared.page_size
    pages = rng.choice((20, 30, 60, 200)) * 16 // page_size
    chunk_size = rng.choice((7, 32, 64, 256))
    knobs = replace(
        shared,
        backend=rng.choice(("inline", "inline", "simulated")),
        overlap=rng.random() < 0.8,
        chunk_size=chunk_size,
        mix=rng.random() < 0.8,
        page_size=page_size,
        num_pages=pages + 1,
        max_running=rng.choice((2, 4, 8)),
        prefix_cache=rng.random() < 0.8,
        needs_cpu_seq_lens=shared.width > 1 and rng.random() < 0.3,
        shared_memory=role == "prefill" and "shm" in transports,
        max_ungranted_pages=rng.choice((1 << 30, pages // 2, 4)),
        growth_reserve=1.0 if chunk_size in (32, 256) else 0.0,  # not drawn, so that seeds stay what they were
    )
    return NodePlan(
        node_id=name,
        role=role,
        knobs=knobs,
        transports=transports,
        step_s=rng.choice((0.002, 0.005, 0.02)),
        clock_offset=rng.uniform(0, 1e5),
        clock_rate=rng.choice((1.0, 1.0, 0.98, 1.02)),
        wall_offset_us=rng.randint(-(10**9), 10**9),
        max_waiting=rng.choice((1024, 1024, 6)),
    )


def draw_clients(rng: random.Random) -> tuple[ClientPlan, ...]:
    """20 prompts or more; many share their beginnings."""
    stems = [tuple(rng.randrange(95) for _ in range(rng.randrange(5, 150))) for _ in range(3)]
    spread = rng.choice((0.5, 3.0, 8.0))
    clients: list[ClientPlan] = []
    num_requests, wanted = 0, rng.randint(20, 28)
    while num_requests < wanted:
        count = rng.choice((1, 1, 1, 1, 2))
        requests = tuple(draw_request(rng, stems) for _ in range(count))
        num_requests += count
        clients.append(ClientPlan(ARRIVALS_FROM_S + rng.uniform(0, spread), requests, draw_hang_up(rng)))
    return tuple(sorted(clients, key=lambda client: client.at))


def draw_request(rng: random.Random, stems: list[tuple[int, ...]]) -> RequestPlan:
    stem = rng.choice(stems)
    prompt = stem[: rng.randrange(1, len(stem) + 1)] + tuple(rng.randrange(95) for _ in range(rng.randrange(0, 20)))
    num_sequences = rng.choice((1, 1, 1, 1, 2, 3))
    sampling = draw_sampling(rng)
    closes = ()
    if rng.random() < 0.15:
        closes = ((rng.randrange(num_sequences), rng.randint(1, sampling.max_tokens)),)
    seed = rng.getrandbits(63)
    return RequestPlan(prompt, num_sequences, with_grammar(sampling, seed), seed, closes)


def with_grammar(sampling: SamplingParams, seed: int) -> SamplingParams:
    """Some follow a grammar. It is not drawn, but follows, so that seeds stay what they were."""
    number, rest = divmod(seed, GRAMMAR_EVERY)
    if rest:
        return sampling
    return following(sampling, GRAMMARS[number % len(GRAMMARS)])


def draw_hang_up(rng: random.Random) -> float | None:
    chance = rng.random()
    if chance < 0.08:
        return rng.expovariate(4.0)
    return -float(rng.randint(1, 20)) if chance < 0.16 else None


def draw_faults(rng: random.Random, last_arrival: float, mood: str) -> tuple[FaultPlan, ...]:
    """A few kinds per seed, so that the same one strikes twice and kinds meet in all pairs."""
    pool = GENTLE_FAULTS if mood == "gentle" else FAULTS
    count = rng.randint(1, 4) if mood == "harsh" else rng.randint(5, 9)
    kinds = rng.sample(pool, k=rng.randint(3, 6))
    faults = [
        FaultPlan(
            at=rng.uniform(ARRIVALS_FROM_S, last_arrival + 0.5),
            kind=rng.choice(kinds),
            lasts=rng.choice((0.2, 1.0, 2.0, 5.0, 8.0)),
            draw=rng.random(),
        )
        for _ in range(count)
    ]
    return tuple(sorted(faults, key=lambda fault: fault.at))
