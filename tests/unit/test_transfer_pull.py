"""One conformance suite for all transports, over real sockets where the transport has some, and the faults of each."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

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
from shared.transfer.choose import available_transports, choose_transport, host_id, make_receiver, make_sender
from shared.transfer.interface import PageReceiver, PageSender, PageSet
from shared.transfer.shm import ShmReceiver, ShmSender
from shared.wire.codec import Buffer, decode, to_wire
from shared.wire.link import NodeLinks
from shared.wire.messages import PoolRef, Ready
from shared.wire.peers import Received

KEY = to_wire(RequestKey("r", 1, "rid", 0, 0))
PLANES = (PlaneSpec("kv", (2, 2, 16, 20), torch.float32), PlaneSpec("draft", (7,), torch.int64))
NUM_PAGES = 12
Carry = Callable[[PageSet], tuple[Ready, Sequence[Buffer]]]


def filled_pool(shared: bool, seed: int, num_pages: int = NUM_PAGES) -> KVPool:
    pool = KVPool(PLANES, num_pages, 16, shared=shared)
    pool.pages_bytes.copy_(torch.randint(0, 256, pool.pages_bytes.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


class Ends:
    """Sender with its pool and allocator, receiver with its pool, and the wire between them."""

    def __init__(self, name: str, carry: Carry) -> None:
        self.src = filled_pool(shared=name == "shm", seed=1)
        self.dst = filled_pool(shared=False, seed=2)
        self.allocator = PageAllocator(NUM_PAGES, self.src.generation)
        self.sender: PageSender = make_sender(name, self.src)
        self.receiver: PageReceiver = make_receiver(name, self.dst)
        self.carry = carry

    def pull(self, described: PageSet, dst_pages: Sequence[int], **changes: object) -> None:
        ready, frames = self.carry(described)
        self.receiver.pull(msgspec.structs.replace(ready, **changes), frames, dst_pages)


def socket_carry(near: NodeLinks, far: NodeLinks) -> Carry:
    def carry(pages: PageSet) -> tuple[Ready, Sequence[Buffer]]:
        assert near.send("far", pages.ready(KEY, 1, 0), pages.frames)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            for inbound in far.poll(0.1):
                if isinstance(inbound, Received) and isinstance(inbound.message, Ready):
                    return inbound.message, inbound.frames
        raise AssertionError("nothing came")

    return carry


@pytest.fixture(params=["shm", "zmq-tcp", "zmq-ipc"])
def ends(request: pytest.FixtureRequest, tmp_path: os.PathLike[str]) -> Iterator[Ends]:
    bind = f"ipc://{tmp_path}/far" if request.param == "zmq-ipc" else "tcp://127.0.0.1:*"
    near, far = NodeLinks("p", 1), NodeLinks("d", 1, bind)
    near.dial("far", far.endpoint)
    made = Ends(request.param.partition("-")[0], socket_carry(near, far))
    yield made
    made.receiver.close()
    near.close(), far.close()
    made.src.close(), made.dst.close()


def test_pages_arrive_whole_and_nothing_else_changes(ends: Ends) -> None:
    pages = ends.allocator.alloc(5)
    assert pages is not None
    before = ends.dst.pages_bytes.clone()
    dst = [9, 2, 7, 4, 1]
    ends.pull(ends.sender.describe(pages), dst)
    assert torch.equal(ends.dst.pages_bytes[dst], ends.src.pages_bytes[torch.from_numpy(pages).long()])
    rest = [page for page in range(NUM_PAGES) if page not in dst]
    assert torch.equal(ends.dst.pages_bytes[rest], before[rest])


def test_no_pages_are_fine_and_a_second_pull_too(ends: Ends) -> None:
    ends.pull(ends.sender.describe([]), [])
    for dst in (3, 4):
        ends.pull(ends.sender.describe([5]), [dst])
        assert torch.equal(ends.dst.pages_bytes[dst], ends.src.pages_bytes[5])


def test_a_pull_runs_as_a_closure_behind_the_newest_step(ends: Ends) -> None:
    streams = make_streams("cpu")
    order: list[str] = []
    ready, frames = ends.carry(ends.sender.describe([5]))
    step = streams.forward.launch(lambda: time.sleep(0.05) or order.append("step"))
    streams.transfer.wait(step.done)
    streams.transfer.launch(lambda: ends.receiver.pull(ready, frames, [3]) or order.append("pull")).take(20)
    assert order == ["step", "pull"] and torch.equal(ends.dst.pages_bytes[3], ends.src.pages_bytes[5])
    failing = msgspec.structs.replace(ready, digests=[1])
    ticket = streams.transfer.launch(lambda: ends.receiver.pull(failing, frames, [3]))
    with pytest.raises(HandoffFailed, match="digest"):
        ticket.take(20)
    streams.stop()


def test_a_flipped_byte_is_caught_by_the_digest(ends: Ends) -> None:
    pages = ends.sender.describe([4, 5])
    ends.src.page_view(5)[17] ^= 1
    with pytest.raises(HandoffFailed, match="page 5: its digest"):
        ends.pull(pages, [1, 2])
    ends.src.page_view(5)[17] ^= 1
    ends.pull(pages, [1, 2])


def test_a_digest_of_another_page_is_caught(ends: Ends) -> None:
    pages = ends.sender.describe([4, 5])
    with pytest.raises(HandoffFailed, match="digest"):
        ends.pull(pages, [1, 2], digests=pages.digests[::-1])


@pytest.mark.parametrize("dst", [[1], [1, 2, 3], [0, 1], [1, NUM_PAGES], [-1, 1]])
def test_a_wrong_number_or_place_of_pages_copies_nothing(ends: Ends, dst: list[int]) -> None:
    before = ends.dst.pages_bytes.clone()
    with pytest.raises(HandoffFailed):
        ends.pull(ends.sender.describe([4, 5]), dst)
    assert torch.equal(ends.dst.pages_bytes, before)


def test_pages_of_another_size_are_refused(ends: Ends) -> None:
    other = KVPool(PLANES[:1], 4, 16)
    receiver = make_receiver(ends.receiver.name, other)
    ready, frames = ends.carry(ends.sender.describe([4]))
    with pytest.raises(HandoffFailed, match="bytes, ours have"):
        receiver.pull(ready, frames, [1])
    receiver.close()


def test_the_other_transports_ready_is_refused(ends: Ends) -> None:
    pool = filled_pool(shared=ends.sender.name == "zmq", seed=3)
    other = make_sender("shm" if ends.sender.name == "zmq" else "zmq", pool).describe([4])
    with pytest.raises(HandoffFailed):
        ends.receiver.pull(other.ready(KEY, 1, 0), other.frames, [1])


def test_a_split_set_arrives_like_a_whole_one(ends: Ends) -> None:
    parts = ends.sender.describe([3, 4, 5, 6, 7]).split(2)
    assert [part.pages for part in parts] == [[3, 4], [5, 6], [7]]
    for part, dst in zip(parts, ([1, 2], [3, 4], [5]), strict=True):
        ends.pull(part, dst)
    assert torch.equal(ends.dst.pages_bytes[1:6], ends.src.pages_bytes[3:8])


# shm only


@pytest.fixture
def shm() -> Iterator[Ends]:
    made = Ends("shm", lambda pages: (pages.ready(KEY, 1, 0), ()))
    yield made
    made.receiver.close()
    made.src.close(), made.dst.close()


def test_a_freed_page_with_unchanged_bytes_is_caught_by_its_generation(shm: Ends) -> None:
    pages = shm.allocator.alloc(2)
    assert pages is not None
    described = shm.sender.describe(pages)
    shm.allocator.free(pages[1:])
    with pytest.raises(HandoffFailed, match=f"page {pages[1]} has a new owner"):
        shm.pull(described, [1, 2])
    again = shm.allocator.alloc(1)  # the next owner gets the very page
    assert again is not None and again[0] == pages[1]
    with pytest.raises(HandoffFailed, match="generation"):
        shm.pull(described, [1, 2])


def test_a_page_that_changes_owner_in_the_middle_of_a_pull_is_caught(shm: Ends) -> None:
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


@pytest.mark.parametrize("page", [0, NUM_PAGES, 2**40])
def test_a_page_out_of_the_senders_range_is_refused(shm: Ends, page: int) -> None:
    with pytest.raises(HandoffFailed):
        shm.pull(shm.sender.describe([4]), [1], pages=[page])


def test_a_pool_stays_mapped_between_pulls_and_a_closed_one_is_let_go_of(shm: Ends) -> None:
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


# choice


def test_the_best_common_transport_is_chosen() -> None:
    both, only_zmq = ("shm", "zmq"), ("zmq",)
    assert choose_transport("a", both, "a", both) == "shm"
    assert choose_transport("a", both, "b", both) == "zmq"
    assert choose_transport("a", both, "a", only_zmq) == "zmq"
    assert choose_transport("a", ("shm",), "a", only_zmq) is None
    assert choose_transport("a", ("shm",), "b", ("shm",)) is None
    assert choose_transport("a", both, "a", ("rdma",)) is None


def test_settings_name_what_is_there() -> None:
    assert available_transports("auto") == ("shm", "zmq")
    assert available_transports("zmq") == ("zmq",)
    with pytest.raises(ConfigError, match="--transport carrier-pigeon"):
        available_transports("carrier-pigeon")
    for make in (make_sender, make_receiver):
        with pytest.raises(ConfigError):
            make("carrier-pigeon", KVPool(PLANES, 2, 16))


def test_the_host_id_is_the_same_in_another_process() -> None:
    code = "from shared.transfer.choose import host_id; print(host_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_id() and len(host_id()) == 16


def test_a_private_pool_cannot_be_sent_by_shm() -> None:
    with pytest.raises(ConfigError):
        make_sender("shm", filled_pool(shared=False, seed=1))


def test_a_ready_carries_what_was_described() -> None:
    pages = PageSet([4], [1], [2], PoolRef(1, 2, 3, 4, 5))
    ready = pages.ready(KEY, 7, 3)
    assert (ready.lease, ready.first_page, ready.pages, ready.generations, ready.digests) == (7, 3, [4], [1], [2])
    assert ready.pool == pages.pool and not ready.inline
    assert PageSet([], [], []).ready(KEY, 7, 3).inline
