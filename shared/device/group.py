"""Group a node's ranks over gloo: ranks gather tensors, send them, and wait for one another.

        rank 0   | x0 |--+        | x0 x1 |
        rank 1   | x1 |--+-- -->  | x0 x1 |      bytes are copied, never added: every rank has the same bits

Every rank makes the same calls in the same order. If a rank ends, or is silent for longer than the timeout, the other
ranks' calls raise RankLost, and the group is unusable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from shared.core.errors import RankLost

LOOPBACK = "127.0.0.1"  # all ranks of a node are on one machine


class Pending(Protocol):
    def wait(self) -> bool: ...


class Gloo(Protocol):
    """Methods of torch's ProcessGroupGloo, most of which torch's stubs lack."""

    def _set_default_timeout(self, timeout: timedelta) -> None: ...

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor) -> Pending: ...

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Pending: ...

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending: ...

    def barrier(self) -> Pending: ...


def file_store(path: str, size: int) -> dist.Store:
    """Return the store with which the ranks find each other. Its file may exist already. The node owns the folder."""
    return dist.FileStore(path, size)


class RankGroup:
    """One thread at a time may use the group. Tensors are on the CPU."""

    def __init__(self, store: dist.Store, rank: int, size: int, patience_s: float) -> None:
        """Wait for all ranks. Raise RankLost if a rank is late."""
        self.rank, self.size = rank, size
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs name it `Options`
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=patience_s)
        with self._together("joining"):
            # the stubs lack this constructor and the methods of Gloo
            self._gloo: Gloo = dist.ProcessGroupGloo(store, rank, size, options)  # type: ignore[assignment]

    def be_patient(self, seconds: float) -> None:
        """An awaited rank counts as lost after `seconds`."""
        self._gloo._set_default_timeout(timedelta(seconds=seconds))

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        """Return every rank's x, all of one shape and dtype, as a new (size, *shape) tensor in rank order."""
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        if x.numel():
            with self._together("gathering"):
                self._gloo._allgather_base(as_bytes(out), as_bytes(x.contiguous())).wait()
        return out

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """Return every rank's x (M, n) as a new (M, size * n) tensor, with rank 0's columns first."""
        return self.stack(x).transpose(0, 1).reshape(len(x), -1)

    def send(self, x: torch.Tensor, to: int) -> None:
        """Return once the other rank has received x."""
        with self._together("sending"):
            self._gloo.send([as_bytes(x.contiguous())], to, 0).wait()

    def receive(self, x: torch.Tensor, source: int) -> None:
        """Fill the contiguous x with the other rank's tensor of the same shape and dtype."""
        with self._together("receiving"):
            self._gloo.recv([as_bytes(x)], source, 0).wait()

    def barrier(self) -> None:
        """Wait for all ranks. Then each rank sees the others' earlier writes to shared memory."""
        with self._together("waiting"):
            self._gloo.barrier().wait()

    @contextlib.contextmanager
    def _together(self, doing: str) -> Generator[None, None, None]:
        try:
            yield
        except RuntimeError as error:  # torch raises it for closed connections and timeouts
            raise RankLost(f"rank {self.rank} of {self.size}, {doing}: {str(error).splitlines()[0]}") from error


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View a contiguous x as flat uint8, because gloo lacks some dtypes. x with one element may have any strides."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
