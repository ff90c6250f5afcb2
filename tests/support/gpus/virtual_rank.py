"""A node's rank other than 0 with a virtual GPU. Takes the arguments of shared.ranks.process, whose place it takes.

    --ends-at=decode,FILE       before them: it is killed when it should take part in that

Then a process stays, whose id is in FILE, and holds the connections of the group open: as with NCCL, nothing tells the
other ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from shared.ranks import follower, process
from shared.ranks.on_device import DeviceFollower, inputs_of
from shared.ranks.orders import Forward
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.virtual_gpu.device import make_device

ENDS_AT = "--ends-at="
LOAD, PROMPT, DECODE = "load", "prompt", "decode"


def main() -> int:
    gpu = make_device()
    follower.TorchCuda = lambda: gpu  # type: ignore[misc,assignment,return-value]
    if sys.argv[1].startswith(ENDS_AT):
        phase, _, file = sys.argv.pop(1).removeprefix(ENDS_AT).partition(",")
        end_at(phase, Path(file))
    return process.main()


def end_at(phase: str, file: Path) -> None:
    measure, forward, measured = DeviceFollower._use, DeviceFollower._forward, []

    def measuring(self: DeviceFollower) -> object:
        measured.append(True)
        return measure(self)

    def ending(self: DeviceFollower, order: Forward) -> None:
        longest = inputs_of(order, torch.zeros(order.num_numbers, dtype=torch.int64)).layout.max_q_len
        if measured and phase == (DECODE if longest == 1 else PROMPT):
            end(file)
        forward(self, order)

    if phase == LOAD:
        follower.join_ranks = lambda *_: end(file)  # type: ignore[assignment]
    DeviceFollower._use, DeviceFollower._forward = measuring, ending  # type: ignore[method-assign,assignment]


def end(file: Path) -> None:
    if not os.fork():
        signal.alarm(int(HANG_GUARD_S))  # it stays no longer, whatever happens to the test
        orders = next(argument for argument in sys.argv if argument.startswith("--orders="))
        os.close(int(orders.partition("=")[2]))
        half = file.with_suffix(".half")
        half.write_text(str(os.getpid()))
        half.rename(file)
        signal.pause()
    while not file.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
