"""What `baton up` finds out before it starts anything, in one step: of the keys, the model and this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deploy.cluster.admin_key import with_admin_key
from deploy.cluster.gpus import NodeGpu, deal_found_gpus
from deploy.cluster.model_check import check_folder
from deploy.cluster.ports import deal_routers
from deploy.hub.local_model import with_local_model
from deploy.router_http import seers_key
from shared.config.core_plan import usable_cores
from shared.config.machine.gpus import has_driver
from shared.config.models.model_folder import read_folder
from shared.config.models.model_path import resolve_model
from shared.config.processes import ClusterConfig
from shared.config.settings.router_settings import RouterConfig
from shared.core.errors import ConfigError
from shared.observe.log import Logger


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """`config`: with the model's path, the number of prefill nodes and the file of the admin key.

    `routers`: each with a name and free ports. `cores`: the cores that processes may use. `gpus`: each node's; () on
    CPUs. `key`: what routers ask for before they show their nodes; "" if nothing. `has_encoder`: of the model.
    """

    config: ClusterConfig
    routers: tuple[RouterConfig, ...]
    cores: tuple[int, ...]
    gpus: tuple[NodeGpu, ...] = ()
    key: str = ""
    has_encoder: bool = False


def find_facts(config: ClusterConfig, log: Logger) -> ClusterFacts:
    """Fetch the model if it is not here. Raise ConfigError for whatever would keep the cluster from starting."""
    check_keys(config)  # before a download
    config = replace(config, nodes=with_local_model(config.nodes))
    path = resolve_model(config.nodes.model.model).path
    check_folder(config.nodes)
    config, gpus = deal_found_gpus(config, log)
    check_keys(config)
    config = with_admin_key(config, log)
    return ClusterFacts(
        config,
        deal_routers(config),
        usable_cores(),
        gpus,
        seers_key(config.router.api_key_file, config.router.admin_key_file),
        path is not None and read_folder(path).has_encoder,
    )


def check_keys(config: ClusterConfig) -> None:
    """Raise ConfigError for a missing key. Before GPUs are found, ask for the keys of nodes that any number starts."""
    from shared.wire.keys.keyring import ring_of_node, ring_of_router  # loads zmq

    folder, routers = config.nodes.security.keys, config.router_names
    nodes = config.local.on_gpus(int(has_driver())).node_names
    try:
        for name in routers:
            ring_of_router(folder, name)
        for name in nodes:
            ring_of_node(folder, name)
    except ConfigError as error:
        command = f"baton keys create {folder} --router {' '.join(routers)} --node {' '.join(nodes)}"
        raise ConfigError(f"{error.message}\n(the keys of this cluster: {command})") from None
