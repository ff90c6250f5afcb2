"""One conformance suite for all transports, over real sockets where the transport has some, and the faults of each.

What two nodes make of them is in test_transfer_faults.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import torch

from shared.core.errors import ConfigError, HandoffFailed
from shared.core.keys import RequestKey
from shared.device.streams import make_streams
from shared.kv.layout import PlaneSpec
from shared.kv.pages import PageAllocator
from shared.kv.pool import KVPool
from shared.transfer.digest import tensor_digests
from shared.transfer.group_thread import Group, GroupThread
from shared.transfer.interface import WHOLE, Frames, PageReceiver, PageSender, PageSet, Part
from shared.transfer.remote import RemoteReceiver, RemoteSender
from shared.transfer.shm import ShmReceiver, ShmSender
from shared.transfer.staged import BUFFER_BYTES, StagedReceiver, StagedSender, StagingBuffers
from shared.transfer.transports import (
    make_receiver,
    make_sender,
    open_group,
)
from shared.wire.codec import decode, to_wire
from shared.wire.messages import Ready, Take
from shared.wire.parts import PoolRef
from shared.wire.peers import Received
from shared.wire.zeromq.link import NodeLinks
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.virtual_gpu.backend import GPUS
from tests.support.virtual_gpu.device import VirtualGpu, make_device
from tests.support.virtual_gpu.operators import KIND

KEY = to_wire(RequestKey("r", 1, "rid", 0, 0))
PLANES = (PlaneSpec("kv", (2, 2, 16, 20), torch.float32), PlaneSpec("draft", (7,), torch.int64))
NUM_PAGES = 12
TCP = "tcp://127.0.0.1:*"
CPU = torch.device("cpu")
Carry = Callable[[PageSet], tuple[Ready, Frames]]


def filled_pool(shared: bool, seed: int, num_pages: int = NUM_PAGES, device: torch.device = CPU) -> KVPool:
    pool = KVPool(PLANES, num_pages, 16, device, shared)
    pool.pages_bytes.copy_(torch.randint(0, 256, pool.pages_bytes.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


class OurLibrary:
    """A RemoteMemory within one process: a handle is a number."""

    name = "remote"
    pools: ClassVar[dict[bytes, KVPool]] = {}

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def export(self) -> bytes:
        self.pools[b"%d" % self._pool.nonce] = self._pool
        return b"%d" % self._pool.nonce

    def open(self, handle: bytes) -> OurMemory:
        return OurMemory(self._pool, self.pools[handle])


class OurMemory:
    def __init__(self, own: KVPool, peer: KVPool) -> None:
        self._own, self._peer = own, peer
        self.num_pages, self.page_bytes = peer.num_pages, peer.page_bytes
        self.owner, self.is_dead = str(peer.nonce), False

    def read(self, pages: Sequence[int], part_bytes: slice, dst_pages: Sequence[int]) -> list[int]:
        for src, dst in zip(pages, dst_pages, strict=True):
            self._own.pages_bytes[dst, part_bytes] = self._peer.pages_bytes[src, part_bytes]
        return tensor_digests(self._own, list(dst_pages), part_bytes)

    def close(self) -> None:
        self.is_dead = True


def make_ends(name: str, src: KVPool, dst: KVPool) -> tuple[PageSender, PageReceiver]:
    if name == "remote":
        return RemoteSender(src, OurLibrary(src)), RemoteReceiver(dst, OurLibrary(dst))
    return make_sender(name, src, gpu_of(src)), make_receiver(name, dst, gpu_of(dst))


def gpu_of(pool: KVPool) -> VirtualGpu | None:
    return GPUS[0] if pool.device.type == KIND else None


def on_host(pool: KVPool, pages: Sequence[int] | slice = slice(None)) -> torch.Tensor:
    """A copy of pages, wherever the pool is."""
    return pool.pages_bytes[pages].cpu().clone()


class Ends:
    """Sender with its pool and allocator, receiver with its pool, and the wire between them."""

    def __init__(self, name: str, carry: Carry | None = None, devices: tuple[torch.device, torch.device] = (CPU, CPU)):
        self.src = filled_pool(shared=name == "shm", seed=1, device=devices[0])
        self.dst = filled_pool(shared=False, seed=2, device=devices[1])
        self.allocator = PageAllocator(NUM_PAGES, self.src.generation)
        self.sender, self.receiver = make_ends(name, self.src, self.dst)
        self.carry = carry or self.carry_staged

    def carry_staged(self, pages: PageSet) -> tuple[Ready, Frames]:
        """The pages go out as they are when they are asked for."""
        assert isinstance(self.sender, StagedSender) and isinstance(self.receiver, StagedReceiver)
        ready = pages.ready(KEY, 1, 0)
        take = Take(1, 0, ready.pages, ready.first_layer, ready.num_layers)
        self.receiver.check(ready)
        if not ready.pages:
            return ready, self.receiver.make_staging(ready)
        self.sender.check(take)
        staging = self.receiver.make_staging(ready)
        self.groups[0].post(staging)
        self.groups[1].post(self.sender.views(take))
        end = time.monotonic() + HANG_GUARD_S
        while not (arrived := self.groups[0].take_finished()):
            assert not self.groups[0].error and time.monotonic() < end
            time.sleep(0.001)
        assert arrived == [staging]
        return ready, staging

    @cached_property
    def groups(self) -> tuple[GroupThread, GroupThread]:
        """Real ones, of one process."""
        ends = [open_group(self.sender.name, rank, "127.0.0.1", self.src.device, lambda: None) for rank in (0, 1)]
        introduce(*ends)
        return ends[0], ends[1]

    def close(self) -> None:
        for group in self.__dict__.get("groups", ()):
            group.abort(HandoffFailed("the end"))
            assert group.join(HANG_GUARD_S)
        self.receiver.close()
        self.src.close(), self.dst.close()

    def pull(self, described: PageSet, dst_pages: Sequence[int], **changes: object) -> None:
        ready, frames = self.carry(described)
        self.receiver.pull(msgspec.structs.replace(ready, **changes), frames, dst_pages)


def introduce(receiver: Group, sender: Group) -> None:
    """Each hears what the other has to say, until both are connected."""
    end, told = time.monotonic() + HANG_GUARD_S, 0
    while told < 4:
        for group, other in ((receiver, sender), (sender, receiver)):
            for entry in group.take_entries():
                other.deliver(*entry)
                told += 1
        assert time.monotonic() < end and not receiver.error and not sender.error
        time.sleep(0.0005)


def socket_carry(near: NodeLinks, far: NodeLinks) -> Carry:
    def carry(pages: PageSet) -> tuple[Ready, Frames]:
        assert near.send("far", pages.ready(KEY, 1, 0), pages.frames)
        end = time.monotonic() + HANG_GUARD_S
        while time.monotonic() < end:
            for inbound in far.poll(0.1):
                if isinstance(inbound, Received) and isinstance(inbound.message, Ready):
                    return inbound.message, inbound.frames
        raise AssertionError("nothing came")

    return carry


NO_HARDWARE = {
    "nccl": "needs two GPUs, each with a process of its own",
    "cuda_ipc": "needs a GPU; its logic runs here as `remote`",
    "nixl": "needs the package nixl; its logic runs here as `remote`, its calls in test_transfer_libraries.py",
}
ON_GPU = ["zmq-tcp-gpu-gpu", "zmq-tcp-gpu-cpu", "zmq-tcp-cpu-gpu", "shm-map-cpu-gpu"]  # sender's pool, receiver's
# remote: cuda_ipc and nixl, over a library of our own making
HERE = ["shm", "zmq-tcp", "zmq-ipc", "gloo", "remote", *ON_GPU]
ALL = [*HERE, *(pytest.param(name, marks=pytest.mark.skip(reason=why)) for name, why in NO_HARDWARE.items())]


@pytest.fixture(params=ALL)
def ends(request: pytest.FixtureRequest, tmp_path: os.PathLike[str]) -> Iterator[Ends]:
    """On a GPU nothing happens before somebody waits for it."""
    name, *rest = request.param.split("-")
    devices = (CPU, CPU)
    if request.param in ON_GPU:
        gpu = make_device("deferring", laziness=1.0)
        devices = tuple(gpu.device if kind == "gpu" else CPU for kind in rest[1:])
    if name != "zmq":
        made = Ends(name, None if name == "gloo" else direct, devices)
        yield made
        made.close()
        return
    near, far = NodeLinks("p", 1), NodeLinks("d", 1, f"ipc://{tmp_path}/far" if "ipc" in request.param else TCP)
    near.dial("far", far.endpoint)
    made = Ends(name, socket_carry(near, far), devices)
    yield made
    near.close(), far.close()
    made.close()


def direct(pages: PageSet) -> tuple[Ready, Frames]:
    return pages.ready(KEY, 1, 0), ()


def test_pages_arrive_whole_and_nothing_else_changes(ends: Ends) -> None:
    pages = ends.allocator.alloc(5)
    assert pages is not None
    before = on_host(ends.dst)
    dst = [9, 2, 7, 4, 1]
    ends.pull(ends.sender.describe(pages), dst)
    assert torch.equal(on_host(ends.dst, dst), on_host(ends.src, pages.tolist()))
    rest = [page for page in range(NUM_PAGES) if page not in dst]
    assert torch.equal(on_host(ends.dst, rest), before[rest])


def test_no_pages_are_fine_and_a_second_pull_too(ends: Ends) -> None:
    ends.pull(ends.sender.describe([]), [])
    for dst in (3, 4):
        ends.pull(ends.sender.describe([5]), [dst])
        assert torch.equal(on_host(ends.dst, [dst]), on_host(ends.src, [5]))


def test_a_pull_runs_as_a_closure_behind_the_newest_step(ends: Ends) -> None:
    streams = make_streams("cpu")
    order: list[str] = []
    ready, frames = ends.carry(ends.sender.describe([5]))
    step = streams.forward.launch(lambda: time.sleep(0.05) or order.append("step"))
    streams.transfer.wait(step.done)
    streams.transfer.launch(lambda: ends.receiver.pull(ready, frames, [3]) or order.append("pull")).take(HANG_GUARD_S)
    assert order == ["step", "pull"] and torch.equal(on_host(ends.dst, [3]), on_host(ends.src, [5]))
    failing = msgspec.structs.replace(ready, digests=[1])
    ticket = streams.transfer.launch(lambda: ends.receiver.pull(failing, frames, [3]))
    with pytest.raises(HandoffFailed, match="digest"):
        ticket.take(HANG_GUARD_S)
    streams.stop()


def test_a_flipped_byte_is_caught_by_the_digest(ends: Ends) -> None:
    pages = ends.sender.describe([4, 5])
    flip(ends, pages, 1, 17)
    with pytest.raises(HandoffFailed, match="page 5: its digest"):
        ends.pull(pages, [1, 2])
    flip(ends, pages, 1, 17)
    ends.pull(pages, [1, 2])


def test_a_digest_of_another_page_is_caught(ends: Ends) -> None:
    pages = ends.sender.describe([4, 5])
    with pytest.raises(HandoffFailed, match="digest"):
        ends.pull(pages, [1, 2], digests=pages.digests[::-1])


@pytest.mark.rule("H31")
@pytest.mark.parametrize("dst", [[1], [1, 2, 3], [0, 1], [1, NUM_PAGES], [-1, 1]])
def test_a_wrong_number_or_place_of_pages_copies_nothing(ends: Ends, dst: list[int]) -> None:
    before = on_host(ends.dst)
    with pytest.raises(HandoffFailed):
        ends.pull(ends.sender.describe([4, 5]), dst)
    assert torch.equal(on_host(ends.dst), before)


def test_pages_of_another_size_are_refused(ends: Ends) -> None:
    other = KVPool(PLANES[:1], 4, 16)
    receiver = make_ends(ends.receiver.name, ends.src, other)[1]
    ready, frames = ends.carry(ends.sender.describe([4]))
    with pytest.raises(HandoffFailed, match="bytes in this part, ours have"):
        receiver.pull(ready, frames, [1])
    receiver.close()


@pytest.mark.parametrize("other", ["shm", "zmq", "gloo"])
def test_another_transports_ready_is_refused(ends: Ends, other: str) -> None:
    if other == ends.sender.name:
        other = "zmq" if other == "shm" else "shm"
    pages = make_sender(other, filled_pool(shared=other == "shm", seed=3)).describe([4])
    before = on_host(ends.dst)
    with pytest.raises(HandoffFailed):
        ends.receiver.pull(pages.ready(KEY, 1, 0), pages.frames, [1])
    assert torch.equal(on_host(ends.dst), before)


def test_a_split_set_arrives_like_a_whole_one(ends: Ends) -> None:
    parts = ends.sender.describe([3, 4, 5, 6, 7]).split(2)
    assert [part.pages for part in parts] == [[3, 4], [5, 6], [7]]
    for part, dst in zip(parts, ([1, 2], [3, 4], [5]), strict=True):
        ends.pull(part, dst)
    assert torch.equal(on_host(ends.dst, slice(1, 6)), on_host(ends.src, slice(3, 8)))


# layers


def flip(ends: Ends, described: PageSet, index: int, byte: int) -> None:
    """In the bytes that are on their way: copies, of a pool on a GPU."""
    if ends.src.device.type == KIND:
        described.frames[index][byte] ^= 1
    else:
        ends.src.page_view(described.pages[index])[byte] ^= 1


def layers_of(pool: KVPool, page: int, part: Part) -> torch.Tensor:
    return on_host(pool, [page])[0, part.bytes_in(PLANES)]


def test_layers_travel_alone_and_make_a_whole_page_in_any_order(ends: Ends) -> None:
    before = on_host(ends.dst)
    first, rest = Part(0, 1), Part(1)
    assert first.bytes_in(PLANES).stop == rest.bytes_in(PLANES).start
    described = [ends.sender.describe([4, 5], part) for part in (rest, first)]
    ends.pull(described[0], [1, 2])
    assert torch.equal(layers_of(ends.dst, 1, rest), layers_of(ends.src, 4, rest))
    assert torch.equal(before[1, first.bytes_in(PLANES)], layers_of(ends.dst, 1, first)), "nothing else changes"
    ends.pull(described[1], [1, 2])
    assert torch.equal(on_host(ends.dst, slice(1, 3)), on_host(ends.src, slice(4, 6)))


def test_layers_that_are_still_to_be_written_do_not_matter(ends: Ends) -> None:
    described = ends.sender.describe([4], Part(0, 1))
    ends.src.pages_bytes[4, Part(1).bytes_in(PLANES)] = 0
    ends.pull(described, [1])
    flip(ends, described, 0, 0)
    with pytest.raises(HandoffFailed, match="page 4: its digest"):
        ends.pull(described, [1])


@pytest.mark.parametrize("changes", [{"first_layer": 2}, {"num_layers": 3}, {"first_layer": 1, "num_layers": 2}])
def test_layers_that_are_not_there_are_refused(ends: Ends, changes: dict[str, int]) -> None:
    before = on_host(ends.dst)
    with pytest.raises(HandoffFailed):
        ends.pull(ends.sender.describe([4], Part(0, 1)), [1], **changes)
    assert torch.equal(on_host(ends.dst), before)


def test_pages_without_a_draft_plane_leave_zeros_there(ends: Ends) -> None:
    """The sender has no draft head, and the receiver has: draft KV must not be that of the page's last owner."""
    name = ends.sender.name
    if name == "shm":
        ends.src.close()
    ends.src = KVPool(PLANES[:1], NUM_PAGES, 16, ends.src.device, shared=name == "shm")
    ends.src.pages_bytes.fill_(7)
    ends.sender = make_ends(name, ends.src, ends.dst)[0]
    for part in (WHOLE, Part(1)):
        ends.dst.pages_bytes.fill_(9)
        ends.pull(ends.sender.describe([4], part), [1])
        where, end = part.bytes_in(PLANES), PLANES[0].num_bytes
        (page,) = on_host(ends.dst, [1])
        assert (page[where.start : end] == 7).all() and not page[end:].any()
        assert (page[: where.start] == 9).all()


