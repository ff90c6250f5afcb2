"""Read another process's GPU memory on each GPU, as a decode node does over the transport cuda_ipc.

Started by look_gpu.py as a process of its own. Its input is the handle, in hex; its output is one line for each GPU:
what went wrong, or the SHA-256 of the bytes that arrived.
"""

from __future__ import annotations

import hashlib
import secrets
import sys

import torch

from shared.core import launcher
from shared.core.errors import HandoffFailed
from shared.core.short_process import NoEnd, run_short
from shared.device.gpu import Gpu, devices
from shared.device.torch_cuda import TorchCuda
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.transfer.cuda_ipc import CudaIpc

PLANES = (PlaneSpec("kv", (1, 2, 16, 64), torch.float32),)
PAGES = list(range(1, 17))
TIMEOUT_S = 120.0  # the child imports torch and starts CUDA on each GPU


def check_sharing(gpu: Gpu, where: torch.device) -> None:
    """Raise HandoffFailed if another process can't read this GPU's memory, on this GPU or another."""
    pool = KVPool(PLANES, len(PAGES) + 1, 16, where)
    sent = torch.frombuffer(bytearray(secrets.token_bytes(pool.pages_bytes.numel())), dtype=torch.uint8)
    pool.pages_bytes.copy_(sent.view_as(pool.pages_bytes))
    gpu.synchronize(where)
    wanted = hashlib.sha256(sent.numpy().data).hexdigest()
    for number, got in enumerate(read_elsewhere(CudaIpc(pool, gpu).export())):
        if got != wanted:
            is_digest = len(got) == len(wanted) and " " not in got
            raise HandoffFailed(f"read on GPU {number}: {'other bytes arrived' if is_digest else got}")


def read_elsewhere(handle: bytes) -> list[str]:
    """Return the lines of another process. Raise HandoffFailed if it ends without any."""
    command = launcher.command("deploy.tools.doctor.read_shared")
    try:
        done = run_short(command, TIMEOUT_S, handle.hex())
    except NoEnd as late:
        raise HandoffFailed(f"the process that reads {late}") from None
    if not done.stdout:
        raise HandoffFailed(f"the process that reads ended: {done.stderr.strip()[-200:]}")
    return done.stdout.splitlines()


def read_on_each(handle: bytes, gpu: Gpu) -> list[str]:
    return [try_reading(handle, gpu, where) for where in devices(gpu)]


def try_reading(handle: bytes, gpu: Gpu, where: torch.device) -> str:
    try:
        return read(handle, gpu, where)
    except Exception as error:  # drivers and libraries raise errors of any type
        return " ".join(str(error).split())[:200] or type(error).__name__


def read(handle: bytes, gpu: Gpu, where: torch.device) -> str:
    with gpu.use_device(where):
        own = KVPool(PLANES, len(PAGES) + 1, 16, where)
        opened = CudaIpc(own, gpu).open(handle)
        pages = [0, *PAGES]
        opened.read(pages, slice(0, own.page_bytes), pages)
        gpu.synchronize(where)
        got = own.pages_bytes.cpu()
        opened.close()
    return hashlib.sha256(got.numpy().data).hexdigest()


if __name__ == "__main__":
    print("\n".join(read_on_each(bytes.fromhex(sys.stdin.read()), TorchCuda())))
