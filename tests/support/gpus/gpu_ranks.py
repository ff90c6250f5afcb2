"""The ranks of one node as threads of one process, each with a virtual GPU of its own, over gloo."""

from __future__ import annotations

import contextlib
import socket
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from shared.device.group import RankGroup, join_ranks
from shared.device.streams import make_streams
from shared.engine.boundary import PinnedCopies
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.loading.shard import load_shard
from shared.model.math.interface import Model
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.records.core import NodeCore
from shared.ranks.on_device import DeviceFollower, DeviceRanks
from shared.ranks.orders import Done, Pages, hear, tell
from shared.sched.steps.settings import SchedSettings
from shared.speculation.ngram import NgramWorkerV2
from tests.support.cores.rank_threads import RankThreads
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.virtual_gpu.device import VirtualGpu, make_devices

PAGE = 16
OPTIONS = LoadOptions("float32", kernels="torch", library="transformers")


class GpuTeam(RankThreads):
    """`model` is what rank 0 loads, on `gpus[0]`. `share` lets ranks 1 .. size - 1 make pages of their own."""

    def __init__(self, folder: Path, gpus: Sequence[VirtualGpu]) -> None:
        super().__init__(len(gpus) - 1)
        self._folder, self._store, self._size, self.gpus = folder, dist.HashStore(), len(gpus), gpus
        self.models: dict[int, Model] = {}
        self.start(self._main)
        self.group, self.model = self._load(0)
        self.ranks = DeviceRanks(self.group, self.sockets)

    def _load(self, rank: int) -> tuple[RankGroup, Model]:
        device = self.gpus[rank].device
        group = join_ranks(self._store, rank, self._size, HANG_GUARD_S, device)
        return group, load_shard(str(self._folder), OPTIONS, group, str(device))

    def share(self, pool: KVPool) -> None:
        for ours in self.sockets:
            tell(ours, Pages(pool.num_pages, pool.page_size, pool.page_bytes))
            assert hear(ours, Done) is not None
        pool.others = self.ranks

    def _main(self, rank: int, orders: socket.socket) -> None:
        torch.set_num_threads(1)
        try:
            group, self.models[rank] = self._load(rank)
            gpu = self.gpus[rank]
            DeviceFollower(group, self.models[rank], gpu.device, gpu).follow(orders, HANG_GUARD_S)
        except Exception as error:
            traceback.print_exc()
            self.errors.append(error.with_traceback(None))  # frames would keep the group, for which others wait
        finally:
            orders.close()


def core_of(team: GpuTeam, num_pages: int = 40, drafted: bool = False) -> NodeCore:
    """Return rank 0's core. The other ranks have made their pages. `drafted`: by n-grams, four tokens at a time."""
    gpu = team.gpus[0]
    settings = SchedSettings(
        PAGE, 128, chunk_size=16, mixed_chunk_size=16, width=4 if drafted else 1, device=str(gpu.device)
    )
    core = assemble_core(
        team.model,
        make_streams("cuda", gpu=gpu),
        settings,
        CoreSizes(num_pages, 4),
        drafter=NgramWorkerV2() if drafted else None,
        boundary=PinnedCopies(gpu.device, lambda size: gpu.pinned((size,), torch.uint8)),
        ranks=team.ranks,
    )
    team.share(core.pool)
    return core


@contextlib.contextmanager
def gpu_team(folder: Path, gpus: Sequence[VirtualGpu] | None = None) -> Iterator[GpuTeam]:
    """On two devices by default."""
    team = GpuTeam(folder, gpus or make_devices(2))
    try:
        yield team
    finally:
        team.close()
        assert not team.errors, team.errors
