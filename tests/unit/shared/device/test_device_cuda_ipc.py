"""`cuda_ipc` on a virtual GPU: pages of one pool are pulled into another through the runtime's handles, on the transfer
stream. Both pools are in this process; the rest is as between two."""

from __future__ import annotations

import os
from functools import partial

import msgspec
import pytest
import torch

from shared.core.errors import HandoffFailed
from shared.core.keys import RequestKey
from shared.device.streams import StreamSet, make_streams
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.transfer import cuda_ipc
from shared.transfer.cuda_ipc import CudaIpc, IpcHandle
from shared.transfer.remote import RemoteReceiver, RemoteSender
from shared.transfer.torch_groups import NcclGroup
from shared.wire.codec import to_wire
from shared.wire.messages import Ready
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.virtual_gpu.blocks import block_of
from tests.support.virtual_gpu.device import VirtualGpu, make_device

KEY = to_wire(RequestKey("r", 1, "rid", 0, 0))
PLANES = (PlaneSpec("kv", (2, 64), torch.int64), PlaneSpec("draft", (4,), torch.float32))
SEEDS = 5


def pool(gpu: VirtualGpu) -> KVPool:
    made = KVPool(PLANES, 6, 16, device=gpu.device)
    gpu.synchronize(gpu.device)
    return made


def fill(streams: StreamSet, source: KVPool, first: int) -> None:
    """As a model's forward does: on the forward stream."""

    def forward() -> None:
        pages = torch.arange(first, first + 6, device=source.device)
        source.plane("kv")[:] = pages[:, None, None]
        source.plane("draft")[:] = pages[:, None].float()

    streams.forward.launch(forward)


def described(streams: StreamSet, source: KVPool, sender: RemoteSender) -> Ready:
    """The sender's digests, on its transfer stream, behind the forward."""
    streams.transfer.wait(streams.forward.launch(lambda: None).done)
    return streams.transfer.launch(lambda: sender.describe([2, 3]).ready(KEY, 1, 0)).take(HANG_GUARD_S)


@pytest.mark.parametrize("mode", ["eager", "deferring"])
def test_pages_come_from_another_pool(mode: str) -> None:
    for seed in range(SEEDS if mode == "deferring" else 1):
        gpu = make_device(mode, seed)
        streams, source, target = make_streams("cuda", gpu=gpu), pool(gpu), pool(gpu)
        sender, receiver = RemoteSender(source, CudaIpc(source, gpu)), RemoteReceiver(target, CudaIpc(target, gpu))
        fill(streams, source, 1)
        ready = described(streams, source, sender)
        streams.transfer.launch(partial(receiver.pull, ready, (), [5, 1])).take(HANG_GUARD_S)
        assert target.plane("kv")[[5, 1], 0, 0].tolist() == [3, 4]
        assert target.plane("draft")[[5, 1], 3].tolist() == [3.0, 4.0]
        assert target.plane("kv")[[2, 3, 4]].abs().sum().item() == 0
        assert receiver.num_open == 1
        receiver.close()
        streams.stop()
        assert not gpu.races


def ready_of(source: KVPool, gpu: VirtualGpu) -> Ready:
    return RemoteSender(source, CudaIpc(source, gpu)).describe([2]).ready(KEY, 1, 0)


def with_handle(ready: Ready, **changes: object) -> Ready:
    handle = msgspec.structs.replace(msgspec.msgpack.decode(ready.handle, type=IpcHandle), **changes)
    return msgspec.structs.replace(ready, handle=msgspec.msgpack.encode(handle))


def test_a_block_that_is_none_and_a_process_that_is_gone() -> None:
    gpu = make_device()
    source, target = pool(gpu), pool(gpu)
    receiver, ready = RemoteReceiver(target, CudaIpc(target, gpu)), ready_of(source, gpu)
    with pytest.raises(HandoffFailed, match="invalid resource handle"):
        receiver.pull(with_handle(ready, storage=b"no such"), (), [1])
    receiver.pull(with_handle(ready, pid=2**22 + 1), (), [1])
    assert receiver.num_open == 1
    receiver.forget_dead()
    assert receiver.num_open == 0


