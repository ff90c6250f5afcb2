"""`baton up`: run a whole cluster on this machine.

Routers and nodes run as separate commands, so their apps are not imported here.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TextIO

from deploy.cluster.admin_key import with_admin_key
from deploy.cluster.child import ChildSpec
from deploy.cluster.gpus import NodeGpu, deal_gpus, find_gpus, tell_gpus, with_gpu
from deploy.cluster.supervisor import Readiness, Supervisor
from deploy.hub.local_model import with_local_model
from deploy.router_http import own_connection, seers_key
from shared.config.core_plan import ClusterCores, CorePlan, plan_cores, usable_cores
from shared.config.flags import to_argv
from shared.config.machine.gpus import has_driver
from shared.config.models import shipped_model
from shared.config.models.encoder_decoder import has_encoder
from shared.config.models.json_file import read_json_if_there
from shared.config.models.model_path import resolve_model
from shared.config.processes import ClusterConfig, NodeProcessConfig, RouterProcessConfig, router_process
from shared.config.settings.endpoints import MAX_PORT, bracketed
from shared.config.settings.local_settings import LocalConfig
from shared.config.settings.router_settings import RouterConfig
from shared.core import launcher
from shared.core.errors import ConfigError
from shared.observe.log import Logger, open_log

PROBE_TIMEOUT_S = 0.5
ROUTER_ID = "router"
READY = "Baton is ready"  # scripts wait for this text
MAX_ANSWER = 1 << 20
STOP_MARGIN_S = 5.0  # to end the last requests and exit, after the process's own limit
MOST_MEMORY = 0.8  # share of free memory for the KV pools of all nodes together


def run(config: ClusterConfig, parent_pid: int) -> int:
    """Serve until a signal. The children also end when the process `parent_pid` ends."""
    asked = config.nodes.model.model
    check_keys(config)
    config = replace(config, nodes=with_local_model(config.nodes))
    resolve_model(config.nodes.model.model)
    log = open_log("up", config.nodes.log)
    config, gpus = on_gpus(config, log)
    check_keys(config)
    config = with_admin_key(config, log)
    routers = deal_routers(config)
    specs = child_specs(config, routers, usable_cores(), parent_pid, gpus)
    names = ", ".join(spec.name for spec in specs)
    log.info(f"starting {names}", model=asked, transport=config.nodes.node.transport)
    num_nodes = len(specs) - len(routers)
    key = seers_key(config.router.api_key_file, config.router.admin_key_file)

    def serves() -> bool:
        return all(is_ready(router.host, router.port, num_nodes, key, config.http.tls_cert) for router in routers)

    supervisor = Supervisor(
        specs,
        Readiness(serves, lambda: announce(config, routers), config.local.start_timeout_s),
        log,
        max_restarts=config.local.max_restarts,
        stop_timeout_s=config.local.stop_timeout_s,
        write_line=write_line,
    )
    return supervisor.run()


def on_gpus(config: ClusterConfig, log: Logger) -> tuple[ClusterConfig, tuple[NodeGpu, ...]]:
    """Return the settings with the number of prefill nodes, and each node's GPU. Raise ConfigError as `deal_gpus`."""
    asked = config.local
    found = find_gpus(config.nodes, is_asked=bool(asked.devices))
    tp = config.nodes.parallel.tp
    local = asked.on_gpus(len(asked.devices) or len(found.gpus), tp)
    if found.gpus:
        check_ranks(config)
    gpus = deal_gpus(local, found, tp)
    if asked.prefill < 0 and (local.prefill, local.decode) == (0, 1):
        if tp == 1:
            log.info(
                "one GPU: one node computes prompts and answers; two would share its memory. --prefill 1 starts two"
            )
        else:
            log.info("one node computes prompts and answers; two would need more GPUs", gpus=tp)
    tell_gpus(log, node_names(local), gpus, found)
    return replace(config, local=local), gpus


def check_ranks(config: ClusterConfig) -> None:
    """Raise ConfigError for decode nodes with other ranks or stages: on GPUs they would not pair with prefill nodes."""
    local, parallel, device = config.local, config.nodes.parallel, config.nodes.sched.device
    own = {"--decode-tp": (local.decode_tp, parallel.tp), "--decode-pp": (local.decode_pp, parallel.pp)}
    given = " ".join(f"{flag} {number}" for flag, (number, of_all) in own.items() if number not in (0, of_all))
    if given:
        raise ConfigError(
            f"{given} --device {device}: on GPUs decode nodes have no ranks or stages of their own; leave out {given}; "
            "else say --device cpu"
        )


