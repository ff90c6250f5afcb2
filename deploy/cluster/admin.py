"""`baton admin`: show or change a cluster's nodes through the router's HTTP API."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.cluster.admin_adapters import add_adapters, run_adapters
from deploy.cluster.admin_key import default_path
from deploy.columns import aligned
from deploy.router_http import RouterHttp
from deploy.router_url import DEFAULT_URL, USUAL, Url, add_url_flag, add_url_word, all_of, parse_url, the_only
from shared.core.errors import ConfigError
from shared.core.states import NodeState, PageState
from shared.wire.keys.http_keys import read_key

POLL_S = 0.2
COLUMNS = ("node", "role", "state", "streams", "pages", "waiting", "epoch")

DESCRIPTION = """\
baton admin: show the nodes of a running cluster, drain or restart them, or change their role. No request fails: if a
leaving node does not finish a request in time, another node continues it with the same tokens.

  baton admin status                    at http://127.0.0.1:8000
  baton admin status URL                another router, or several; or --url URL, before or after the action
  baton admin drain decode-1            it takes nothing new, finishes, and stays down
  baton admin restart decode-1          the same, and it comes back: new settings, new code
  baton admin restart --all             restart all nodes, one at a time, each when the one before is back
  baton admin role decode-1 prefill     the same, and it comes back in the other role
  baton admin abort cmpl-123            end one answer, with an error for its client
  baton admin adapters load sql         load DIR/sql on every node that was started with --lora-dir DIR
  baton admin adapters remove sql       take it away; streams that use it end first
