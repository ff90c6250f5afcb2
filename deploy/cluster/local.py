"""`baton up`: a whole cluster on this machine. Deals out names, ports and cores, checks what can be checked before
anything starts, and hands over to the supervisor. Imports no router and no node: they are commands to it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TextIO

from deploy.cluster.admin_key import with_admin_key
from deploy.cluster.child import ChildSpec
from deploy.cluster.supervisor import Readiness, Supervisor
from deploy.hub.local_model import with_local_model
from deploy.router_http import clients_key
from shared.config.core_plan import ClusterCores, CorePlan, plan_cores, usable_cores
from shared.config.encoder_decoder import has_encoder
from shared.config.flags import to_argv
from shared.config.json_file import read_json_if_there
from shared.config.model_path import resolve_model
from shared.config.processes import ClusterConfig, NodeProcessConfig, RouterProcessConfig
from shared.core.errors import ConfigError
from shared.observe.log import Logger

PROBE_TIMEOUT_S = 0.5
ROUTER_ID = "router"
MAX_ANSWER = 1 << 20
MOST_MEMORY = 0.8  # of what is free, for the KV pools of all nodes together
MOST_GPU_MEMORY = 0.9  # of a GPU's, for all nodes together: every one of them takes the first GPU


def run(config: ClusterConfig, parent_pid: int) -> int:
    """Serves until SIGINT or SIGTERM; `parent_pid` is this process, which its children must not outlive."""
    asked, config = config.nodes.model.model, with_name(config)
    check_keys(config)
    config = replace(config, nodes=with_local_model(config.nodes))  # router and nodes get the path
    resolve_model(config.nodes.model.model)
    log = Logger("up", sys.stderr, level=config.nodes.log.log_level, color=config.nodes.log.log_color)
    config = with_admin_key(with_ports(config), log)
    specs = child_specs(config, usable_cores(), parent_pid)
    names = ", ".join(spec.name for spec in specs)
    log.info(f"starting {names}", model=asked, transport=config.nodes.node.transport)
    host, port, num_nodes = config.router.host, config.router.port, len(specs) - 1
    key = clients_key(config.router.api_key_file)
    supervisor = Supervisor(
        specs,
        Readiness(lambda: is_ready(host, port, num_nodes, key), lambda: announce(config), config.local.start_timeout_s),
        log,
        max_restarts=config.local.max_restarts,
        stop_timeout_s=config.local.stop_timeout_s,
        write_line=write_line,
    )
    return supervisor.run()


def with_name(config: ClusterConfig) -> ClusterConfig:
    """The one router of this cluster has a name that stays the same, for logs and metrics."""
    return replace(config, router=replace(config.router, router_id=config.router.router_id or ROUTER_ID))


def check_keys(config: ClusterConfig) -> None:
    """With keys, everyone that is to be started has one."""
    from shared.wire.keyring import ring_of_node, ring_of_router  # loads zmq, which the command itself does without

    folder, local = config.nodes.security.keys, config.local
    nodes = [f"{role}-{i}" for role, num in (("prefill", local.prefill), ("decode", local.decode)) for i in range(num)]
    try:
        ring_of_router(folder, config.router.router_id)
        for name in nodes:
            ring_of_node(folder, name)
    except ConfigError as error:
        command = f"baton keys create {folder} --router {config.router.router_id} --node {' '.join(nodes)}"
        raise ConfigError(f"{error.message}\n(the keys of this cluster: {command})") from None


def write_line(line: str, stream: TextIO | None = None) -> None:
    """To stderr, one log stream for all processes. A full disk or a closed pipe is no reason to end."""
    with contextlib.suppress(OSError):
        print(line, file=stream or sys.stderr, flush=True)


def with_ports(config: ClusterConfig) -> ClusterConfig:
    """The HTTP port checked (or found, for 0), and a free one for the nodes to dial."""
    host, port = config.router.host, config.router.port
    if port == 0:
        port = free_port(host)
    else:
        require_free(host, port)
    endpoint = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    return replace(config, router=replace(config.router, port=port, node_endpoint=endpoint))


def bound(host: str, port: int) -> socket.socket:
    """A socket on this address, or OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host.strip("[]"), port))
    except OSError:
        probe.close()
        raise
    return probe


def free_port(host: str) -> int:
    with bound(host, 0) as probe:
        return int(probe.getsockname()[1])


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


