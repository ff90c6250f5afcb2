"""Pages between the memories of GPUs. Nobody has run these yet: whoever has a GPU does so first."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import msgspec
import pytest
import torch

from shared.core.errors import HandoffFailed
from shared.device.streams import make_streams
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.transfer.digest import tensor_digests
from shared.transfer.interface import WHOLE, Part
from shared.transfer.transports import make_receiver, make_sender
from shared.wire.codec import decode
from shared.wire.messages import Key, Ready
from tests.support.patience import HANG_GUARD_S

KEY = Key("r", 1, "rid", 0, 0)
PLANES = (PlaneSpec("kv", (4, 1024), torch.int64),)
SENDER = """
import sys
import torch
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.transfer.transports import make_sender
from shared.wire.codec import encode
from shared.wire.messages import Key
pool = KVPool((PlaneSpec("kv", (4, 1024), torch.int64),), 8, 16, device="cuda")
pool.plane("kv")[:] = torch.arange(8, device="cuda")[:, None, None]
print(encode(make_sender("cuda_ipc", pool).describe([2, 3]).ready(Key("r", 1, "rid", 0, 0), 1, 0)).hex(), flush=True)
sys.stdin.read()
"""


def test_pages_of_another_process_are_copied_and_checked() -> None:
    process = subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    pool = KVPool(PLANES, 8, 16, device="cuda")
    with process:
        assert process.stdout is not None
        ready = decode(bytes.fromhex(process.stdout.readline().decode()))
        assert isinstance(ready, Ready)
        receiver = make_receiver("cuda_ipc", pool)
        receiver.pull(ready, (), [5, 1])
        assert pool.plane("kv")[[5, 1], 0, 0].tolist() == [2, 3]
        with pytest.raises(HandoffFailed, match="digest"):
            receiver.pull(msgspec.structs.replace(ready, digests=[1, 2]), (), [5, 1])
        receiver.close()
        process.kill()


@pytest.mark.parametrize("part", [WHOLE, Part(0, 2), Part(2)])
def test_pages_go_through_pinned_memory(part: Part) -> None:
    """Frames and digests are a CPU's; more pages come than there are slots."""
    streams, host = make_streams("cuda"), KVPool(PLANES, 12, 16)
    source, target = KVPool(PLANES, 12, 16, device="cuda"), KVPool(PLANES, 12, 16, device="cuda")
    host.pages_bytes.random_(0, 256)
    streams.settle()
    filled = streams.forward.launch(lambda: source.pages_bytes.copy_(host.pages_bytes))
    streams.transfer.wait(filled.done)
    pages, where = list(range(1, 12)), part.bytes_in(PLANES)
    sent = streams.transfer.launch(partial(make_sender("zmq", source).describe, pages, part)).take(HANG_GUARD_S)
    wanted = make_sender("zmq", host).describe(pages, part)
    assert sent.digests == wanted.digests and sent.frames == wanted.frames
    pull = partial(make_receiver("zmq", target).pull, sent.ready(KEY, 1, 0), sent.frames, pages[::-1])
    streams.transfer.launch(pull).take(HANG_GUARD_S)
    assert torch.equal(target.pages_bytes[pages[::-1], where].cpu(), host.pages_bytes[pages, where])
    streams.stop()


def test_digests_are_those_of_host_memory() -> None:
    host = KVPool(PLANES, 4, 16)
    host.pages_bytes.random_(0, 256)
    device = KVPool(PLANES, 4, 16, device="cuda")
    device.pages_bytes.copy_(host.pages_bytes)
    for where in (slice(0, host.page_bytes), slice(8192, 16384)):
        assert tensor_digests(device, [1, 3], where) == tensor_digests(host, [1, 3], where)
