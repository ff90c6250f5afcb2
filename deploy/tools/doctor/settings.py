"""The flags of `baton doctor`."""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.cluster.admin import add_router
from deploy.router_url import add_url

DESCRIPTION = """\
baton doctor: what is wrong with a cluster, and with the machine that this runs on.

  baton doctor                                  the cluster of `baton up`, and this machine
  baton doctor URL --admin-key-file FILE        another router; without its admin key nodes can't be compared
  baton doctor --dial tcp://10.0.0.1:7001       on a node's machine: does the router's port answer from here?
  baton doctor --keys DIR                       would nodes accept this keys folder? Judged for the user whose
                                                daemons use it; if no daemon uses it, for you, or for the folder's
                                                owner if you are root
  baton doctor --gpu                            this machine's GPUs too: versions, memory, copies, a tiny
                                                network's logits compared with the CPU's
  baton doctor --json                           for programs

Each line says how bad it is (ok, look, BROKEN), where, what, and what to do. Compares nodes field by field; looks for
leaked pages (ask while no request runs), clocks, ports, slow hand-offs and refused connections. On this machine it
looks for contended cores, low memory, full disks and keys that others could read. If no router answers,
it looks at this machine only. Run it on each machine of a cluster: cores and ports are seen from where it runs.

Exit status: 0, or 1 when something is broken, 2 when a flag makes no sense.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    add_router(parser)
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="a client's key, if you don't have the admin key"
    )
    parser.add_argument(
        "--keys", type=Path, metavar="DIR", help="keys folder (default: the folders of the daemons that run here)"
    )
    parser.add_argument(
        "--dial", action="append", default=[], metavar="ENDPOINT", help="another port to dial, tcp://host:port"
    )
    parser.add_argument(
        "--interval", type=float, default=3.0, metavar="S", help="time between the two looks (default: %(default)g)"
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="also try this machine's GPUs; takes seconds and a few hundred MB of each",
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")
