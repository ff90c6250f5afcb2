"""`baton admin`: what the nodes of a running cluster do, and who leaves it. Speaks HTTP to the router, nothing else."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.cluster.admin_key import default_path
from deploy.router_http import UNREACHABLE, RouterHttp
from deploy.router_url import DEFAULT_URL, Url, add_url_flag, add_url_word, no_answer, parse_url, the_only
from shared.core.errors import ConfigError
from shared.core.states import NodeState, PageState

POLL_S = 0.2
COLUMNS = ("node", "role", "state", "streams", "pages", "waiting", "epoch")

EXAMPLES = """\
baton admin: look at the nodes of a running cluster, and move them. No request fails: what a leaving node does not
finish in time goes on elsewhere, token for token.

  baton admin status                    at http://127.0.0.1:8000
  baton admin status URL                another router; or --url URL, ahead of the action or behind it
  baton admin drain decode-1            it takes nothing new, finishes, and stays down
  baton admin restart decode-1          the same, and it comes back: new settings, new code
  baton admin restart --all             one after another, each when the one before is back
  baton admin role decode-1 prefill     the same, and it comes back in the other role
  baton admin abort cmpl-123            end one answer, with an error for its client
"""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A row of /admin/status."""

    name: str
    role: str
    epoch: str
    state: str


class AdminClient:
    """`url`: of the router; `ca`: authorities for https, where the system's do not know it."""

    def __init__(self, url: Url, key: str, ca: Path | None = None) -> None:
        self._http = RouterHttp(url, key, ca)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer's JSON; ConfigError with the router's own words for everything else."""
        try:
            status, data = self._http.ask(method, path, body)
            found: dict[str, Any] = json.loads(data)
        except UNREACHABLE as error:
            raise no_answer(self._http.url, error) from None
        except ValueError:
            raise ConfigError(f"what answers at {self._http.url} speaks no JSON: is it a router?") from None
        if status >= 400:
            raise ConfigError(str(found.get("error", {}).get("message", found)))
        return found

    def status(self) -> dict[str, Any]:
        return self.call("GET", "/admin/status")

    def nodes(self) -> dict[str, NodeStatus]:
        rows = self.status()["nodes"]
        return {row["node"]: NodeStatus(row["node"], row["role"], row["epoch"], row["state"]) for row in rows}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_flag(parser)
    add_router(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_place(actions.add_parser("status", help="every node: role, state, work"))
    for action, text in (("drain", "it finishes and stays down"), ("restart", "it finishes and comes back")):
        one = actions.add_parser(action, help=text)
        one.add_argument("node", nargs="?" if action == "restart" else None)
        if action == "restart":
            one.add_argument("--all", action="store_true", help="every node, one after another")
        add_common(one)
    abort = actions.add_parser("abort", help="end one answer")
    abort.add_argument("id", help="as its client sees it")
    add_place(abort)
    role = actions.add_parser("role", help="it finishes and comes back as the other kind")
    role.add_argument("node")
    role.add_argument("role", choices=("prefill", "decode"))
    add_common(role)


def add_place(parser: argparse.ArgumentParser) -> None:
    """The router once more, behind the words of an action."""
    add_url_word(parser)
    add_url_flag(parser, dest="action_url")


def add_router(parser: argparse.ArgumentParser) -> None:
    """What the router wants to see before it answers."""
    parser.add_argument(
        "--admin-key-file", type=Path, metavar="FILE", help="the router's admin key (default: the one `baton up` made)"
    )
    parser.add_argument("--ca", type=Path, metavar="FILE", help="who signed the proxy's certificate, if not well known")


def add_common(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument(
        "--move-after", type=float, metavar="S", help="seconds its requests get to finish there (default: the router's)"
    )
    parser.add_argument("--force", action="store_true", help="even if no other node is left to serve")
    parser.add_argument("--no-wait", action="store_true", help="return at once")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="longest wait (default: %(default)g)")


def run(args: argparse.Namespace) -> int:
    take_url_from_node(args)
    url = the_only(args.url, args.address, args.action_url) or parse_url(DEFAULT_URL)
    client = AdminClient(url, read_key(args.admin_key_file), args.ca)
    if args.action == "status":
        print(table(client.status()))
        return 0
    if args.action == "abort":
        client.call("POST", "/admin/abort", {"id": args.id})
        return 0
    if args.action == "restart" and args.all == bool(args.node):
        raise ConfigError("restart: name a node, or --all")
    names = sorted(client.nodes()) if getattr(args, "all", False) else [args.node]
    return 0 if all(move(client, name, args) for name in names) else 1


def take_url_from_node(args: argparse.Namespace) -> None:
    """`restart --all URL` names no node, so that its only word is the URL."""
    if args.action == "restart" and args.all and ":" in (args.node or "") and args.address is None:
        args.node, args.address = None, args.node


def read_key(path: Path | None) -> str:
    """Without a flag, the launcher's own file, and no key where there is none."""
    chosen = path or default_path()
    try:
        return chosen.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        if path is None:
            return ""
        raise ConfigError(f"--admin-key-file {path}: {error}") from None


