"""Measure one node's steps on this process's cores (--out FILE), or keep these cores busy until killed (--busy).

`measure.py` starts both: the busy process is the measured node's neighbour.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shared.config import core_plan
from shared.config.flags import add_flags, given_values
from shared.config.load import load
from shared.config.processes import NodeProcessConfig
from shared.core.orphan_guard import die_with_parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--parent-pid", type=int, default=0)
    add_flags(parser, NodeProcessConfig)
    args = parser.parse_args()
    config = load(NodeProcessConfig, given_values(args))
    if args.parent_pid:
        die_with_parent(args.parent_pid)
    core_plan.apply(config.cores)
    from deploy.tools.plan.step_bench import serve

    return serve(config, None if args.busy else args.out)


if __name__ == "__main__":
    sys.exit(main())
