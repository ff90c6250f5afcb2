"""What an error says of the device that raised it. Knows nothing of steps."""

from __future__ import annotations

import torch


def blames_device(error: BaseException) -> bool:
    """Whether the runtime says that the device did not do what it was told (`AcceleratorError`: an illegal address, a
    failed launch, a memory fault). Memory that runs out is another error, and the next step may be smaller."""
    return isinstance(error, torch.AcceleratorError)
