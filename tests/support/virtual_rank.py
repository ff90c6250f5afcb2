"""A node's rank other than 0 with a virtual GPU. Takes the arguments of shared.ranks.process, whose place it takes."""

from __future__ import annotations

import sys

from shared.ranks import follower, process
from tests.support.virtual_gpu.device import make_device


def main() -> int:
    gpu = make_device()
    follower.TorchCuda = lambda: gpu  # type: ignore[misc,assignment,return-value]
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
