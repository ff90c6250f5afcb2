"""What the environment says about GPUs, without torch: whether there is a driver, and which GPUs a process may see."""

from __future__ import annotations

import os
from pathlib import Path

# One of these exists if an NVIDIA driver is loaded. The second is its part in WSL, whose device is all vendors'.
DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
NO_GPU = ("", "-1")  # first entries of CUDA_VISIBLE_DEVICES that hide all GPUs
VISIBLE = "CUDA_VISIBLE_DEVICES"
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


def environment_with(visible: str) -> dict[str, str]:
    """Return this process's environment for a child that sees the GPUs `visible`, its own one first."""
    return {**os.environ, VISIBLE: visible}  # noqa: TID251
