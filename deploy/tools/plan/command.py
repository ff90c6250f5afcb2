"""The command line of `baton plan`. Other modules are imported only when they are used, because they load torch. Cores
must be assigned before torch is loaded."""

from __future__ import annotations

import argparse

from deploy.tools.plan.options import DESCRIPTION, add_arguments

__all__ = ["DESCRIPTION", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from deploy.tools.plan import run

    return run.run(args)
