"""Derive each actor's name, addresses and cores from the settings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from deploy.ray.report import DECODE, PREFILL, ROLES, ROUTER, ActorPlace, index_of, role_of
from shared.config.core_plan import CorePlan
from shared.config.processes import (
    NodeProcessConfig,
    RayClusterConfig,
    RouterProcessConfig,
    check_parts_on_gpu,
    router_process,
)
from shared.config.settings.endpoints import tcp_endpoint
from shared.core.errors import ConfigError

LOOPBACK = "127.0.0.1"
MOST_MEMORY = 0.8  # share of a machine's free memory for its nodes' KV pools

FEWER_GPUS = (
    ": start fewer nodes, let two share a GPU (prefill_gpus = 0.5 and decode_gpus = 0.5 under [share]), or compute on "
    'CPUs (device = "cpu" under [sched])'
)


def names_at_start(config: RayClusterConfig) -> tuple[str, ...]:
    """Routers come first, because nodes connect to them."""
    counts = ((ROUTER, config.ray.routers), (PREFILL, config.ray.prefill), (DECODE, config.ray.decode))
    return tuple(f"{role}-{index}" for role, number in counts for index in range(number))


def most(config: RayClusterConfig, role: str) -> int:
    if role == ROUTER:
        return config.ray.routers
    at_start, limit = {
        PREFILL: (config.ray.prefill, config.scaling.max_prefill),
        DECODE: (config.ray.decode, config.scaling.max_decode),
    }[role]
    return max(at_start, limit)


def cpus(config: RayClusterConfig, role: str) -> float:
    share = config.share
    return {ROUTER: share.router_cpus, PREFILL: share.prefill_cpus, DECODE: share.decode_cpus}[role]


def gpus(config: RayClusterConfig, role: str) -> float:
    return {ROUTER: 0.0, PREFILL: config.share.prefill_gpus, DECODE: config.share.decode_gpus}[role]


def with_gpus(config: RayClusterConfig, there: float) -> RayClusterConfig:
    """Reserve a GPU for each node that may use one. `there`: the GPUs of all machines. Raise ConfigError for ranks."""
    device = config.nodes.sched.device
    if not config.share.has_gpus and (device == "cuda" or (device == "auto" and there)):
        config = replace(config, share=replace(config.share, prefill_gpus=1.0, decode_gpus=1.0))
    for role in (PREFILL, DECODE):
        if gpus(config, role):
            parallel = config.nodes.parallel.of(role)
            check_parts_on_gpu(parallel, device)
            if parallel.tp > 1:
                raise ConfigError(
                    f"--tp {parallel.tp} --device {device}: on Ray a node gets one GPU. Leave out --tp {parallel.tp}, "
                    "use `baton up` on the machine with the GPUs, or compute on CPUs with --device cpu"
                )
    return config


def resources(config: RayClusterConfig, name: str) -> dict[str, float]:
    """Return one process's bundle. Ray refuses zeros and empty bundles."""
    role = role_of(name)
    wanted = {"CPU": cpus(config, role), "GPU": gpus(config, role)}
    return {kind: amount for kind, amount in wanted.items() if amount} or {"CPU": 0.001}


def bundle_text(config: RayClusterConfig, name: str) -> str:
    return ", ".join(f"{number:g} {kind}" for kind, number in resources(config, name).items())


def check_resources(config: RayClusterConfig, there: Mapping[str, float]) -> None:
    """Raise ConfigError if all machines together have too little. `there`: their resources."""
    bundles = [resources(config, name) for name in names_at_start(config)]
    for kind, advice in {"CPU": "", "GPU": FEWER_GPUS}.items():
        wanted = sum(bundle.get(kind, 0.0) for bundle in bundles)
        if wanted > there.get(kind, 0.0):
            raise ConfigError(
                f"routers and nodes want {wanted:g} {kind}, this Ray cluster has {there.get(kind, 0):g}{advice}"
            )


def check_bundles(config: RayClusterConfig, machines: Sequence[Mapping[str, float]]) -> None:
    """Raise ConfigError if a process fits on no machine. `machines`: each machine's resources, free or not."""
    for name in names_at_start(config):
        wanted = resources(config, name).items()
        if not any(all(there.get(kind, 0.0) >= number for kind, number in wanted) for there in machines):
            raise ConfigError(
                f"{name} needs {bundle_text(config, name)} on one machine, and no machine here has that much"
            )


def most_cpus(config: RayClusterConfig) -> float:
    return sum(cpus(config, role) * most(config, role) for role in ROLES)


