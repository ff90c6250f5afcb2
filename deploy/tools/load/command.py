"""The command's face. What it runs is loaded when it runs: others must set their threads before numpy is there."""

from __future__ import annotations

import argparse

from deploy.tools.load.options import DESCRIPTION, add_arguments

__all__ = ["DESCRIPTION", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from deploy.tools.load import harness

    return harness.run(args)
