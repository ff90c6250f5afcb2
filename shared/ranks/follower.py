"""Run a follower after the message Start: join the group, load the model, map the node's pages, run forwards."""

from __future__ import annotations

import socket

import torch

from shared.core.errors import RankLost
from shared.device.gpu import Gpu
from shared.device.group import RankGroup, file_store, join_ranks
from shared.device.malloc import give_freed_memory_back, keep_freed_memory
from shared.device.torch_cuda import TorchCuda
from shared.kv.layout import PlaneSpec, page_bytes
from shared.kv.pool import KVPool, map_pool
from shared.model.formats.opened import LoadOptions
from shared.model.formats.packed_folder import packed_of
from shared.model.loading.load import load_model
from shared.model.loading.shard import load_shard
from shared.model.math.interface import Model
from shared.model.math.kernels import Formats
from shared.ranks.dp import follow_dp
from shared.ranks.on_device import DeviceFollower
from shared.ranks.orders import Done, Pages, Start, hear, tell
from shared.ranks.tp import follow_tp


def follow_to_the_end(start: Start, orders: socket.socket, threads: int) -> None:
    """Run until rank 0 closes the socket. Raises RankLost, ConfigError."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    tell(orders, Done())
    device = torch.device(start.device)
    group = join_ranks(file_store(start.store, start.size), start.rank, start.size, start.load_s, device)
    if start.device != "cpu":
        gpu = TorchCuda()
        model = load(start, group, threads, gpu)
        give_freed_memory_back()
        DeviceFollower(group, model, device, gpu).follow(orders, start.silence_s)
        return
    model = load(start, group, threads)
    give_freed_memory_back()
    pages = hear(orders, Pages)
    if pages is None:
        return
    pool = map_pages(orders, pages, model)
    group.be_patient(start.silence_s)
    tell(orders, Done())
    follow = follow_dp if start.is_dp else follow_tp
    follow(orders, group, model, pool)


def load(start: Start, group: RankGroup, threads: int, gpu: Gpu | None = None) -> Model:
    formats = Formats(kv=start.kv_dtype, weights=start.weight_dtype)
    packed = packed_of(start.packed_bytes)
    options = LoadOptions(
        start.dtype,
        start.max_context,
        threads,
        adapters=start.adapters,
        formats=formats,
        packed=packed,
        library=start.library,
        memory=None if gpu is None else gpu.memory_info(torch.device(start.device)),
    )
    return load_model(start.model, options) if start.is_dp else load_shard(start.model, options, group, start.device)


def map_pages(orders: socket.socket, pages: Pages, model: Model) -> KVPool:
    """Map the node's pool. In each page, bytes after the model's planes belong to rank 0's draft head."""
    _, descriptors, _, _ = socket.recv_fds(orders, 1, 1)
    if not descriptors:
        raise RankLost("the file descriptor of the pages did not come")
    own = model.kv_planes(pages.page_size)
    rest = pages.page_bytes - page_bytes(own)
    planes = (*own, PlaneSpec("of rank 0", (rest,), torch.uint8)) if rest else own
    memory = map_pool(descriptors[0], pages.num_pages, pages.page_bytes)
    return KVPool(planes, pages.num_pages, pages.page_size, memory=memory)
