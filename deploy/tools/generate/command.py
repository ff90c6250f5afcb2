"""The command line of `baton generate`. Other modules are imported late: `baton` itself loads neither asyncio
nor rich."""

from __future__ import annotations

import argparse

from deploy.tools.generate.options import DESCRIPTION, add_arguments

__all__ = ["DESCRIPTION", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from deploy.tools.generate import batch

    return batch.run(args)