def node_names(local: LocalConfig) -> list[str]:
    return [f"{role}-{i}" for role, num in (("prefill", local.prefill), ("decode", local.decode)) for i in range(num)]


def router_names(config: ClusterConfig) -> tuple[str, ...]:
    """Return the routers' names, the same at every start."""
    name, number = config.router.router_id or ROUTER_ID, config.local.routers
    return (name,) if number == 1 else tuple(f"{name}-{index}" for index in range(number))


def check_keys(config: ClusterConfig) -> None:
    """Raise ConfigError for a missing key. Before GPUs are found, ask for the keys of nodes that any number starts."""
    from shared.wire.keys.keyring import ring_of_node, ring_of_router  # loads zmq

    folder, routers = config.nodes.security.keys, router_names(config)
    nodes = node_names(config.local.on_gpus(int(has_driver())))
    try:
        for name in routers:
            ring_of_router(folder, name)
        for name in nodes:
            ring_of_node(folder, name)
    except ConfigError as error:
        command = f"baton keys create {folder} --router {' '.join(routers)} --node {' '.join(nodes)}"
        raise ConfigError(f"{error.message}\n(the keys of this cluster: {command})") from None


def write_line(line: str, stream: TextIO | None = None) -> None:
    """Write to `stream` (default: stderr, which is the cluster's log). Ignore a full disk or a closed pipe."""
    with contextlib.suppress(OSError):
        print(line, file=stream or sys.stderr, flush=True)


def deal_routers(config: ClusterConfig) -> tuple[RouterConfig, ...]:
    """Give each router a name, a port for nodes and a free HTTP port."""
    host, first, used = config.router.host, config.router.port, set[int]()
    if first + config.local.routers - 1 > MAX_PORT:
        raise ConfigError(f"--port {first}: ports end at {MAX_PORT}, and each router has one of its own")
    dealt = []
    for index, name in enumerate(router_names(config)):
        port = first + index if first else free_port(host, used)
        if first:
            require_free(host, port)
        endpoint = f"tcp://127.0.0.1:{free_port('127.0.0.1', used | {port})}"
        used |= {port, int(endpoint.rpartition(":")[2])}
        dealt.append(replace(config.router, router_id=name, port=port, node_endpoint=endpoint))
    return tuple(dealt)


def bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host.strip("[]"), port))
    except OSError:
        probe.close()
        raise
    return probe


def free_port(host: str, used: Collection[int] = ()) -> int:
    while True:
        with bound(host, 0) as probe:
            port = int(probe.getsockname()[1])
        if port not in used:
            return port


def require_free(host: str, port: int) -> None:
    try:
        bound(host, port).close()
    except PermissionError:
        raise ConfigError(f"--port {port}: this user may not serve on it; choose one above 1023") from None
    except OSError as error:
        raise ConfigError(
            f"--port {port}: can't serve on {host}:{port} ({error.strerror}); "
            "stop what runs there (another baton?) or choose another with --port"
        ) from None


def child_specs(
    config: ClusterConfig,
    routers: Sequence[RouterConfig],
    cores: Sequence[int],
    parent_pid: int,
    gpus: Sequence[NodeGpu] = (),
) -> list[ChildSpec]:
    """Routers start first, because nodes connect to them. `gpus`: each node's; () on CPUs."""
    local = config.local
    plan = plan_cores(tuple(cores), local.prefill, local.decode, share=local.share_cores)
    plans = [replace(plan.router, cpus=(cores[index % len(cores)],)) for index in range(len(routers))]
    daemons = [router_process(config, router, own) for router, own in zip(routers, plans, strict=True)]
    fronts = [spec(one.router.router_id, "router", one, parent_pid, vital=True) for one in daemons]
    endpoints = tuple(router.node_endpoint for router in routers)
    return [*fronts, *node_specs(config, endpoints, plan, parent_pid, gpus)]


def node_specs(
    config: ClusterConfig, routers: tuple[str, ...], plan: ClusterCores, parent_pid: int, gpus: Sequence[NodeGpu]
) -> list[ChildSpec]:
    """`routers`: the endpoints at which routers listen for nodes."""
    names, cores = node_names(config.local), (*plan.prefill, *plan.decode)
    own_gpus: Sequence[NodeGpu | None] = gpus or [None] * len(names)
    made = []
    for name, own, gpu in zip(names, cores, own_gpus, strict=True):
        role, visible = name.partition("-")[0], gpu.visible if gpu is not None else ""
        settings = node_config(config, name, role, routers, own, len(names), gpu)
        made.append(spec(name, role, settings, parent_pid, gpus=visible))
    return made


