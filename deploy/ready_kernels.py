"""Compile a node's kernels for a model, so that its first start finds them on disk.

    python -m deploy.ready_kernels smollm2|hashlm

`make setup` runs both at the same time, because they compile one after the other what they don't share. Other models
compile more at their first start.
"""

from __future__ import annotations

import sys

from shared.config import core_plan
from shared.config.load import load
from shared.config.processes import NodeProcessConfig

LITTLE = 16 << 20  # bytes of KV memory; enough, because no request is served


def main() -> int:
    memory = {"kv_bytes": LITTLE, "packed_bytes": 0}
    config = load(
        NodeProcessConfig, {"model": {"model": sys.argv[1]}, "memory": memory}, fixed={"node": {"role": "decode"}}
    )
    core_plan.apply(config.cores)
    # these imports load torch, so the threads must be set before
    from shared.kernel.team.core_words import make_forget, make_hold
    from shared.node.assembly.build_core import build_core
    from shared.node.assembly.warm_up import warm_up
    from shared.node.machine.compiling import KernelLog, tell_of_kernels
    from shared.node.machine.cores import NodeCores
    from shared.observe.log import Logger
    from shared.ranks.leader import RankProcesses

    log = Logger("setup", sys.stderr)
    kernels = KernelLog(log)
    stop = tell_of_kernels(kernels, config.parts.sched.device)
    cores = NodeCores(config.cores, config.parts.parallel, "setup")
    core = build_core(config, log, lambda: None, RankProcesses(config, "setup"), cores)
    try:
        warm_up(core, log)
        make_forget(), make_hold()  # for cores that nodes of one machine lend each other; a lone node has none
        kernels.serving()
    finally:
        core.close()
        cores.close()
        stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
