"""The ranks of one node, and what they do together: collect what each has computed, and wait for one another. Over
gloo; knows nothing of models.

        rank 0   | x0 |--+        | x0 x1 |
        rank 1   | x1 |--+-- -->  | x0 x1 |      bytes are carried, never added: every rank has the same bits

Every rank makes the same calls in the same order. When one is gone, or silent for longer than the group's patience,
the others' calls end as RankLost; a group that lost a rank is of no use any more.
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
    """What a rank uses of torch's ProcessGroupGloo, most of which the stubs lack."""

    def _set_default_timeout(self, timeout: timedelta) -> None: ...

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor) -> Pending: ...

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Pending: ...

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending: ...

    def barrier(self) -> Pending: ...


def file_store(path: str, size: int) -> dist.Store:
    """Where the ranks of a node meet. The file may be there already or not; its folder is the node's own."""
    return dist.FileStore(path, size)


class RankGroup:
    """One rank's place in its group. Used by one thread at a time; tensors are on the CPU."""

    def __init__(self, store: dist.Store, rank: int, size: int, patience_s: float) -> None:
        """Joins: returns when all ranks are here. RankLost when they are not in time."""
        self.rank, self.size = rank, size
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs name it `Options`
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=patience_s)
        with self._together("joining"):
            # The stubs lack its methods, and this way to make one.
            self._gloo: Gloo = dist.ProcessGroupGloo(store, rank, size, options)  # type: ignore[assignment]

    def be_patient(self, seconds: float) -> None:
        """From now on a rank that keeps the others waiting for longer counts as lost."""
        self._gloo._set_default_timeout(timedelta(seconds=seconds))

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank, all of one shape and dtype -> (size, *shape), in the order of ranks. Fresh."""
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        if x.numel():
            with self._together("gathering"):
                self._gloo._allgather_base(as_bytes(out), as_bytes(x.contiguous())).wait()
        return out

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """(M, n) of every rank -> (M, size * n), rank 0's columns first. Fresh."""
        return self.stack(x).transpose(0, 1).reshape(len(x), -1)

    def send(self, x: torch.Tensor, to: int) -> None:
        """Returns when the other rank has it: it calls `receive`."""
        with self._together("sending"):
            self._gloo.send([as_bytes(x.contiguous())], to, 0).wait()

    def receive(self, x: torch.Tensor, source: int) -> None:
        """Fills x, contiguous, with what the other rank sends: of the same shape and dtype."""
        with self._together("receiving"):
            self._gloo.recv([as_bytes(x)], source, 0).wait()

    def barrier(self) -> None:
        """Returns when all ranks have come here, with all that they had written to shared memory before."""
        with self._together("waiting"):
            self._gloo.barrier().wait()

    @contextlib.contextmanager
    def _together(self, doing: str) -> Generator[None, None, None]:
        try:
            yield
        except RuntimeError as error:  # what torch makes of closed connections and of timeouts
            raise RankLost(f"rank {self.rank} of {self.size}, {doing}: {str(error).splitlines()[0]}") from error


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory, flat, as uint8: gloo need not know our number formats. x is contiguous, which says nothing of
    the strides of a single element."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
