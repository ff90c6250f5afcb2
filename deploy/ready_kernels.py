"""Compiles what a node of the default model runs, so that the first start finds it on disk. Set-up runs this.

    python -m deploy.ready_kernels        # seconds where it is compiled already

What is compiled lies beside the sources, or where NUMBA_CACHE_DIR says; other models have some kernels of their own,
which their first start compiles.
"""

from __future__ import annotations

import sys

from shared.config import core_plan
from shared.config.load import load
from shared.config.processes import NodeProcessConfig

LITTLE = 16 << 20  # bytes of KV: nobody is served


def main() -> int:
    config = load(
        NodeProcessConfig, {"memory": {"kv_bytes": LITTLE, "packed_bytes": 0}}, fixed={"node": {"role": "decode"}}
    )
    core_plan.apply(config.cores)
    from shared.node.build import build_core, warm_up  # they load torch, whose threads are dealt out now
    from shared.node.compiling import KernelLog, tell_of_kernels
    from shared.node.cores import NodeCores
    from shared.observe.log import Logger
    from shared.ranks.leader import RankProcesses

    log = Logger("setup", sys.stderr)
    kernels = KernelLog(log)
    stop = tell_of_kernels(kernels, config.parts.sched.device)
    cores = NodeCores(config.cores, config.parts.parallel, "setup")
    core = build_core(config, log, lambda: None, RankProcesses(config, "setup"), cores)
    try:
        warm_up(core, log)
        kernels.serving()
    finally:
        core.close()
        cores.close()
        stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
