"""The command's face. What it runs is loaded when it runs: it loads torch, whose threads are dealt out before."""

from __future__ import annotations

import argparse

from deploy.tools.plan.options import DESCRIPTION, add_arguments

__all__ = ["DESCRIPTION", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from deploy.tools.plan import run

    return run.run(args)