def test_staging_is_used_again_once_it_was_pulled_and_not_before() -> None:
    """What comes next must not lie where pages still wait to be pulled."""
    ends = Ends("gloo")
    pages = ends.allocator.alloc(4)
    assert pages is not None and isinstance(ends.receiver, StagedReceiver)
    described = ends.sender.describe(pages)
    ready, first = ends.carry(described)
    assert isinstance(first, torch.Tensor)
    second = ends.receiver.make_staging(ready)
    assert second.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    ends.receiver.pull(ready, first, [1, 2, 3, 4])
    third = ends.receiver.make_staging(ready)
    assert third.data_ptr() == first.data_ptr() and third.shape == first.shape
    ends.close()


def test_staging_of_any_size_is_whole() -> None:
    pool = filled_pool(shared=False, seed=1)
    buffers = StagingBuffers(pool)
    for size in (1, BUFFER_BYTES, BUFFER_BYTES + 1, 7):
        staging = buffers.take_buffer(size)
        assert staging.shape == (size,) and staging.is_contiguous()
        buffers.give_back(staging)
    assert buffers.take_buffer(BUFFER_BYTES).shape == (BUFFER_BYTES,), "cut once, whole again"
    pool.close()


# transports that read the sender's memory when the receiver asks


@pytest.fixture(params=["shm", "gloo", "remote"])
def reading(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param, None if request.param == "gloo" else direct)
    yield made
    made.close()