"""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    name: str
    role: str
    epoch: str
    state: str


class AdminClient:
    def __init__(self, url: Url, key: str, ca: Path | None = None) -> None:
        self._http = RouterHttp(url, key, ca)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer's JSON. Raise ConfigError on failure, with the router's message if any."""
        status, data = self._http.require_answer(method, path, body)
        try:
            found: dict[str, Any] = json.loads(data)
        except ValueError:
            raise ConfigError(f"the server at {self._http.url} does not answer in JSON: is it a router?") from None
        if status >= 400:
            raise ConfigError(str(found.get("error", {}).get("message", found)))
        return found

    def status(self) -> dict[str, Any]:
        return self.call("GET", "/admin/status")

    def text(self, path: str) -> str:
        status, data = self._http.require_answer("GET", path)
        if status != 200:
            raise ConfigError(f"{self._http.url}{path} answered with status {status}")
        return data.decode(errors="replace")

    def nodes(self) -> dict[str, NodeStatus]:
        rows = self.status()["nodes"]
        return {row["node"]: NodeStatus(row["node"], row["role"], row["epoch"], row["state"]) for row in rows}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_flag(parser)
    add_router(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    status = actions.add_parser("status", help="show the role, state and work of every node")
    status.add_argument("addresses", nargs="*", metavar="URL", help=f"routers ({USUAL})")
    status.add_argument(
        "--url", dest="action_urls", action="append", default=[], metavar="URL", help="the same as the argument URL"
    )
    add_router(status, argparse.SUPPRESS)
    for action, text in (("drain", "the node finishes and stays down"), ("restart", "it finishes and comes back")):
        one = actions.add_parser(action, help=text)
        one.add_argument("node", nargs="?" if action == "restart" else None)
        if action == "restart":
            one.add_argument("--all", action="store_true", help="restart every node, one after another")
        add_common(one)
    abort = actions.add_parser("abort", help="end one answer")
    abort.add_argument("id", help="the answer's id, as its client sees it")
    add_place(abort)
    add_adapters(actions, add_place)
    role = actions.add_parser("role", help="let the node finish its work and come back in the other role")
    role.add_argument("node")
    role.add_argument("role", choices=("prefill", "decode"))
    add_common(role)


def add_place(parser: argparse.ArgumentParser) -> None:
    add_url_word(parser)
    add_url_flag(parser, dest="action_url")
    add_router(parser, argparse.SUPPRESS)


def add_router(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """`default`: argparse.SUPPRESS for an action, so that the flags may also stand before it."""
    parser.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        default=default,
        help="the router's admin key (default: the one `baton up` made)",
    )
    text = "CA of the server's certificate, if not a public CA"
    parser.add_argument("--ca", type=Path, metavar="FILE", default=default, help=text)


def add_common(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument(
        "--move-after",
        type=float,
        metavar="S",
        help="seconds until other nodes continue its open requests (default: set by the router)",
    )
    parser.add_argument("--force", action="store_true", help="do it even if no other node is left to serve")
    parser.add_argument("--no-wait", action="store_true", help="return at once")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds to wait for a node (default: %(default)g)"
    )


def run(args: argparse.Namespace) -> int:
    take_url_from_node(args)
    if args.action == "status":
        return show_status(args)
    url = the_only(args.url, args.address, args.action_url) or parse_url(DEFAULT_URL)
    client = AdminClient(url, read_admin_key(args.admin_key_file), args.ca)
    if args.action == "abort":
        client.call("POST", "/admin/abort", {"id": args.id})
        return 0
    if args.action == "adapters":
        return run_adapters(args, client)
    if args.action == "restart" and args.all == bool(args.node):
        raise ConfigError("restart: name a node, or --all")
    names = sorted(client.nodes()) if getattr(args, "all", False) else [args.node]
    return 0 if all(move(client, name, args) for name in names) else 1


def show_status(args: argparse.Namespace) -> int:
    """Print a table for each router. A table counts only its own router's streams and open requests."""
    flags = all_of(args.action_urls, list(filter(None, [args.url])))
    urls = all_of(args.addresses, list(map(str, flags))) or [parse_url(DEFAULT_URL)]
    clients = [AdminClient(url, read_admin_key(args.admin_key_file), args.ca) for url in urls]
    if len(clients) == 1:
        print(table(clients[0].status()))
        return 0
    failed = 0
    for url, client in zip(urls, clients, strict=True):
        try:
            print(f"{url}\n{table(client.status())}\n")
        except ConfigError as error:
            failed += 1
            print(f"{url}\n{error.message}\n")
    return 1 if failed else 0


def take_url_from_node(args: argparse.Namespace) -> None:
    """Take the word after `restart --all` as a URL, not as a node's name."""
    if args.action == "restart" and args.all and ":" in (args.node or "") and args.address is None:
        args.node, args.address = None, args.node


def read_admin_key(path: Path | None) -> str:
    """Return the key in `path`. Without `path`, return the key that `baton up` made; "" if there is none.

    Raise ConfigError for a file that others may read.
    """
    if path is None and not os.access(default_path(), os.R_OK):
        return ""
    return read_key(str(path or default_path()), "--admin-key-file")


def move(client: AdminClient, name: str, args: argparse.Namespace) -> bool:
    """Drain or restart a node, or change its role. Return False if --timeout passed first."""
    body: dict[str, Any] = {"node": name, "force": args.force}
    if args.move_after is not None:
        body["move_after_s"] = args.move_after
    if args.action == "role":
        reply = client.call("POST", "/admin/role", body | {"role": args.role})
    else:
        reply = client.call("POST", "/admin/drain", body | {"then": "stop" if args.action == "drain" else "restart"})
    if args.no_wait:
        return True
    print(f"{name}: draining", flush=True)
    stays_down = args.action == "drain"
    done = wait_for(lambda: has_moved(client.nodes().get(name), reply["epoch"], stays_down), args.timeout)
    if not done:
        print(f"{name}: not done after {args.timeout:g} s", file=sys.stderr)
        return False
    print(f"{name}: gone" if stays_down else f"{name}: back as {client.nodes()[name].role}", flush=True)
    return True


def has_moved(node: NodeStatus | None, old_epoch: str, stays_down: bool) -> bool:
    if stays_down:
        return node is None or node.epoch != old_epoch
    return node is not None and node.epoch != old_epoch and node.state == NodeState.READY


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def table(status: dict[str, Any]) -> str:
    rows = [list(COLUMNS)]
    for node in sorted(status["nodes"], key=lambda row: str(row["node"])):
        free, total = node["pages"].get(PageState.FREE, 0), sum(node["pages"].values())
        pages = f"{total - free}/{total}"
        if node.get("kept_pages"):
            pages += f" ({node['kept_pages']} kept)"
        cells = (node["role"], node["state"], node["open_sequences"], pages, node["waiting"], node["epoch"])
        rows.append([node["node"], *map(str, cells)])
    more = [
        *queue(status),
        *limits(status),
        *hand_overs(status),
        *prompts(status),
        *slow(status),
        *(f"{node['node']} on cores {node['cores']}" for node in status["nodes"] if node.get("cores")),
        *unreachable(status),
        *(f"{pair['a']} and {pair['b']} do not pair: {pair['differs']} differs" for pair in status.get("misfits", [])),
        *strangers(status),
        *lacking(status),
    ]
    return "\n".join([f"open requests: {status['open_requests']}", aligned(rows), *more])


# An older router's answer may lack a field.
def queue(status: dict[str, Any]) -> list[str]:
    return [
        f"{row['tenant']}: {row['requests']} requests wait ({row['tokens']} tokens), the first for "
        f"{row['oldest_s']:.1f} s; priority {row['priority']}"
        for row in status.get("queue", [])
    ]


def limits(status: dict[str, Any]) -> list[str]:
    """Return a line for each tenant: how many requests and tokens its limits still allow in this minute."""
    lines = []
    for row in status.get("limits", []):
        left = [f"{row[unit]} {unit}" for unit in ("requests", "tokens") if unit in row]
        lines.append(f"{row['tenant']}: {' and '.join(left)} left of its limits")
    return lines


def unreachable(status: dict[str, Any]) -> list[str]:
    return [
        f"{pair['prefill']} -> {pair['decode']}  can't connect to {pair['endpoint']}, for {pair['since_s']:.0f} s"
        for pair in status.get("unreachable", [])
    ]


def strangers(status: dict[str, Any]) -> list[str]:
    return [
        f"{one['node']} speaks protocol {one['protocol']}, this router {one['ours']}: it gets no requests"
        for one in status.get("strangers", [])
    ]


def lacking(status: dict[str, Any]) -> list[str]:
    """Return a line for each router that does not serve a node, although the node lists this router."""
    missing = [(node["node"], endpoint) for node in status["nodes"] for endpoint in node.get("lacks_routers", [])]
    return [f"{node} has no router at {endpoint}" for node, endpoint in missing]


def prompts(status: dict[str, Any]) -> list[str]:
    lines = []
    for node in status["nodes"]:
        rate, handoff_s = node.get("prompt_tokens_per_s"), node.get("handoff_s")
        figures = []
        if rate is not None:
            figures.append(f"prompts at {rate:.0f} tokens/s and {1e3 * node['prompt_step_s']:.1f} ms a step")
        if handoff_s is not None:
            figures.append(f"hand-offs end {1e3 * handoff_s:.1f} ms behind their prompts")
        if figures:
            lines.append(f"{node['node']}: {', '.join(figures)}")
    return lines


def slow(status: dict[str, Any]) -> list[str]:
    gets = {"eased": "gets less work", "trickle": "gets one request at a time"}
    slow = [node for node in status["nodes"] if node.get("share") in gets]
    return [
        f"{node['node']} is slow: {node['slowness']:.1f} times its peers' time per step; it {gets[node['share']]}"
        for node in slow
    ]


def hand_overs(status: dict[str, Any]) -> list[str]:
    transports = [(node["node"], node.get("hands_over", {})) for node in status["nodes"]]
    return [
        f"{node} -> {peer}  {transport}" for node, by_peer in transports for peer, transport in sorted(by_peer.items())
    ]
