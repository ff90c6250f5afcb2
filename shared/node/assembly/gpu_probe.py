"""Tell the launcher which GPUs nodes of these settings would use on this machine. Run as a process of its own:

    python -P .../launcher.py shared.node.assembly.gpu_probe PARENT_PID --model ...   ->   a line of JSON

The launcher itself loads no torch, so it holds no GPU memory, and a driver that hangs or crashes does not stop it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from shared.config.flags import add_flags, given_values
from shared.config.load import load
from shared.config.processes import NodeProcessConfig
from shared.core.errors import ConfigError
from shared.core.orphan_guard import die_with_parent
from shared.device.gpu import Gpu, devices
from shared.device.torch_cuda import TorchCuda
from shared.node.assembly.build_model import why_no_gpu


def probe(flags: Sequence[str], gpu: Gpu) -> dict[str, object]:
    """Return one of: `names` of GPUs, by CUDA's number; `why` nodes compute on the CPU; why they are `refused`.

    `flags`: a node's, as its command takes them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, NodeProcessConfig)
    try:
        why = why_no_gpu(load(NodeProcessConfig, given_values(parser.parse_args(flags))).parts, gpu)
    except ConfigError as error:
        return {"refused": error.message}
    return {"why": why} if why else {"names": [gpu.describe(where).name for where in devices(gpu)]}


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    print(json.dumps(probe(sys.argv[2:], TorchCuda())))
