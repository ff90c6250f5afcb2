"""Judge GPUs: whether torch fits the driver, and whether each GPU computes correctly."""

from __future__ import annotations

from deploy.tools.doctor.facts import GpuDevice, GpuFacts
from deploy.tools.doctor.finding import BROKEN, LOOK, OK, Finding

HERE = "this machine"
GIB = 1 << 30
LOW_MEMORY = 0.10  # report GPUs with a smaller share of free memory
LEAST_CAPABILITY = (8, 0)  # GPUs below this capability emulate bfloat16
# Report slower copies: even four lanes of PCIe 3 are faster.
SLOW_COPY_BYTES_PER_S = 2e9
# Largest allowed difference of float32 logits, as a share of the largest logit. A GPU adds in another order than a CPU.
MOST_DIFFERENCE = 1e-3
INSTALL = "install a torch built for your driver's CUDA version: https://pytorch.org/get-started/locally"
OPEN = (
    "not tried: order of work under load, hand-offs between processes, speed. Baton's checks have run on an H100 only: "
    "`make test-gpu` in a checkout runs them here"
)


def check_gpus(facts: GpuFacts) -> list[Finding]:
    if not facts.devices:
        return [check_absence(facts)]
    found = [finding for device in facts.devices for finding in check_device(device, facts)]
    can_do = [*check_peers(facts), *check_sharing(facts), *check_attention(facts)]
    return [*found, *can_do, Finding("gpu", HERE, LOOK, OPEN, "before production, run it")]


def check_absence(facts: GpuFacts) -> Finding:
    """A driver without a usable GPU is a fault."""
    if not facts.has_driver:
        what = "no GPU, or no driver for one: nodes compute on the CPU here"
        return Finding(
            "gpu", HERE, LOOK, what, "nothing, if you expect none; else install a driver: `nvidia-smi` must answer"
        )
    driver = f"driver {facts.driver}" if facts.driver else "a driver"
    if not facts.built_for:
        what = f"there is {driver}, but torch {facts.torch} is built without CUDA: nodes compute on the CPU"
        return Finding("gpu", HERE, BROKEN, what, INSTALL)
    if facts.visible is not None:
        what = f"there is {driver}, and CUDA_VISIBLE_DEVICES={facts.visible!r} leaves no GPU: {facts.problem}"
        return Finding("gpu", HERE, BROKEN, what, "unset CUDA_VISIBLE_DEVICES, or name GPUs that `nvidia-smi -L` lists")
    what = f"torch {facts.torch}, built for CUDA {facts.built_for}, can't use {driver}: {facts.problem}"
    return Finding("gpu", HERE, BROKEN, what, f"a newer driver, or {INSTALL}")


def check_device(device: GpuDevice, facts: GpuFacts) -> list[Finding]:
    where = f"GPU {device.number}" + (f" ({device.name})" if device.name else "")
    if device.problem:
        advice = "see `nvidia-smi` and the kernel's log (dmesg) for Xid errors; another program may have its memory"
        return [Finding("gpu", where, BROKEN, device.problem, advice)]
    found = [*check_copies(device, where), *check_logits(device, where), *check_memory(device, where)]
    if device.capability < LEAST_CAPABILITY:
        capability = ".".join(map(str, device.capability))
        found.append(
            Finding("gpu", where, LOOK, f"compute capability {capability}: bfloat16 is slow there", "--dtype float32")
        )
    if device.sharing_problem:
        what = f"another process can't read its memory: {device.sharing_problem}"
        found.append(Finding("gpu", where, LOOK, what, "nothing: --transport auto takes zmq; do not name cuda_ipc"))
    if device.attention_problem:
        what = f"FlashInfer's attention can't be used: {device.attention_problem}"
        found.append(Finding("gpu", where, LOOK, what, "nothing: --attention auto takes Baton's own"))
    return found or [Finding("gpu", where, OK, all_well(device, facts))]


