"""`cuda_ipc` and `nixl` as far as they go without hardware: what is asked of the libraries, and what peers may send."""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec
import pytest
import torch

from shared.core.errors import ConfigError, HandoffFailed
from shared.core.keys import RequestKey
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.transfer import cuda_ipc, nixl
from shared.transfer.interface import Part
from shared.transfer.remote import MAX_OPEN, RemoteReceiver, RemoteSender
from shared.transfer.transports import make_receiver, make_sender
from shared.wire.codec import to_wire

KEY = to_wire(RequestKey("r", 1, "rid", 0, 0))
PLANES = (PlaneSpec("kv", (2, 64), torch.int64),)


def pool(value: int) -> KVPool:
    made = KVPool(PLANES, 6, 16)
    made.pages_bytes.copy_(torch.arange(value, value + made.pages_bytes.numel()).to(torch.uint8).view(6, -1))
    return made


class OurAgent:
    """What NIXL's agent is asked for: reads by address, in this process, done at the second look."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name, self.config = name, config
        self.registered: list[torch.Tensor] = []
        self.peers: list[str] = []
        self.released = 0
        self.ends = "DONE"

    def register_memory(self, memory: torch.Tensor) -> None:
        self.registered.append(memory)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        self.peers.append(metadata.decode())
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        self.peers.remove(name)

    def get_xfer_descs(self, places: list[tuple[int, int, int]], mem_type: str) -> list[tuple[int, int, int]]:
        assert mem_type == "DRAM"
        return places

    def initialize_xfer(self, kind: str, here: list[Any], there: list[Any], peer: str) -> list[Any]:
        assert kind == "READ" and peer in self.peers
        return [here, there]

    def transfer(self, transfer: list[Any]) -> str:
        return "PROC"

    def check_xfer_state(self, transfer: list[Any]) -> str:
        for (dst, size, _), (src, other, _) in zip(*transfer, strict=True):
            assert size == other
            if self.ends == "DONE":
                ctypes.memmove(dst, src, size)
        return self.ends

    def release_xfer_handle(self, transfer: list[Any]) -> None:
        self.released += 1


class OurNixl:
    nixl_agent = OurAgent

    @staticmethod
    def nixl_agent_config(backends: list[str]) -> dict[str, Any]:
        return {"backends": backends}


def test_nixl_reads_what_was_announced() -> None:
    src, dst = pool(1), pool(100)
    near, far = nixl.Nixl(src, OurNixl), nixl.Nixl(dst, OurNixl)
    sender, receiver = RemoteSender(src, near), RemoteReceiver(dst, far)
    for part, pages in ((Part(), [2, 5]), (Part(0, 1), [3]), (Part(1), [3])):
        receiver.pull(sender.describe(pages, part).ready(KEY, 1, 0), (), [4, 1][: len(pages)])
    assert torch.equal(dst.pages_bytes[1], src.pages_bytes[5]) and torch.equal(dst.pages_bytes[4], src.pages_bytes[3])
    agent = far._agent
    assert agent.released == 3 and receiver.num_open == 1 and agent.registered[0] is dst.pages_bytes
    agent.ends = "ERR"
    with pytest.raises(HandoffFailed, match="state ERR"):
        receiver.pull(sender.describe([2]).ready(KEY, 1, 0), (), [4])
    receiver.forget_dead()
    assert receiver.num_open == 0 and not agent.peers, "and it is opened anew"
    agent.ends = "DONE"
    receiver.pull(sender.describe([2]).ready(KEY, 1, 0), (), [4])
    assert torch.equal(dst.pages_bytes[4], src.pages_bytes[2])
    receiver.close()


def test_only_so_many_pools_are_open() -> None:
    dst = pool(0)
    receiver = RemoteReceiver(dst, nixl.Nixl(dst, OurNixl))
    senders = [RemoteSender(src, nixl.Nixl(src, OurNixl)) for src in (pool(i) for i in range(MAX_OPEN + 1))]
    for sender in senders[:-1]:
        receiver.pull(sender.describe([1]).ready(KEY, 1, 0), (), [2])
    with pytest.raises(HandoffFailed, match="open already"):
        receiver.pull(senders[-1].describe([1]).ready(KEY, 1, 0), (), [2])


@pytest.mark.parametrize("page", [0, 6])
def test_a_page_out_of_range_refuses_all_of_them(page: int) -> None:
    dst, src = pool(0), pool(1)
    receiver, sender = RemoteReceiver(dst, nixl.Nixl(dst, OurNixl)), RemoteSender(src, nixl.Nixl(src, OurNixl))
    ready = msgspec.structs.replace(sender.describe([1, 2]).ready(KEY, 1, 0), pages=[1, page])
    with pytest.raises(HandoffFailed, match="out of range"):
        receiver.pull(ready, (), [2, 3])


@pytest.mark.parametrize("handle", [b"", b"\xc1", b"\x01", msgspec.msgpack.encode(["x", 0, 0, 0, 0, 0])])
def test_handles_that_are_none_are_refused(handle: bytes) -> None:
    dst = pool(0)
    with pytest.raises(HandoffFailed):
        nixl.Nixl(dst, OurNixl).open(handle)
    with pytest.raises(HandoffFailed):
        cuda_ipc.CudaIpc(dst).open(handle)


@pytest.mark.parametrize("changes", [{"num_pages": 7}, {"page_bytes": 0}, {"pid": 0}, {"storage_bytes": 1}])
def test_a_cuda_handle_that_does_not_add_up_is_refused(changes: dict[str, int]) -> None:
    good = cuda_ipc.IpcHandle(1, 6, 1024, 5, "u", 0, b"h", 6144, 0, b"c", 0, b"e", True)
    assert cuda_ipc.decode_handle(msgspec.msgpack.encode(good)) == good
    with pytest.raises(HandoffFailed):
        cuda_ipc.decode_handle(msgspec.msgpack.encode(msgspec.structs.replace(good, **changes)))


def test_cuda_memory_is_copied_part_by_part() -> None:
    src, dst = pool(1), pool(100)
    before = dst.pages_bytes.clone()
    handle = cuda_ipc.IpcHandle(1, 6, 1024, 5, "u", 0, b"h", 6144, 0, b"c", 0, b"e", True)
    opened = cuda_ipc.OpenIpc(dst, handle, src.pages_bytes)
    opened.read([2, 3], slice(512, 1024), [5, 1])
    assert torch.equal(dst.pages_bytes[[5, 1], 512:], src.pages_bytes[[2, 3], 512:])
    assert torch.equal(dst.pages_bytes[:, :512], before[:, :512])
    assert not opened.is_dead
    assert cuda_ipc.OpenIpc(dst, msgspec.structs.replace(handle, pid=2**22 + 1), src.pages_bytes).is_dead


def test_without_the_package_nixl_says_so() -> None:
    if nixl.is_installed():
        pytest.skip("the package is here")
    for make in (make_sender, make_receiver):
        with pytest.raises(ConfigError, match=r"pip install.*\[nixl\]"):
            make("nixl", pool(0))
