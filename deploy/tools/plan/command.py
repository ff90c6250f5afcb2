"""The command line of `baton plan`. Other modules are imported late: they load torch, and cores must be assigned
before that."""

from __future__ import annotations

import argparse

from deploy.tools.plan.options import DESCRIPTION, add_arguments

__all__ = ["DESCRIPTION", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from deploy.tools.plan import run

    return run.run(args)
