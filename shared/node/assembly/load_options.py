"""Turn a node's settings into options to load its model."""

from __future__ import annotations

from dataclasses import replace

from shared.config.processes import NodeParts
from shared.device.gpu import MemoryInfo
from shared.model.formats.opened import LoadOptions
from shared.model.formats.packed_folder import packed_of
from shared.model.math.kernels import Formats
from shared.node.machine.cores import NodeCores


def load_options(parts: NodeParts, cores: NodeCores | None = None, memory: MemoryInfo | None = None) -> LoadOptions:
    """`memory`: the memory of the model's GPU."""
    wanted = parts.model
    formats = Formats(kv=wanted.kv_dtype, weights=wanted.weight_dtype)
    kernels = "fixed" if parts.sched.deterministic else "auto"
    packed = packed_of(parts.memory.packed_bytes)
    options = LoadOptions(
        wanted.dtype,
        wanted.max_context,
        adapters=wanted.adapters,
        lora_slots=parts.adapters.num_spare,
        formats=formats,
        packed=packed,
        library=wanted.model_library,
        memory=memory,
        kernels=kernels,
    )
    if cores is None:
        return options
    if parts.parallel.pp > 1:  # stages compute at the same time, each with its own team
        return replace(options, threads=cores.threads)
    return replace(options, team=cores.team)
