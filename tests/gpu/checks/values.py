"""The plain kernels and the sampler on the device, beside the CPU's; memory that another process opens."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import msgspec
import torch

from shared.core.errors import HandoffFailed
from shared.device.streams import make_streams
from shared.kernel.code.step_layout import Layout
from shared.kv.layout import PlaneSpec, page_windows
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.interface import ModelInputs
from shared.sample.sampler_numba import sample_cpu
from shared.transfer.digest import tensor_digests
from shared.transfer.interface import WHOLE, Part
from shared.transfer.transports import make_receiver, make_sender
from shared.wire.codec import decode
from shared.wire.messages import Key, Ready
from tests.gpu.place import Place
from tests.gpu.plan import NotHere
from tests.support.cores.sampling_cases import Case, sample_tensors
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models import tiny_families
from tests.support.models.tiny_models import VOCAB

SPANS = [{0: (0, 40)}, {0: (40, 41), 1: (0, 5)}, {0: (41, 44), 1: (5, 30)}]  # row: tokens [from, to) of each step
PAGE_SIZE = 16
NUM_CASES, NUM_TINY_CASES = 20, 2


def logits(place: Place) -> dict[str, object]:
    """Of prompt chunks, decode rows and windows of several tokens, in float32."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_families.save("qwen3", Path(folder))
        device, host = logits_on(folder, place.gpu.device), logits_on(folder, torch.device("cpu"))
    torch.testing.assert_close(device, host, atol=2e-4, rtol=1e-3)
    return {"largest difference": float((device - host).abs().max())}


def logits_on(folder: str, device: torch.device) -> torch.Tensor:
    model = load_model(folder, LoadOptions("float32", kernels="torch"), str(device))
    planes = model.kv_planes(PAGE_SIZE)
    num_groups = len(page_windows(planes))
    pool = KVPool(planes, 1 + 8 * num_groups, PAGE_SIZE, device)
    ids = torch.randint(0, VOCAB, (2, 64), generator=torch.Generator().manual_seed(1))
    tables = torch.arange(1, 1 + 8 * num_groups, dtype=torch.int32).view(num_groups, 2, 4)
    parts = []
    for spans in SPANS:
        lens = [stop - start for start, stop in spans.values()]
        inputs = ModelInputs(
            input_ids=torch.cat([ids[row, start:stop] for row, (start, stop) in spans.items()]).to(device),
            positions=torch.cat([torch.arange(*span) for span in spans.values()]).to(device),
            layout=Layout(
                cu_q_lens=torch.tensor([0, *lens]).cumsum(0).to(torch.int32).to(device),
                page_tables=tuple(table[list(spans)].to(device) for table in tables),
                max_q_len=max(lens),
                max_seq_len=max(stop for _, stop in spans.values()),
            ),
            logits_idx=torch.arange(sum(lens), device=device),
        )
        with torch.inference_mode():
            parts.append(model.forward(inputs, pool).logits.cpu())
    return torch.cat(parts)


def draws(place: Place) -> dict[str, object]:
    """Ids and log-probabilities of every set of sampling parameters: bit for bit the CPU's."""
    count = NUM_TINY_CASES if place.tiny else NUM_CASES
    for seed in range(count):
        case = Case(seed, num_logprobs=seed % 5 - 1)
        host, device = case.run(sample_cpu), case.run(sample_tensors, str(place.gpu.device))
        for name in ("ids", "logprobs", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(host, name), getattr(device, name).cpu()), f"{name} of case {seed}"
    return {"batches": count}


PLANES = (PlaneSpec("kv", (4, 1024), torch.int64),)
SENDER = """
import sys
import torch
from shared.device.streams import make_streams
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


def shared_memory(place: Place) -> dict[str, object]:
    """Pages of another process's pool are copied by the device, and their digests tell what is wrong."""
    if place.tiny:
        raise NotHere("the memory of a virtual GPU is its process's own")
    digests_fit(place.gpu.device)
    with subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        try:
            pull_from(process)
        finally:
            process.kill()
    return {}


def pull_from(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    pool = KVPool(PLANES, 8, 16, device="cuda")
    ready = decode(bytes.fromhex(process.stdout.readline().decode()))
    assert isinstance(ready, Ready)
    receiver = make_receiver("cuda_ipc", pool)
    receiver.pull(ready, (), [5, 1])
    assert pool.plane("kv")[[5, 1], 0, 0].tolist() == [2, 3]
    try:
        receiver.pull(msgspec.structs.replace(ready, digests=[1, 2]), (), [5, 1])
        raise AssertionError("pages with other digests were taken")
    except HandoffFailed as error:
        assert "digest" in str(error)
    receiver.close()


def staged_pages(place: Place) -> dict[str, object]:
    """Pages go through pinned memory in frames, whole and in parts, more of them than there are slots: frames and
    digests are a CPU's."""
    streams, host = make_streams("cuda", gpu=place.gpu), KVPool(PLANES, 12, 16)
    source, target = (KVPool(PLANES, 12, 16, device=place.gpu.device) for _ in range(2))
    host.pages_bytes.random_(0, 256)
    pages = list(range(1, 12))
    try:
        streams.settle()
        filled = streams.forward.launch(lambda: source.pages_bytes.copy_(host.pages_bytes))
        streams.transfer.wait(filled.done)
        for part in (WHOLE, Part(0, 2), Part(2)):
            describe = partial(make_sender("zmq", source, place.gpu).describe, pages, part)
            sent, wanted = (
                streams.transfer.launch(describe).take(HANG_GUARD_S),
                make_sender("zmq", host).describe(pages, part),
            )
            assert sent.digests == wanted.digests and sent.frames == wanted.frames, part
            ready = sent.ready(Key("r", 1, "rid", 0, 0), 1, 0)
            pull = partial(make_receiver("zmq", target, place.gpu).pull, ready, sent.frames, pages[::-1])
            streams.transfer.launch(pull).take(HANG_GUARD_S)
            where = part.bytes_in(PLANES)
            assert torch.equal(target.pages_bytes[pages[::-1], where].cpu(), host.pages_bytes[pages, where]), part
    finally:
        streams.stop()
    return {"pages": len(pages)}


def digests_fit(device: torch.device) -> None:
    host, there = KVPool(PLANES, 4, 16), KVPool(PLANES, 4, 16, device=device)
    host.pages_bytes.random_(0, 256)
    there.pages_bytes.copy_(host.pages_bytes)
    for where in (slice(0, host.page_bytes), slice(8192, 16384)):
        assert tensor_digests(there, [1, 3], where) == tensor_digests(host, [1, 3], where)
