"""Replace each setting of 0 with the CPU's or GPU's default, once the device is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.config.processes import NodeParts


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Steps of these sizes keep the device busy, and don't let running requests wait long."""

    chunk_size: int  # tokens
    mixed_chunk_size: int  # tokens
    max_running: int  # rows


CPU = DeviceDefaults(chunk_size=256, mixed_chunk_size=64, max_running=32)
GPU = DeviceDefaults(chunk_size=8192, mixed_chunk_size=1024, max_running=256)


def with_device_defaults(parts: NodeParts, device: str) -> NodeParts:
    """`device`: where the node's tensors are."""
    own, sched, memory = CPU if device == "cpu" else GPU, parts.sched, parts.memory
    return replace(
        parts,
        sched=replace(
            sched,
            chunk_size=sched.chunk_size or own.chunk_size,
            mixed_chunk_size=sched.mixed_chunk_size or own.mixed_chunk_size,
        ),
        memory=replace(memory, max_running=memory.max_running or own.max_running),
    )
