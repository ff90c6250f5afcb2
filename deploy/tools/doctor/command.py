"""The command's face. What it runs is loaded when it runs: it reads keys, and that loads zmq."""

from __future__ import annotations

import argparse

from deploy.tools.doctor.settings import DESCRIPTION, add_arguments

__all__ = ["DESCRIPTION", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from deploy.tools.doctor import visit

    return visit.run(args)
