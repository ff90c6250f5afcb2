"""What the environment says about GPUs, without torch: whether there is a driver, and which GPUs a process may see."""

from __future__ import annotations

import os
from pathlib import Path

# One of these exists if an NVIDIA driver is loaded. The second is its part in WSL, whose device is all vendors'.
DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
NO_GPU = ("", "-1")  # first entries of CUDA_VISIBLE_DEVICES that hide all GPUs
VISIBLE = "CUDA_VISIBLE_DEVICES"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
ATTENTION_CHOICES = (
    "on a GPU, whose kernels compute attention; auto: the library FlashInfer (extra gpu) if it suits the model and "
    "`baton doctor --gpu` found that it is right here, else Baton's own; flashinfer: without that check. Trees of "
    "drafts have Baton's own in both cases. So have, under auto, float32, sliding windows, heads of other sizes than "
    "64 and 128, --kv-dtype and --deterministic; flashinfer refuses them. Nodes pair only with the same"
)


def has_driver() -> bool:
    return any(file.exists() for file in DRIVER_FILES)


def visible_gpus() -> str | None:
    return os.environ.get(VISIBLE)  # noqa: TID251


def visible_to_rank(rank: int, size: int) -> str:
    """Return what a rank's process sees: the node's GPUs, its own one first. The node sees its own `size` first."""
    seen = visible_gpus()
    entries = list(map(str, range(size))) if seen is None else seen.replace(" ", "").split(",")
    return ",".join([entries[rank], *entries[:rank], *entries[rank + 1 :]])


def keep_nccl_on_loopback() -> None:
    """Let NCCL of this process meet the node's other ranks on loopback, unless the user has named an interface."""
    os.environ.setdefault(NCCL_INTERFACE, "lo")  # noqa: TID251


def environment_with(visible: str) -> dict[str, str]:
    """Return this process's environment for a child that sees the GPUs `visible`, its own one first."""
    return {**os.environ, VISIBLE: visible}  # noqa: TID251