def test_a_pool_is_opened_once_and_closed_when_replaced() -> None:
    gpu = make_device()
    opened = []
    open_shared = gpu.open_shared
    gpu.open_shared = lambda block: opened.append(block.storage) or open_shared(block)  # type: ignore[method-assign,func-returns-value]
    first, second, target = pool(gpu), pool(gpu), pool(gpu)
    receiver, ready = RemoteReceiver(target, CudaIpc(target, gpu)), ready_of(first, gpu)
    for _ in range(3):
        receiver.pull(ready, (), [1])
    assert len(opened) == 1
    block = block_of(first.pages_bytes)
    assert block is not None and block.num_users == 2, "ours and the receiver's"
    receiver.pull(ready_of(second, gpu), (), [1])
    gpu.new_tensor((1,), (1,), torch.uint8)  # hears what was freed
    assert len(opened) == 2 and receiver.num_open == 1 and block.num_users == 1
    receiver.close()


def test_a_process_that_has_the_number_of_a_dead_one_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = make_device()
    source, target = pool(gpu), pool(gpu)
    receiver = RemoteReceiver(target, CudaIpc(target, gpu))
    receiver.pull(ready_of(source, gpu), (), [1])
    receiver.forget_dead()
    assert receiver.num_open == 1
    started = cuda_ipc.started_at(os.getpid())
    assert started is not None and started == cuda_ipc.started_at(os.getpid())
    assert started > (cuda_ipc.started_at(1) or 0), "the one that started all others is older"
    monkeypatch.setattr(cuda_ipc, "started_at", lambda pid: started + 1)
    receiver.forget_dead()
    assert receiver.num_open == 0


def test_devices_are_known_by_uuid_whatever_their_number() -> None:
    """The two nodes may have been given different devices, or the same in another order (CUDA_VISIBLE_DEVICES)."""
    gpu = make_device()
    source, target = pool(gpu), pool(gpu)
    receiver, ready = RemoteReceiver(target, CudaIpc(target, gpu)), ready_of(source, gpu)
    receiver.pull(with_handle(ready, device=7), (), [1])
    assert torch.equal(target.pages_bytes[1].cpu(), source.pages_bytes[2].cpu())
    with pytest.raises(HandoffFailed, match="GPU other is not one of the 1 GPUs of this process.*CUDA_VISIBLE_DEVICES"):
        receiver.pull(with_handle(ready, gpu="other"), (), [1])


def test_a_pool_of_other_pages_is_not_kept_open() -> None:
    gpu = make_device()
    source, target = KVPool((PlaneSpec("kv", (3,), torch.int64),), 6, 16, device=gpu.device), pool(gpu)
    receiver = RemoteReceiver(target, CudaIpc(target, gpu))
    with pytest.raises(HandoffFailed, match="the sender's pages have 64 bytes"):
        receiver.pull(ready_of(source, gpu), (), [1])
    gpu.new_tensor((1,), (1,), torch.uint8)
    block = block_of(source.pages_bytes)
    assert receiver.num_open == 0 and block is not None and block.num_users == 1


class Sends:
    """What NcclGroup asks of torch's group."""

    def send(self, rows: list[torch.Tensor], to: int, tag: int) -> Sends:
        return self

    def wait(self) -> None: ...

    def abort(self) -> None: ...


def test_an_nccl_transfer_is_over_when_the_stream_is() -> None:
    """`wait` of its works only orders the thread's stream: `finish` waits for that."""
    gpu = make_device("deferring", laziness=1.0)
    group = NcclGroup(gpu.device, gpu)
    group._rank, group._group = 1, Sends()
    host = torch.tensor([1, 2], device=gpu.device).to("cpu", non_blocking=True)
    assert host.tolist() != [1, 2]
    group.finish(group.start([torch.zeros(4, dtype=torch.uint8, device=gpu.device)]))
    assert host.tolist() == [1, 2]
    group.abort(), group.close()
