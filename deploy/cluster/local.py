"""`baton up`: run a whole cluster on this machine.

    find out (facts.py) -> plan the processes, here -> run them (supervisor.py) -> announce (ready.py)

Routers and nodes run as separate commands, so their apps are not imported here.
"""

from __future__ import annotations

from dataclasses import replace

from deploy.cluster.child import ChildSpec
from deploy.cluster.facts import ClusterFacts, find_facts
from deploy.cluster.gpus import NodeGpu, with_gpu
from deploy.cluster.ready import readiness, write_line
from deploy.cluster.supervisor import Supervisor
from shared.config.core_plan import CorePlan, plan_cores
from shared.config.flags import to_argv
from shared.config.processes import ClusterConfig, NodeProcessConfig, RouterProcessConfig, router_process
from shared.core import launcher
from shared.observe.log import open_log

ROUTER = "router"  # the command
STOP_MARGIN_S = 5.0  # to end the last requests and exit, after the process's own limit
MOST_MEMORY = 0.8  # share of free memory for the KV pools of all nodes together


def run(config: ClusterConfig, parent_pid: int) -> int:
    """Serve until a signal. The children also end when the process `parent_pid` ends."""
    log = open_log("up", config.nodes.log)
    facts = find_facts(config, log)
    specs = child_specs(facts, parent_pid)
    names = ", ".join(spec.name for spec in specs)
    log.info(f"starting {names}", model=config.nodes.model.model, transport=config.nodes.node.transport)
    supervisor = Supervisor(
        specs,
        readiness(facts),
        log,
        max_restarts=config.local.max_restarts,
        stop_timeout_s=config.local.stop_timeout_s,
        write_line=write_line,
    )
    return supervisor.run()


def child_specs(facts: ClusterFacts, parent_pid: int) -> list[ChildSpec]:
    """Routers start first, because nodes connect to them."""
    local, cores = facts.config.local, facts.cores
    plan = plan_cores(cores, local.prefill, local.decode, share=local.share_cores)
    routers = [
        router_process(facts.config, router, replace(plan.router, cpus=(cores[index % len(cores)],)))
        for index, router in enumerate(facts.routers)
    ]
    gpus = facts.gpus or [None] * local.num_nodes
    nodes = zip(local.node_names, (*plan.prefill, *plan.decode), gpus, strict=True)
    return [
        *(spec(router, parent_pid) for router in routers),
        *(spec(node_config(facts, name, own, gpu), parent_pid, gpu.visible if gpu else "") for name, own, gpu in nodes),
    ]


def node_config(facts: ClusterFacts, name: str, cores: CorePlan, gpu: NodeGpu | None) -> NodeProcessConfig:
    nodes, local, role = facts.config.nodes, facts.config.local, name.partition("-")[0]
    routers = tuple(router.node_endpoint for router in facts.routers)
    parallel = nodes.parallel.of(role)
    if role == "decode":
        parallel = replace(parallel, tp=local.decode_tp or parallel.tp, pp=local.decode_pp or parallel.pp)
    parts = replace(
        nodes,
        memory=replace(nodes.memory, mem_fraction=min(nodes.memory.mem_fraction, MOST_MEMORY / local.num_nodes)),
        parallel=parallel,
        node=replace(nodes.node, role=role, node_id=name, router=routers),
    )
    return NodeProcessConfig(parts if gpu is None else with_gpu(parts, gpu), cores)


def spec(config: RouterProcessConfig | NodeProcessConfig, parent_pid: int, gpus: str = "") -> ChildSpec:
    """`gpus`: as in ChildSpec."""
    if isinstance(config, RouterProcessConfig):
        name, command, limit_s, log = config.router.router_id, ROUTER, config.timeouts.shutdown_s, config.log
    else:
        node = config.parts.node
        name, command, limit_s, log = node.node_id, node.role, node.drain_s, config.parts.log
    flags = (f"--parent-pid={parent_pid}", *to_argv(config, frozenset({"role"})))
    argv = tuple(launcher.command("deploy.cli", command, *flags))
    stop_s = limit_s + STOP_MARGIN_S
    return ChildSpec(name, argv, vital=command == ROUTER, stop_s=stop_s, gpus=gpus, log_form=log.log_format)
