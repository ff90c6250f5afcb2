"""Group a node's ranks: they gather tensors, add them, send them, and wait for one another.

        rank 0   | x0 |--+        | x0 x1 |
        rank 1   | x1 |--+-- -->  | x0 x1 |      every rank has the same bits

gloo (RankGroup) copies bytes, and each rank adds in rank order. It copies tensors of a device through the host's
memory: only tests do that, on virtual GPUs. NCCL (NcclRanks) runs on the current stream's order and adds in its own
order, which is the same on all ranks.

Every rank makes the same calls in the same order. If a rank ends, or is silent for longer than the timeout, the other
ranks' calls raise RankLost, and the group is unusable. With NCCL a call returns before the device has run it: torch's
watchdog then ends the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from shared.config.machine.gpus import keep_nccl_on_loopback
from shared.core.errors import RankLost

LOOPBACK = "127.0.0.1"  # all ranks of a node are on one machine
WHOLE_STEPS_S = 60.0  # more than the steps that a device has ahead of it: NCCL's calls end behind them


class Pending(Protocol):
    def wait(self) -> bool: ...


class Backend(Protocol):
    """Methods of torch's process groups, most of which torch's stubs lack."""

    def _set_default_timeout(self, timeout: timedelta) -> None: ...

    def set_timeout(self, timeout: timedelta) -> None: ...

    def abort(self) -> None: ...

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def allreduce(self, tensors: list[torch.Tensor]) -> Pending: ...

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Pending: ...

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor) -> Pending: ...

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Pending: ...

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending: ...

    def barrier(self) -> Pending: ...


def file_store(path: str, size: int) -> dist.Store:
    """Return the store with which the ranks find each other. Its file may exist already. The node owns the folder."""
    return dist.FileStore(path, size)


def join_ranks(store: dist.Store, rank: int, size: int, patience_s: float, device: torch.device) -> RankGroup:
    """Wait for all ranks. `device`: where this rank computes. Raises RankLost if a rank is late."""
    kind = NcclRanks if device.type == "cuda" else RankGroup
    return kind(store, rank, size, patience_s)


class RankGroup:
    """One thread at a time may use the group."""

    def __init__(self, store: dist.Store, rank: int, size: int, patience_s: float) -> None:
        """Wait for all ranks. Raise RankLost if a rank is late."""
        self.rank, self.size = rank, size
        with self._together("joining"):
            self._group = self._join(store, timedelta(seconds=patience_s))

    def _join(self, store: dist.Store, patience: timedelta) -> Backend:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs name it `Options`
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = patience
        joined: Any = dist.ProcessGroupGloo(store, self.rank, self.size, options)  # the stubs lack this constructor
        return cast(Backend, joined)

    def be_patient(self, seconds: float) -> float:
        """Let an awaited rank count as lost after `seconds`, or later. Return after how many."""
        self._group._set_default_timeout(timedelta(seconds=seconds))
        return seconds

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        """Return every rank's x, all of one shape and dtype, as a new (size, *shape) tensor in rank order."""
        own = x.contiguous().cpu()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        if x.numel():
            with self._together("gathering"):
                self._group._allgather_base(as_bytes(out), as_bytes(own)).wait()
        return out.to(x.device)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's x, all of one shape and dtype, as a new tensor."""
        return self.stack(x).sum(dim=0, dtype=torch.float32).to(x.dtype)

    def broadcast(self, x: torch.Tensor) -> None:
        """Fill the contiguous x of all ranks with rank 0's, all of one shape and dtype."""
        host = x.cpu()
        if x.numel():
            with self._together("broadcasting"):
                self._group.broadcast([as_bytes(host)], dist.BroadcastOptions()).wait()
        if x.device.type != "cpu":
            x.copy_(host)

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """Return every rank's x (M, n) as a new (M, size * n) tensor, with rank 0's columns first."""
        return self.stack(x).transpose(0, 1).reshape(len(x), -1)

    def send(self, x: torch.Tensor, to: int) -> None:
        """Return once the other rank has received x, which is on the CPU."""
        with self._together("sending"):
            self._group.send([as_bytes(x.contiguous())], to, 0).wait()

    def receive(self, x: torch.Tensor, source: int) -> None:
        """Fill the contiguous x, on the CPU, with the other rank's tensor of the same shape and dtype."""
        with self._together("receiving"):
            self._group.recv([as_bytes(x)], source, 0).wait()

    def barrier(self) -> None:
        """Wait for all ranks. Then each rank sees the others' earlier writes to shared memory."""
        with self._together("waiting"):
            self._group.barrier().wait()

    def abort(self) -> None:
        """End what the device runs for the group, so that waits for the device end. Any thread may call it."""

    @contextlib.contextmanager
    def _together(self, doing: str) -> Generator[None, None, None]:
        try:
            yield
        except RuntimeError as error:  # torch raises it for closed connections and timeouts
            raise RankLost(f"rank {self.rank} of {self.size}, {doing}: {str(error).splitlines()[0]}") from error


class NcclRanks(RankGroup):
    """The ranks of a node with a GPU for each, which is the process's first one.

    Follows torch's documentation of ProcessGroupNCCL. Never run: see docs/gpu.md. A `wait` makes only the current
    stream wait, so the host goes on."""

    def _join(self, store: dist.Store, patience: timedelta) -> Backend:
        keep_nccl_on_loopback()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = patience
        group: Any = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        group.eager_connect_single_device(torch.device("cuda", 0))
        return cast(Backend, group)

    def be_patient(self, seconds: float) -> float:
        """Steps under way on the device don't count as silence."""
        patience_s = max(seconds, WHOLE_STEPS_S)
        self._group.set_timeout(timedelta(seconds=patience_s))
        return patience_s

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((self.size, *x.shape))
        if x.numel():
            with self._together("gathering"):
                self._group._allgather_base(as_bytes(out), as_bytes(x.contiguous())).wait()
        return out

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        if x.numel():
            with self._together("adding"):
                self._group.allreduce([total]).wait()
        return total

    def broadcast(self, x: torch.Tensor) -> None:
        if x.numel():
            with self._together("broadcasting"):
                self._group.broadcast([x], dist.BroadcastOptions()).wait()

    def abort(self) -> None:
        with contextlib.suppress(RuntimeError):  # it ended by itself
            self._group.abort()


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View a contiguous x as flat uint8, because gloo lacks some dtypes. x with one element may have any strides."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