def base_port(config: RayClusterConfig) -> int:
    endpoint = config.router.node_endpoint
    port = endpoint.rpartition(":")[2] if endpoint.startswith("tcp://") else ""
    if not port.isdigit() or int(port) == 0:
        raise ConfigError(
            f"[router] node_endpoint is {endpoint!r}; on Ray only its port is used, like 7001 of tcp://127.0.0.1:7001. "
            "router-0 listens for nodes at this port, router-1 at the next one, each at its own machine's address"
        )
    return int(port)


def check_config(config: RayClusterConfig) -> None:
    """Raise ConfigError for settings that Ray can't use."""
    base_port(config)
    if config.router.port == 0:
        raise ConfigError("[router] port is 0: choose one, because clients find a Ray cluster's routers at fixed ports")
    node = config.nodes.node
    if node.router or node.routers_file or node.node_id or node.bind_port:
        raise ConfigError(
            "[node] router, routers_file, node_id and bind_port are set when nodes are placed: leave them out"
        )
    ports = {
        "[probe] ready_port": config.nodes.probe.ready_port,
        "[events] kv_events_endpoint": config.nodes.events.kv_events_endpoint,
    }
    if given := next(filter(ports.get, ports), ""):
        raise ConfigError(f"{given} can't be shared by the nodes of a machine: leave it out")


def check_machines(config: RayClusterConfig, addresses: Iterable[str]) -> None:
    """Raise ConfigError for several machines without keys."""
    different = sorted(set(addresses))
    if len(different) > 1 and not config.nodes.security.has_keys:
        raise ConfigError(
            f"this Ray cluster has machines at {', '.join(different)}: routers and nodes that reach each other over a "
            f"network need keys. {keys_command(config)}, copy the folder to the same path on every machine (Ray may "
            'place any node on any of them), and write [security] keys = "DIR" into the file'
        )


def keys_command(config: RayClusterConfig) -> str:
    routers, *nodes = (" ".join(f"{role}-{i}" for i in range(most(config, role))) for role in ROLES)
    return f"Make them with `baton keys create DIR --router {routers} --node {' '.join(nodes).strip()}`"


def host_of(config: RayClusterConfig, place: ActorPlace) -> str:
    return place.ip if config.nodes.security.has_keys else LOOPBACK


def endpoint(config: RayClusterConfig, router: str, place: ActorPlace) -> str:
    return tcp_endpoint(host_of(config, place), base_port(config) + index_of(router))


def http_address(config: RayClusterConfig, router: str) -> tuple[str, int]:
    return config.router.host, config.router.port + index_of(router)


def with_memory_share(config: RayClusterConfig, num_machines: int) -> RayClusterConfig:
    """Limit each node's memory, so that each machine keeps some free."""
    per_machine = -(-(config.ray.prefill + config.ray.decode) // max(1, num_machines))
    nodes = config.nodes
    fraction = min(nodes.memory.mem_fraction, MOST_MEMORY / max(1, per_machine))
    return replace(config, nodes=replace(nodes, memory=replace(nodes.memory, mem_fraction=fraction)))


def deal_cores(cpus: float, usable: Sequence[int], taken: Iterable[int]) -> CorePlan:
    """Plan one thread per reserved core, and choose an equal number of cores outside `taken`.

    If too few cores are left, choose none. Ray itself reserves a number of cores, but does not say which.
    """
    threads = max(1, int(cpus))
    free = [core for core in usable if core not in set(taken)]
    return CorePlan(threads=threads, cpus=tuple(free[:threads]) if len(free) >= threads else ())


def router_config(config: RayClusterConfig, name: str, place: ActorPlace, cores: CorePlan) -> RouterProcessConfig:
    host, port = http_address(config, name)
    own = replace(config.router, router_id=name, host=host, port=port, node_endpoint=endpoint(config, name, place))
    return router_process(config, own, cores)


def node_config(
    config: RayClusterConfig, name: str, place: ActorPlace, routers: tuple[str, ...], cores: CorePlan
) -> NodeProcessConfig:
    role, host = role_of(name), host_of(config, place)
    node = replace(config.nodes.node, role=role, node_id=name, router=routers, bind_host=host)
    memory, sched = config.nodes.memory, config.nodes.sched
    memory = replace(memory, gpu_mem_fraction=memory.gpu_mem_fraction * (gpus(config, role) or 1.0))  # half a GPU: half
    if sched.device == "auto" and not gpus(config, role):  # it must not take a GPU that another node reserved
        sched = replace(sched, device="cpu")
    parts = replace(config.nodes, memory=memory, sched=sched, parallel=config.nodes.parallel.of(role), node=node)
    return NodeProcessConfig(parts, cores)