def node_config(
    config: ClusterConfig,
    name: str,
    role: str,
    routers: tuple[str, ...],
    cores: CorePlan,
    num_nodes: int,
    gpu: NodeGpu | None,
) -> NodeProcessConfig:
    nodes, local = config.nodes, config.local
    parallel = nodes.parallel.of(role)
    if role == "decode":
        parallel = replace(parallel, tp=local.decode_tp or parallel.tp, pp=local.decode_pp or parallel.pp)
    parts = replace(
        nodes,
        memory=replace(nodes.memory, mem_fraction=min(nodes.memory.mem_fraction, MOST_MEMORY / num_nodes)),
        parallel=parallel,
        node=replace(nodes.node, role=role, node_id=name, router=routers),
    )
    return NodeProcessConfig(parts if gpu is None else with_gpu(parts, gpu), cores)


def spec(
    name: str,
    command: str,
    config: RouterProcessConfig | NodeProcessConfig,
    parent_pid: int,
    *,
    vital: bool = False,
    gpus: str = "",
) -> ChildSpec:
    own = (command, f"--parent-pid={parent_pid}")
    argv = tuple(launcher.command("deploy.cli", *own, *to_argv(config, frozenset({"role"}))))
    log = config.log if isinstance(config, RouterProcessConfig) else config.parts.log
    return ChildSpec(name, argv, vital=vital, stop_s=stop_s(config), gpus=gpus, log_form=log.log_format)


def stop_s(config: RouterProcessConfig | NodeProcessConfig) -> float:
    own = config.timeouts.shutdown_s if isinstance(config, RouterProcessConfig) else config.parts.node.drain_s
    return own + STOP_MARGIN_S


def url(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://{bracketed(host)}:{port}"


def is_ready(host: str, port: int, num_nodes: int, key: str = "", cert: str = "") -> bool:
    """Return whether the router serves and at least `num_nodes` nodes are ready. `key`: the key that /ready wants.
    `cert`: the router's --tls-cert."""
    try:
        connection = own_connection(host, port, cert, PROBE_TIMEOUT_S)
    except OSError:  # no usable certificate: the router says so, and ends
        return False
    try:
        connection.request("GET", "/ready", headers={"x-api-key": key} if key else {})
        answer = connection.getresponse()
        return answer.status == 200 and count_ready(answer.read(MAX_ANSWER)) >= num_nodes
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def count_ready(body: bytes) -> int:
    try:
        return sum(bool(node["ready"]) for node in json.loads(body)["nodes"])
    except (ValueError, KeyError, TypeError):
        return 0


def example(config: ClusterConfig) -> tuple[str, str]:
    """Return (path, JSON fields) of an example request for this model."""
    folder = resolve_model(config.nodes.model.model).path
    if folder is not None and has_encoder(read_json_if_there(folder / "config.json")):
        return "completions", '"prompt": "translate English to German: Good morning."'
    return (
        "chat/completions",
        '"max_tokens": 100, "messages": [{"role": "user", "content": "What is the capital of Japan?"}]',
    )


def better_model(config: ClusterConfig) -> str:
    if config.nodes.model.model != shipped_model.NAME:
        return ""
    return "  a larger model        baton up --model Qwen/Qwen2.5-1.5B-Instruct   (3.1 GB on disk)\n"


def announce(config: ClusterConfig, routers: Sequence[RouterConfig]) -> None:
    """Print the next steps."""
    base, *others = (url(router.host, router.port, config.http.scheme) for router in routers)
    path, asked = example(config)
    body = f'{{"model": "{config.nodes.model.public_name}", "stream": true, {asked}}}'
    browser = f"  chat in the browser   {base}/\n" if path.startswith("chat") else ""
    more = "".join(f"  another router        {other}\n" for other in others)
    key, bearer = ("none", "") if not routers[0].api_key_file else ("KEY", " -H 'Authorization: Bearer KEY'")
    write_line(
        f"\n{READY}: {base}\n{more}{browser}"
        f"  from a shell          curl -N {base}/v1/{path} -H 'Content-Type: application/json'{bearer} \\\n"
        f"                          -d '{body}'\n"
        f"{better_model(config)}"
        f'  with the openai SDK   OpenAI(base_url="{base}/v1", api_key="{key}")\n'
        "  stop                  Ctrl-C\n",
        sys.stdout,
    )
