"""What work on CUDA must not touch: another thread's streams, another token's sums."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from shared.device.cuda import CudaStream
from shared.device.events import Event
from shared.device.streams import make_streams
from shared.kernel.product.experts import Experts
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.virtual_gpu.device import make_device

WATCHER_IS_FIRST_S = 0.03  # long enough for another thread to run


class SlowPut:
    """A queue whose reader always runs before `put` returns."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def put(self, item: Any) -> None:
        self._inner.put(item)
        time.sleep(WATCHER_IS_FIRST_S)

    def get(self) -> Any:
        return self._inner.get()


def test_what_was_held_goes_on_on_the_thread_that_launches() -> None:
    """The watcher may complete the event at once; slots, leases and what is held belong to the loop's thread."""
    gpu, gate, ran_on = make_device("eager"), Event("gate"), list[str]()
    streams = make_streams("cuda", gpu=gpu)
    assert isinstance(streams.forward, CudaStream)
    marks = streams.forward._marks
    marks._pending = SlowPut(marks._pending)  # type: ignore[assignment]
    streams.forward.wait(gate)
    held = streams.forward.launch(lambda: None)
    streams.copy.wait(held.done)
    read = streams.copy.launch(lambda: ran_on.append(threading.current_thread().name))
    gate.fire()
    read.take(HANG_GUARD_S)
    streams.stop()
    assert ran_on == [threading.current_thread().name]


def test_an_expert_s_overflow_is_nobody_else_s() -> None:
    """On a device every expert runs on every token: what it makes of one that did not choose it must not be seen."""
    gpu = make_device("eager")

    def experts(device: torch.device) -> Experts:
        likes = torch.diag(torch.tensor([9.0, 9.0, 0.0, 0.0])).to(device)
        same, huge = torch.eye(4).half().to(device), (torch.eye(4) * 60000).half().to(device)
        gates: list[Any] = [lambda x: x @ same, lambda x: x @ huge]
        downs: list[Any] = [lambda x: x @ same] * 2
        return Experts(lambda x: (x.float() @ likes)[:, :2], gates, downs, top_k=1, normalise=True)

    tokens = torch.tensor([[3.0, 0, 0, 0], [0, 1.0, 0, 0]]).half()
    wanted = experts(torch.device("cpu"))(tokens, lambda linear, x: linear(x), lambda x: x)
    with torch.no_grad():
        found = experts(gpu.device)(tokens.to(gpu.device), lambda linear, x: linear(x), lambda x: x).cpu()
    assert wanted.isfinite().all() and torch.equal(found, wanted)