def child_specs(config: ClusterConfig, cores: Sequence[int], parent_pid: int) -> list[ChildSpec]:
    """Router first, so that nodes find it when they dial; each as the command a person would type."""
    local = config.local
    plan = plan_cores(tuple(cores), local.prefill, local.decode, share=local.share_cores)
    router = RouterProcessConfig(
        model=config.nodes.model,
        router=config.router,
        http=config.http,
        limits=config.limits,
        timeouts=config.timeouts,
        text=config.text,
        cores=plan.router,
        security=config.nodes.security,
        log=config.nodes.log,
    )
    return [spec("router", "router", router, parent_pid, vital=True), *node_specs(config, plan, parent_pid)]


def node_specs(config: ClusterConfig, plan: ClusterCores, parent_pid: int) -> list[ChildSpec]:
    roles = [("prefill", index, cores) for index, cores in enumerate(plan.prefill)]
    roles += [("decode", index, cores) for index, cores in enumerate(plan.decode)]
    return [
        spec(f"{role}-{index}", role, node_config(config, f"{role}-{index}", role, cores, len(roles)), parent_pid)
        for role, index, cores in roles
    ]


def node_config(config: ClusterConfig, name: str, role: str, cores: CorePlan, num_nodes: int) -> NodeProcessConfig:
    nodes, local = config.nodes, config.local
    parallel = nodes.parallel.of(role)
    if role == "decode":
        parallel = replace(parallel, tp=local.decode_tp or parallel.tp, pp=local.decode_pp or parallel.pp)
    parts = replace(
        nodes,
        memory=replace(
            nodes.memory,
            mem_fraction=min(nodes.memory.mem_fraction, MOST_MEMORY / num_nodes),
            gpu_mem_fraction=min(nodes.memory.gpu_mem_fraction, MOST_GPU_MEMORY / num_nodes),
        ),
        parallel=parallel,
        node=replace(nodes.node, role=role, node_id=name, router=(config.router.node_endpoint,)),
    )
    return NodeProcessConfig(parts, cores)


def spec(
    name: str, command: str, config: RouterProcessConfig | NodeProcessConfig, parent_pid: int, *, vital: bool = False
) -> ChildSpec:
    """-P: a folder named like one of ours in the working directory is not imported instead."""
    program = (sys.executable, "-P", "-m", "deploy.cli", command, f"--parent-pid={parent_pid}")
    return ChildSpec(name=name, argv=(*program, *to_argv(config, frozenset({"role"}))), vital=vital)


def url(host: str, port: int) -> str:
    return f"http://[{host.strip('[]')}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_ready(host: str, port: int, num_nodes: int, key: str = "") -> bool:
    """Return whether the router serves and at least `num_nodes` nodes are ready. One node could serve, but whoever
    starts a cluster waits for all of it. `key`: a client's API key; "" when the router asks for none."""
    connection = http.client.HTTPConnection(host.strip("[]"), port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/ready", headers={"x-api-key": key} if key else {})
        answer = connection.getresponse()
        return answer.status == 200 and count_ready(answer.read(MAX_ANSWER)) >= num_nodes
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def count_ready(body: bytes) -> int:
    """Nodes that take requests, in the router's own answer."""
    try:
        return sum(bool(node["ready"]) for node in json.loads(body)["nodes"])
    except (ValueError, KeyError, TypeError):
        return 0


def example(config: ClusterConfig) -> tuple[str, str]:
    """A path of the API and fields that this model answers."""
    folder = resolve_model(config.nodes.model.model).path
    if folder is not None and has_encoder(read_json_if_there(folder / "config.json")):
        return "completions", '"prompt": "translate English to German: Good morning."'
    return "chat/completions", '"messages": [{"role": "user", "content": "Hi!"}]'


def announce(config: ClusterConfig) -> None:
    """To stdout, apart from the log: what a person, or a script that waits for it, does next."""
    base = url(config.router.host, config.router.port)
    path, asked = example(config)
    body = f'{{"model": "{config.nodes.model.public_name}", "stream": true, {asked}}}'
    browser = f"  chat in the browser   {base}/\n" if path.startswith("chat") else ""
    write_line(
        f"\nBaton is ready: {base}\n{browser}"
        f"  from a shell          curl -N {base}/v1/{path} -H 'Content-Type: application/json' \\\n"
        f"                          -d '{body}'\n"
        f'  with the openai SDK   OpenAI(base_url="{base}/v1", api_key="none")\n'
        "  stop                  Ctrl-C\n",
        sys.stdout,
    )
