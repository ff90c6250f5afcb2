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
  baton doctor --keys DIR                       whether nodes would take this keys folder: those of the user whose
                                                daemons use it; before there are any, yours, or for root its owner's
  baton doctor --gpu                            this machine's GPUs too: versions, memory, copies, a tiny
                                                network's logits beside the CPU's
  baton doctor --json                           for programs

Each line says how bad it is (ok, look, BROKEN), where, what, and what to do. Compares nodes field by field; looks for
pages that nobody uses and nobody gives back (ask at rest), clocks, ports, slow hand-offs, refused connections; and on
this machine for cores that are fought over, memory, disks, keys that others could read. With no router running it
looks at this machine only. Run it on each machine of a cluster: cores and ports are seen from where it runs.

Exit status: 0, or 1 when something is broken, 2 when a flag makes no sense.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    add_router(parser)
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="the clients' key, where the admin key is not at hand"
    )
    parser.add_argument(
        "--keys", type=Path, metavar="DIR", help="keys folder (default: those of daemons that run here)"
    )
    parser.add_argument(
        "--dial", action="append", default=[], metavar="ENDPOINT", help="one more port to knock at, tcp://host:port"
    )
    parser.add_argument(
        "--interval", type=float, default=3.0, metavar="S", help="between the two looks (default: %(default)g)"
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="try this machine's GPUs, too: takes seconds and some hundred MB on each. Baton was never run on a GPU",
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")