def test_an_unchanged_freed_page_is_caught_by_its_generation(reading: Ends) -> None:
    if reading.sender.name != "shm":
        pytest.skip("generations lie in the sender's host memory: a digest tells other bytes, and the same do no harm")
    pages = reading.allocator.alloc(2)
    assert pages is not None
    described = reading.sender.describe(pages)
    reading.allocator.free(pages[1:])
    with pytest.raises(HandoffFailed, match=f"page {pages[1]} has a new owner"):
        reading.pull(described, [1, 2])
    again = reading.allocator.alloc(1)  # the next owner gets the very page
    assert again is not None and again[0] == pages[1]
    with pytest.raises(HandoffFailed, match="generation"):
        reading.pull(described, [1, 2])


@pytest.mark.parametrize("page", [0, NUM_PAGES, 2**40])
def test_a_page_out_of_the_senders_range_is_refused(reading: Ends, page: int) -> None:
    described = reading.sender.describe([4])
    with pytest.raises(HandoffFailed):
        reading.pull(replace(described, pages=[page]), [1])


# shm only


@pytest.fixture
def shm() -> Iterator[Ends]:
    made = Ends("shm", direct)
    yield made
    made.close()


def test_a_page_that_changes_owner_during_a_pull_is_caught(shm: Ends) -> None:
    pages = shm.allocator.alloc(3)
    assert pages is not None
    described = shm.sender.describe(pages)
    page_view = shm.dst.page_view

    def page_view_of_a_slow_receiver(page: int) -> np.ndarray:
        if page == 2:  # page 1 is copied; now the sender frees and reuses the second
            shm.allocator.free(pages[1:2])
            shm.allocator.alloc(1)
            shm.src.page_view(int(pages[1]))[:] = 0
        return page_view(page)

    shm.dst.page_view = page_view_of_a_slow_receiver  # type: ignore[method-assign]
    with pytest.raises(HandoffFailed, match=f"page {pages[1]} has a new owner"):
        shm.pull(described, [1, 2, 3])


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": 1}, {"num_pages": NUM_PAGES - 1}, {"num_pages": 0}, {"fd": 0}, {"fd": 10_000}, {"pid": 0},
        {"pid": 2**40}, {"pid": 2**52, "fd": 2**52}, {"page_bytes": 64},
    ],
)  # fmt: skip
def test_a_pool_that_is_not_the_announced_one_is_refused(shm: Ends, changes: dict[str, int]) -> None:
    described = shm.sender.describe([4])
    assert described.pool is not None
    with pytest.raises(HandoffFailed):
        shm.pull(described, [1], pool=msgspec.structs.replace(described.pool, **changes))
    assert isinstance(shm.receiver, ShmReceiver) and shm.receiver.num_open == 0


