"""Pages between the memories of GPUs. Nobody has run these yet: whoever has a GPU does so first."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch

from shared.core.errors import HandoffFailed
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.transfer.digest import tensor_digests
from shared.transfer.transports import make_receiver
from shared.wire.codec import decode
from shared.wire.messages import Ready

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


def test_digests_are_those_of_host_memory() -> None:
    host = KVPool(PLANES, 4, 16)
    host.pages_bytes.random_(0, 256)
    device = KVPool(PLANES, 4, 16, device="cuda")
    device.pages_bytes.copy_(host.pages_bytes)
    for where in (slice(0, host.page_bytes), slice(8192, 16384)):
        assert tensor_digests(device, [1, 3], where) == tensor_digests(host, [1, 3], where)