def all_well(device: GpuDevice, facts: GpuFacts) -> str:
    built = f"built for CUDA {facts.built_for}" if facts.built_for else "built without CUDA"
    return (
        f"{device.free_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB free; copies through pinned memory: "
        f"{device.to_device_bytes_per_s / 1e9:.1f} GB/s to it, {device.to_host_bytes_per_s / 1e9:.1f} back; a tiny "
        f"network's logits are the CPU's within {relative(device):.0e}; torch {facts.torch} {built}, "
        f"driver {facts.driver or 'unknown'}"
    )


def relative(device: GpuDevice) -> float:
    return device.difference / max(device.largest_logit, 1e-30)


def check_copies(device: GpuDevice, where: str) -> list[Finding]:
    if not device.copies_arrive:
        advice = "the GPU, its slot or its memory is faulty: run the vendor's diagnosis (dcgmi diag -r 3)"
        return [Finding("gpu", where, BROKEN, "bytes copied to it and back come back changed", advice)]
    slowest = min(device.to_device_bytes_per_s, device.to_host_bytes_per_s)
    if slowest >= SLOW_COPY_BYTES_PER_S:
        return []
    what = f"copies through pinned memory reach {slowest / 1e9:.1f} GB/s"
    return [Finding("gpu", where, LOOK, what, "see its PCIe lanes: nvidia-smi -q -d PERFORMANCE, lspci -vv")]


def check_logits(device: GpuDevice, where: str) -> list[Finding]:
    """NaN counts as a difference."""
    if relative(device) <= MOST_DIFFERENCE:
        return []
    what = f"a tiny network's logits differ from the CPU's by {relative(device):.1e} of the largest"
    return [Finding("gpu", where, BROKEN, what, "do not serve from it; report it with this machine's versions")]


def check_memory(device: GpuDevice, where: str) -> list[Finding]:
    if device.free_bytes >= LOW_MEMORY * device.total_bytes:
        return []
    what = f"{device.free_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB are free"
    return [Finding("gpu", where, LOOK, what, "`nvidia-smi` says which processes have the rest")]


def check_peers(facts: GpuFacts) -> list[Finding]:
    """Find GPUs that can't map each other's memory. Hand-offs between them use the host's memory."""
    if len(facts.devices) < 2:
        return []
    numbers = {device.number for device in facts.devices}
    apart = [device.number for device in facts.devices if set(device.peers) != numbers - {device.number}]
    if not apart:
        return [Finding("gpu", HERE, OK, f"all {len(numbers)} GPUs can map each other's memory")]
    what = f"GPUs {', '.join(map(str, apart))} can't map the memory of all others"
    return [Finding("gpu", HERE, LOOK, what, "use --transport zmq between them; `nvidia-smi topo -p2p r` shows pairs")]


def check_sharing(facts: GpuFacts) -> list[Finding]:
    """Say what `--transport auto` does on this machine from now on."""
    if any(device.problem or device.sharing_problem for device in facts.devices):
        return []
    if facts.not_remembered:
        what = f"cuda_ipc works here, but that could not be written down: {facts.not_remembered}"
        return [Finding("gpu", HERE, LOOK, what, "name it: --transport cuda_ipc; or make the cache folder writable")]
    what = (
        "processes can read each other's GPU memory: nodes that start from now on try cuda_ipc under --transport auto"
    )
    return [Finding("gpu", HERE, OK, what)]


def check_attention(facts: GpuFacts) -> list[Finding]:
    """Say what `--attention auto` does on this machine from now on."""
    if not facts.flashinfer or any(device.problem or device.attention_problem for device in facts.devices):
        return []
    if facts.attention_not_remembered:
        what = f"FlashInfer works here, but that could not be written down: {facts.attention_not_remembered}"
        return [Finding("gpu", HERE, LOOK, what, "name it: --attention flashinfer; or make the cache folder writable")]
    what = (
        f"FlashInfer {facts.flashinfer} has the reference's results: nodes that start from now on take its attention "
        "under --attention auto, where it suits the model. They pair only with nodes that take it, too: restart all "
        "nodes, or give all --attention baton"
    )
    return [Finding("gpu", HERE, OK, what)]
