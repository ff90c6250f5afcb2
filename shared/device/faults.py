"""Tell device faults from other errors."""

from __future__ import annotations

import torch

DEVICE_WORDS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "CUSOLVER_STATUS", "cuDNN error")


def blames_device(error: BaseException) -> bool:
    """Return whether the error or its cause is a device fault.

    torch raises `AcceleratorError`; libraries and older versions of torch raise RuntimeError. Running out of memory is
    not a device fault, because the next step may be smaller.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    said = isinstance(error, RuntimeError) and any(word in str(error) for word in DEVICE_WORDS)
    cause = error.__cause__
    return isinstance(error, torch.AcceleratorError) or said or (cause is not None and blames_device(cause))
