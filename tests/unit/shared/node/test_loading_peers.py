"""While a process loads, nobody fills its memory."""

from __future__ import annotations

from tests.support.machine.own_process import printed

NODE = """
from shared.config.processes import NodeParts, NodeProcessConfig
from shared.config.settings.settings import NodeConfig
from shared.core.errors import ConfigError
from shared.node import run
from tests.support.wire.raw_zmtp import RawPeer

links, opened = [], run.open_links
def open_links(*args):
    links.append(opened(*args))
    return links[0]

def load(*args):
    peer = RawPeer(links[0].endpoint)
    for sent in range(300):
        try:
            peer.part(bytes(1 << 20))
        except OSError:
            break
    print(sent < 299)
    raise ConfigError("loaded")

run.open_links, run.build_core = open_links, load
try:
    run.run_node(NodeProcessConfig(NodeParts(node=NodeConfig(router=("tcp://127.0.0.1:9",)))), None)
except ConfigError as error:
    print(error.message)
"""
ROUTER = """
import socket
from router import app
from shared.config.processes import RouterProcessConfig
from shared.config.settings.router_settings import RouterConfig
from shared.core.errors import ConfigError

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]

def load(*args):
    try:
        socket.create_connection(("127.0.0.1", port))
    except ConnectionRefusedError:
        raise ConfigError("nobody listens") from None
    raise ConfigError("somebody listens")

app.load_text_model = load
try:
    app.run(RouterProcessConfig(router=RouterConfig(port=0, node_endpoint=f"tcp://127.0.0.1:{port}")))
except ConfigError as error:
    print(error.message)
"""


def test_a_flood_ends_while_a_node_loads_its_model() -> None:
    """The defect: until its loop began, a node took whatever came: 600 MiB in a second."""
    assert printed(NODE).splitlines() == ["True", "loaded"]


def test_a_router_listens_to_nodes_when_it_can_read() -> None:
    assert printed(ROUTER) == "nobody listens"
