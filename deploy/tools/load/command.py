"""The command line of `baton load`. The harness is imported late: other commands set threads before numpy loads."""

from __future__ import annotations

import argparse

from deploy.tools.traffic.options import DESCRIPTION, add_arguments

__all__ = ["DESCRIPTION", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from deploy.tools.load import harness

    return harness.run(args)
