"""The command line of `baton ray`. Modules that load Ray are imported only when used."""

from __future__ import annotations

import argparse
from pathlib import Path

from shared.config.load import load
from shared.config.processes import RayClusterConfig
from shared.config.settings import ray_settings
from shared.core import extras

DESCRIPTION = """\
baton ray: a cluster on the machines of a Ray cluster, or on a fresh Ray that has only this machine. Ray starts, watches
and stops routers and nodes, each with an actor of its own. No request passes through Ray.

  baton ray up cluster.toml       returns when everything is ready
  baton ray status                what runs where; exit status 0 when all of it runs
  baton ray down                  stops all of it; streams get time to finish

cluster.toml has the tables of `baton up` and three more, [ray], [share] and [scaling]:

  [ray]
  address = "10.0.0.1:6379"       # empty or left out: a fresh Ray on this machine, on 127.0.0.1
  routers = 1
  prefill = 2
  decode = 2
  [share]
  decode_cpus = 4                 # reserved cores, and threads, of each decode node; also: prefill_cpus,
                                  # router_cpus, decode_gpus, prefill_gpus
  [scaling]
  max_decode = 6                  # grows while full, shrinks (after draining) while one node less is enough
  [security]
  keys = "/etc/baton/keys"        # needed for more than one machine: see `baton keys`
  [model]
  model = "/models/llama"         # at this path on every machine

Only Ray's own authentication, which is off by default, keeps others from running code through
its ports. Run it in a network of machines that you trust (docs/security.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    up = actions.add_parser("up", help="start the cluster that a file describes")
    up.add_argument("file", type=Path, metavar="FILE")
    for action, text in (("status", "show what runs where"), ("down", "stop the cluster")):
        one = actions.add_parser(action, help=text)
        one.add_argument(
            "file",
            type=Path,
            nargs="?",
            metavar="FILE",
            help="the cluster's file (default: the last cluster started here)",
        )
        if action == "status":
            one.add_argument("--json", action="store_true", help="print one JSON list of objects")


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
    from deploy.ray.own_ray import read_record  # loads psutil

    record = read_record()
    return record.address if record is not None else ""
