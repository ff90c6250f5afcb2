"""The command line of `baton doctor`. Other modules are imported late: reading keys loads zmq."""

from __future__ import annotations

import argparse

from deploy.tools.doctor.settings import DESCRIPTION, add_arguments

__all__ = ["DESCRIPTION", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from deploy.tools.doctor import visit

    return visit.run(args)
