"""What an error says of the device that raised it. Knows nothing of steps."""

from __future__ import annotations

import torch

DEVICE_WORDS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "CUSOLVER_STATUS", "cuDNN error")


def blames_device(error: BaseException) -> bool:
    """Whether the runtime says that the device did not do what it was told (`AcceleratorError`: an illegal address, a
    failed launch, a memory fault), or a library on it; older torch and libraries say so in plain RuntimeErrors. What it
    was raised from counts too. Memory that runs out is another error, and the next step may be smaller."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    said = isinstance(error, RuntimeError) and any(word in str(error) for word in DEVICE_WORDS)
    cause = error.__cause__
    return isinstance(error, torch.AcceleratorError) or said or (cause is not None and blames_device(cause))
