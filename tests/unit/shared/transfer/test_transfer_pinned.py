"""Pages of a GPU's pool on their way through pinned memory, on a virtual GPU: what is sent is what the page was, and no
block or slot is written again while somebody may still read it."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from shared.core.errors import HandoffFailed
from shared.core.keys import RequestKey
from shared.device.streams import StreamSet, make_streams
from shared.engine.transfer_jobs import TransferJobs
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.observe.step_records import StepRecords
from shared.transfer.frames import FrameReceiver, FrameSender
from shared.transfer.host_bytes import NUM_SLOTS, PinnedReader, PinnedWriter
from shared.transfer.interface import READY_BYTES, WHOLE, PageSet, Part, part_of
from shared.wire.codec import to_wire
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.virtual_gpu.device import VirtualGpu, make_device

KEY = to_wire(RequestKey("r", 1, "rid", 0, 0))
PLANES = (PlaneSpec("kv", (2, 8192), torch.int64), PlaneSpec("draft", (4,), torch.float32))
NUM_PAGES = 12
PARTS = [WHOLE, Part(0, 1), Part(1)]


def lazy() -> VirtualGpu:
    """Nothing runs until somebody waits for it."""
    return make_device("deferring", laziness=1.0)


def pool(gpu: VirtualGpu) -> KVPool:
    made = KVPool(PLANES, NUM_PAGES, 16, device=gpu.device)
    gpu.synchronize(gpu.device)
    return made


def host_pool(first: int) -> KVPool:
    made = KVPool(PLANES, NUM_PAGES, 16)
    fill(made, first)
    return made


def fill(target: KVPool, first: int) -> None:
    pages = torch.arange(first, first + NUM_PAGES, device=target.device)
    target.plane("kv")[:] = pages[:, None, None]
    target.plane("draft")[:] = pages[:, None].float()


def described(streams: StreamSet, sender: FrameSender, pages: list[int], part: Part = WHOLE) -> PageSet:
    return streams.transfer.launch(partial(sender.describe, pages, part)).take(HANG_GUARD_S)


@pytest.mark.parametrize("part", PARTS)
def test_frames_and_digests_are_those_of_a_cpu_s_pool(part: Part) -> None:
    """The copies are there when the digests are taken, and they come behind the step that writes the pages."""
    gpu = lazy()
    streams, source, host = make_streams("cuda", gpu=gpu), pool(gpu), host_pool(3)
    streams.transfer.wait(streams.forward.launch(lambda: fill(source, 3)).done)
    found = described(streams, FrameSender(source, gpu), [2, 5, 7], part)
    wanted = FrameSender(host).describe([2, 5, 7], part)
    assert [bytes(frame) for frame in found.frames] == [bytes(frame) for frame in wanted.frames]
    assert found.digests == wanted.digests and found.pages == wanted.pages
    assert not gpu.races
    streams.stop()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("part", PARTS)
def test_more_pages_come_than_there_are_slots(part: Part, seed: int) -> None:
    """A slot is written again when the GPU has read it, in one pull and in the next."""
    gpu = make_device("deferring", seed, laziness=1.0 if not seed else None)
    streams, host, target = make_streams("cuda", gpu=gpu), host_pool(3), pool(gpu)
    receiver, pages = FrameReceiver(target, gpu), list(range(1, 2 + 2 * NUM_SLOTS))
    for some in (pages[: NUM_SLOTS + 1], pages[NUM_SLOTS + 1 :]):
        sent = FrameSender(host).describe(some, part)
        pull = partial(receiver.pull, sent.ready(KEY, 1, 0), sent.frames, some)
        streams.transfer.launch(pull).take(HANG_GUARD_S)
    where = part.bytes_in(PLANES)
    arrived = target.pages_bytes.cpu()
    assert torch.equal(arrived[pages][:, where], host.pages_bytes[pages][:, where])
    assert not arrived[[0, *range(pages[-1] + 1, NUM_PAGES)]].any() and not gpu.races
    streams.stop()


@pytest.mark.parametrize("seed", range(10))
def test_pages_land_behind_the_step_that_may_still_write_them(seed: int) -> None:
    """The last step of their owner before, which is only enqueued when they come."""
    gpu = make_device("deferring", seed)
    streams, host, target = make_streams("cuda", gpu=gpu), host_pool(3), pool(gpu)
    with gpu.held():
        step = streams.forward.launch(lambda: fill(target, 70))
        stages = SimpleNamespace(flush=lambda: None)
        engine = SimpleNamespace(streams=streams, last_done=step.done, stages=stages, records=StepRecords())
        jobs: TransferJobs[str, None] = TransferJobs(engine)  # type: ignore[arg-type]
        sent = FrameSender(host).describe([2, 5])
        pull = partial(FrameReceiver(target, gpu).pull, sent.ready(KEY, 1, 0), sent.frames, [3, 4])
        jobs.launch("pull", pull, "pull", after_newest_step=True)
    jobs.synchronize()
    assert [done.error for done in jobs.take_done()] == [None]
    streams.settle()
    assert torch.equal(target.pages_bytes[3:5].cpu(), host.pages_bytes[[2, 5]])
    assert (target.plane("kv")[6] == 76).all().item()
    streams.stop()


def test_a_pull_that_fails_is_over_when_its_copies_are() -> None:
    """Its pages get another owner as soon as it has failed."""
    gpu = lazy()
    streams, host, target = make_streams("cuda", gpu=gpu), host_pool(3), pool(gpu)
    sent = FrameSender(host).describe([2, 5])
    ready = sent.ready(KEY, 1, 0)
    ready.digests[1] ^= 1
    with pytest.raises(HandoffFailed, match="page 5: its digest"):
        streams.transfer.launch(partial(FrameReceiver(target, gpu).pull, ready, sent.frames, [3, 4])).take(HANG_GUARD_S)
    with gpu.held():
        assert gpu.run(streams.transfer.cuda_stream) == 0  # type: ignore[attr-defined]
    streams.stop()


def test_a_block_is_its_frames_until_the_last_of_them_is_gone() -> None:
    gpu = make_device()
    source = pool(gpu)
    fill(source, 3)
    reader, where = PinnedReader(source, gpu, most_bytes=READY_BYTES, patience_s=0.0), slice(0, 100)
    (first, second), block = reader.read([1, 2], where)
    with pytest.raises(HandoffFailed, match="have not read 1 blocks"):
        reader.read([3], where)
    before, frame = bytes(second), second.data
    del first, second, block
    with pytest.raises(HandoffFailed):
        reader.read([3], where)
    assert bytes(frame) == before
    del frame
    for _ in range(3):
        assert bytes(reader.read([3], where)[0][0]) == bytes(source.pages_bytes[3, where].cpu().numpy())


def test_blocks_are_bounded_and_used_again() -> None:
    gpu = make_device()
    source, made = pool(gpu), []
    reader = PinnedReader(source, gpu, most_bytes=3 * READY_BYTES + 1, patience_s=0.0)
    make = reader._blocks._make
    reader._blocks._make = lambda: made.append(1) or make()  # type: ignore[func-returns-value,method-assign]
    for _ in range(2):
        reader.read([1], slice(0, 8))
    assert len(made) == 1
    held = [reader.read([1], slice(0, 8)) for _ in range(3)]
    with pytest.raises(HandoffFailed):
        reader.read([1], slice(0, 8))
    assert len(made) == len(held) == 3
    with pytest.raises(HandoffFailed, match="in one message"):
        reader.read([1] * (READY_BYTES // 8 + 1), slice(0, 8))


def test_who_waits_for_a_block_gets_it_when_its_frames_are_gone() -> None:
    gpu = make_device()
    source = pool(gpu)
    reader = PinnedReader(source, gpu, most_bytes=READY_BYTES, patience_s=HANG_GUARD_S)
    held, found = [reader.read([1], slice(0, 8))], threading.Event()
    waiting = threading.Thread(target=lambda: reader.read([2], slice(0, 8)) and found.set(), daemon=True)
    waiting.start()
    held.clear()
    assert found.wait(HANG_GUARD_S / 2)
    waiting.join()


def test_libzmq_keeps_a_block_while_it_may_read_it(tmp_path: Path) -> None:
    """A message waits in a queue, and nothing of ours refers to it any more."""
    gpu = make_device()
    source = pool(gpu)
    fill(source, 3)
    reader = PinnedReader(source, gpu, most_bytes=READY_BYTES, patience_s=0.0)
    where, endpoint = slice(0, source.page_bytes), f"ipc://{tmp_path}/far"
    with zmq.Context() as context, context.socket(zmq.PUSH) as near, context.socket(zmq.PULL) as far:
        near.linger = far.linger = 0
        far.rcvtimeo = int(HANG_GUARD_S * 1000)
        near.connect(endpoint)  # nobody is there yet
        near.send_multipart([page.data for page in reader.read([1, 2], where)[0]], copy=False)
        gc.collect()
        with pytest.raises(HandoffFailed):
            reader.read([5], where)
        far.bind(endpoint)
        came = far.recv_multipart()
        assert came == [bytes(row.numpy()) for row in source.pages_bytes[1:3].cpu()]
        reader._blocks._patience_s = HANG_GUARD_S
        assert len(reader.read([5], where)[0]) == 1, "and then it comes back"


def test_a_writer_zeroes_what_did_not_come() -> None:
    gpu = lazy()
    target = pool(gpu)
    target.pages_bytes.fill_(9)
    writer, half = PinnedWriter(target, gpu), PLANES[0].num_bytes
    taken = writer.write(4, WHOLE, np.full(half, 7, np.uint8))
    assert len(taken) == half and (taken == 7).all()
    page = target.pages_bytes[4].cpu()
    assert (page[:half] == 7).all() and not page[half:].any()


@pytest.mark.parametrize(
    ("first", "count", "fits"), [(0, 2, True), (1, 1, True), (1, 0, True), (1, 2, False), (2, 0, False)]
)
def test_a_part_beyond_our_layers_is_refused(first: int, count: int, fits: bool) -> None:
    ready: Any = SimpleNamespace(first_layer=first, num_layers=count)
    pool = KVPool(PLANES, 2, 16)
    if fits:
        assert part_of(ready, pool) == Part(first, count)
    else:
        with pytest.raises(HandoffFailed):
            part_of(ready, pool)