def test_a_pool_stays_mapped_between_pulls_until_it_is_closed(shm: Ends) -> None:
    assert isinstance(shm.receiver, ShmReceiver)
    described = shm.sender.describe([4])
    shm.pull(described, [1])
    shm.pull(described, [2])
    shm.receiver.forget_dead()
    assert shm.receiver.num_open == 1
    shm.src.close()
    shm.receiver.forget_dead()
    assert shm.receiver.num_open == 0
    with pytest.raises(HandoffFailed):
        shm.pull(described, [1])


def test_a_recycled_descriptor_is_another_pool(shm: Ends) -> None:
    assert isinstance(shm.receiver, ShmReceiver)
    old = shm.sender.describe([4])
    shm.pull(old, [1])
    shm.src.close()
    shm.src = filled_pool(shared=True, seed=9)
    sender = ShmSender(shm.src)
    assert old.pool is not None and sender.ref.fd == old.pool.fd
    shm.pull(sender.describe([4]), [1])
    assert torch.equal(shm.dst.pages_bytes[1], shm.src.pages_bytes[4])
    assert shm.receiver.num_open == 1  # the old mapping went when the new pool was opened
    with pytest.raises(HandoffFailed):
        shm.pull(old, [1])


SENDER_PROCESS = """
import sys
import msgspec, torch
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.transfer.remote import RemoteReceiver, RemoteSender
from shared.transfer.shm import ShmSender
from shared.wire.codec import encode
from shared.wire.messages import Key
pool = KVPool((PlaneSpec("kv", (1000,), torch.int64),), 4, 16, shared=True)
pool.plane("kv")[:] = torch.arange(4)[:, None]
ready = ShmSender(pool).describe([2, 3]).ready(Key("r", 1, "rid", 0, 0), 1, 0)
print(encode(ready).hex())
sys.stdout.flush()
sys.stdin.read()
"""


