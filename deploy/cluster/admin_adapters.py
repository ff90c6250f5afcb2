"""`baton admin adapters`: show, load or remove LoRA adapters of a running cluster."""

from __future__ import annotations

import argparse
import sys
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, Protocol

POLL_S = 0.2
UNFINISHED = ("unanswered", "loading", "leaving")
SHOWN_DIGEST = 12
Row = dict[str, Any]
GONE = {"state": "refused", "why": "it has left since"}


class Caller(Protocol):
    """AdminClient."""

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]: ...


def add_adapters(actions: Any, add_place: Callable[[argparse.ArgumentParser], None]) -> None:
    """`add_place`: adds the router's address and the key for it, as to the other actions."""
    adapters = actions.add_parser("adapters", help="show, load or remove LoRA adapters")
    what = adapters.add_subparsers(dest="what", metavar="WHAT", required=True)
    shows = what.add_parser("list", help="show which node has which adapter")
    loads = what.add_parser("load", help="load an adapter on every node, from the node's --lora-dir")
    loads.add_argument("name", help="the name by which requests ask for it")
    loads.add_argument("--path", metavar="PATH", help="its folder, relative to each node's --lora-dir (default: NAME)")
    removes = what.add_parser("remove", help="take no new requests for an adapter, and free its memory when all ended")
    removes.add_argument("name")
    removes.add_argument(
        "--move-after",
        type=float,
        metavar="S",
        help="seconds until its open requests move to other nodes that have it, or fail (default: set by the router)",
    )
    for one in (shows, loads, removes):
        add_place(one)
    for one in (loads, removes):
        one.add_argument(
            "--timeout",
            type=float,
            default=300.0,
            metavar="S",
            help="seconds to wait for the nodes (default: %(default)g)",
        )


def run_adapters(args: argparse.Namespace, client: Caller) -> int:
    """Return 0 only if every node did it."""
    if args.what == "list":
        print("\n".join(listed(client.call("GET", "/admin/adapters"))))
        return 0
    if args.what == "load":
        body = {"name": args.name} | ({} if args.path is None else {"path": args.path})
        told = client.call("POST", "/admin/adapters", body)
    else:
        body = {} if args.move_after is None else {"move_after_s": args.move_after}
        told = client.call("DELETE", f"/admin/adapters/{urllib.parse.quote(args.name)}", body)
    rows = finished(client, told, args.timeout)
    for row in rows:
        print(f"{row['node']}: {said(row)}", flush=True)
    digests = {row["digest"] for row in rows if row["state"] == "loaded"}
    if len(digests) > 1:
        print(f"nodes have other weights for {args.name}: only nodes that agree with most serve it", file=sys.stderr)
    wanted = "loaded" if args.what == "load" else "removed"
    return 0 if len(digests) <= 1 and all(row["state"] == wanted for row in rows) else 1


def finished(client: Caller, told: Row, timeout_s: float) -> list[Row]:
    """Return the order's last row of each node."""
    rows: dict[str, Row] = {row["node"]: row for row in told["nodes"]}
    until = time.monotonic() + timeout_s
    while any(row["state"] in UNFINISHED for row in rows.values()) and time.monotonic() < until:
        time.sleep(POLL_S)
        now = {node["node"]: node["orders"] for node in client.call("GET", "/admin/adapters")["nodes"]}
        for name, row in rows.items():
            if row["state"] in UNFINISHED:
                orders = [order for order in now.get(name, []) if order["number"] == told["number"]]
                rows[name] = row | (orders[0] if orders else {}) | ({} if name in now else GONE)
    return list(rows.values())


def said(row: Row) -> str:
    if row["state"] == "refused":
        return f"refused: {row['why']}"
    if row["state"] == "leaving":
        return f"leaving: {row['requests']} requests still use it"
    return f"{row['state']} {row['digest'][:SHOWN_DIGEST]}".rstrip()


def listed(answer: Row) -> list[str]:
    """Return a line for each adapter that is served, and for each node that differs or has refused one."""
    served, nodes = answer["adapters"], answer["nodes"]
    lines = [] if served else ["no adapters"]
    for name, digest in sorted(served.items()):
        having = sorted(node["node"] for node in nodes if node["adapters"].get(name) == digest)
        lines.append(f"{name}  {digest[:SHOWN_DIGEST]}  on {', '.join(having)}")
    for node in nodes:
        others = [name for name, digest in node["adapters"].items() if served.get(name) != digest]
        lines += [f"{node['node']} has other weights for {name}: it serves no requests for it" for name in others]
        news = [order for order in node["orders"] if order["state"] in (*UNFINISHED, "refused")]
        lines += [f"{node['node']}: {order['name']} {said(order)}" for order in news]
    return lines