def move(client: AdminClient, name: str, args: argparse.Namespace) -> bool:
    """One node leaves; whether it did (and came back) in time."""
    body: dict[str, Any] = {"node": name, "force": args.force}
    if args.move_after is not None:
        body["move_after_s"] = args.move_after
    if args.action == "role":
        told = client.call("POST", "/admin/role", body | {"role": args.role})
    else:
        told = client.call("POST", "/admin/drain", body | {"then": "stop" if args.action == "drain" else "restart"})
    if args.no_wait:
        return True
    print(f"{name}: draining", flush=True)
    stays_down = args.action == "drain"
    done = wait_for(lambda: has_moved(client.nodes().get(name), told["epoch"], stays_down), args.timeout)
    if not done:
        print(f"{name}: still at it after {args.timeout:g} s", file=sys.stderr)
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
        cells = (node["role"], node["state"], node["open_sequences"], pages, node["waiting"], node["epoch"])
        rows.append([node["node"], *map(str, cells)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = [*hand_overs(status), *prompts(status), *cores(status), *unreachable(status)]
    return "\n".join([f"open requests: {status['open_requests']}", *lines, *more])


def unreachable(status: dict[str, Any]) -> list[str]:
    """Pairs that can't reach each other; an older router does not say."""
    return [
        f"{pair['prefill']} -> {pair['decode']}  can't connect to {pair['endpoint']}, for {pair['since_s']:.0f} s"
        for pair in status.get("unreachable", [])
    ]


def cores(status: dict[str, Any]) -> list[str]:
    """What nodes compute on; an older router does not say."""
    return [f"{node['node']} on cores {node['cores']}" for node in status["nodes"] if node.get("cores")]


def prompts(status: dict[str, Any]) -> list[str]:
    """What prompts and hand-offs were lately measured to take; an older router does not say."""
    told = []
    for node in status["nodes"]:
        rate, handoff_s = node.get("prompt_tokens_per_s"), node.get("handoff_s")
        figures = []
        if rate is not None:
            figures.append(f"prompts at {rate:.0f} tokens/s and {1e3 * node['prompt_step_s']:.1f} ms a step")
        if handoff_s is not None:
            figures.append(f"hand-offs end {1e3 * handoff_s:.1f} ms behind their prompts")
        if figures:
            told.append(f"{node['node']}: {', '.join(figures)}")
    return told


def hand_overs(status: dict[str, Any]) -> list[str]:
    """From which node to which, over what, and why."""
    ways = [(node["node"], node.get("hands_over", {})) for node in status["nodes"]]
    return [f"{node} -> {peer}  {way}" for node, by_peer in ways for peer, way in sorted(by_peer.items())]