def test_a_dead_sender_is_refused_or_harmless() -> None:
    process = subprocess.Popen([sys.executable, "-c", SENDER_PROCESS], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    pool = KVPool((PlaneSpec("kv", (1000,), torch.int64),), 4, 16)
    mapped, late = ShmReceiver(pool), ShmReceiver(pool)
    with process:
        assert process.stdout is not None
        ready = decode(bytes.fromhex(process.stdout.readline().decode()))
        assert isinstance(ready, Ready)
        mapped.pull(ready, (), [1, 2])
        assert pool.plane("kv")[1:3].tolist() == [[2] * 1000, [3] * 1000]
        process.kill()
    mapped.pull(ready, (), [1, 2])  # mapped before: the memory outlives its process, unchanged
    with pytest.raises(HandoffFailed):
        late.pull(ready, (), [1, 2])
    mapped.forget_dead()
    assert mapped.num_open == late.num_open == 0


def test_other_threads_run_while_pages_are_copied() -> None:
    """Copies and digests of large pages let go of the GIL, or the host could not plan while pages come in."""
    planes = (PlaneSpec("kv", (64 << 20,), torch.uint8),)
    src, dst = KVPool(planes, 2, 16, shared=True), KVPool(planes, 2, 16)
    src.page_view(1)[:] = 1
    ready = ShmSender(src).describe([1]).ready(KEY, 1, 0)
    receiver, ticks, done = ShmReceiver(dst), [0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0)

    ticker = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # nobody is made to let go: who gets on did so because the GIL was free
    try:
        ticker.start()
        for _ in range(200):  # on a busy machine the other thread may find no core during one copy
            before = ticks[0]
            receiver.pull(ready, (), [1])
            if ticks[0] > before:
                break
        else:
            raise AssertionError("no other thread ran during 200 pulls")
    finally:
        done.set()
        ticker.join()
        sys.setswitchinterval(interval)
    receiver.close()


def test_a_private_pool_cannot_be_sent_by_shm() -> None:
    with pytest.raises(ConfigError):
        make_sender("shm", filled_pool(shared=False, seed=1))


def test_a_ready_carries_what_was_described() -> None:
    pages = PageSet([4], [1], [2], PoolRef(1, 2, 3, 4, 5))
    ready = pages.ready(KEY, 7, 3)
    assert (ready.lease, ready.first_page, ready.pages, ready.generations, ready.digests) == (7, 3, [4], [1], [2])
    assert ready.pool == pages.pool and not ready.inline
    assert PageSet([], [], []).ready(KEY, 7, 3).inline
