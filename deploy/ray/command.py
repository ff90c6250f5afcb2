"""`baton ray`, the command's face: what it does is loaded when it runs, for it loads Ray."""

from __future__ import annotations

import argparse
from pathlib import Path

from shared.config import ray_settings
from shared.config.load import load
from shared.config.processes import RayClusterConfig
from shared.core import extras

DESCRIPTION = """\
baton ray: a cluster on the machines of a Ray cluster, or on a Ray of this machine alone. Ray starts, watches and stops
routers and nodes, each beside an actor of its own; no request passes through it.

  baton ray up cluster.toml       returns when everything is ready
  baton ray status                who runs where; exit status 0 when everyone does
  baton ray down                  stops all of it, streams get their time to end

cluster.toml has the tables of `baton up`, and three more, [ray], [share] and [scaling]:

  [ray]
  address = "10.0.0.1:6379"       # empty or left out: a fresh Ray on this machine, on 127.0.0.1
  routers = 1
  prefill = 2
  decode = 2
  [share]
  decode_cpus = 4                 # cores reserved, and threads; prefill_cpus, router_cpus, decode_gpus, prefill_gpus
  [scaling]
  max_decode = 6                  # grows while full, shrinks (drained first) while a node less would do
  [security]
  keys = "/etc/baton/keys"        # needed for more than one machine: see `baton keys`
  [model]
  model = "/models/llama"         # lies at this path on every machine

Nothing but Ray's own authentication, which is off unless you switch it on, keeps strangers from running code through
its ports: run it in a network of machines that you trust (SECURITY.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    up = actions.add_parser("up", help="start the cluster that a file describes")
    up.add_argument("file", type=Path, metavar="FILE")
    for action, text in (("status", "who runs where"), ("down", "stop all of it")):
        one = actions.add_parser(action, help=text)
        one.add_argument(
            "file", type=Path, nargs="?", metavar="FILE", help="the cluster's (default: the last one started here)"
        )
        if action == "status":
            one.add_argument("--json", action="store_true", help="one list of objects")


def run(args: argparse.Namespace) -> int:
    extras.require("ray", "this")
    config = load(RayClusterConfig, {}, args.file)
    ray_settings.apply(config.ray.address if args.file else known_address())
    from deploy.ray import session

    if args.action == "up":
        return session.up(config)
    record = session.chosen(config.ray.address, config.ray.cluster if args.file else "")
    return session.down(record) if args.action == "down" else session.status(record, args.json)


def known_address() -> str:
    """Of the last cluster that was started here."""
    from deploy.ray.own_ray import read_record  # loads psutil, which the command itself does without

    record = read_record()
    return record.address if record is not None else ""
