"""Deal this machine's GPUs to the nodes of `baton up`: one each, unless the user lets nodes share one."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploy.cluster.child import describe_end
from shared.config.flags import to_argv
from shared.config.gpus import NO_GPU, VISIBLE, has_driver, visible_gpus
from shared.config.local_settings import LocalConfig
from shared.config.processes import WITHOUT_GPU, NodeParts, NodeProcessConfig
from shared.core import launcher
from shared.core.errors import ConfigError
from shared.core.short_process import run_short
from shared.observe.log import Logger

PROBE = "shared.node.gpu_probe"
PROBE_TIMEOUT_S = 120.0
SLICE = "MIG-"  # begins the name of a slice of a GPU, in CUDA_VISIBLE_DEVICES
MPS = "they take turns on it, unless NVIDIA's MPS runs (nvidia-cuda-mps-control -d)"


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """`entry`: what stands for the GPU in CUDA_VISIBLE_DEVICES. `name`: what it is."""

    entry: str
    name: str


@dataclass(frozen=True, slots=True)
class GpusHere:
    """The GPUs that nodes may use, by CUDA's number. `why`: without any, the reason, if a user could wonder."""

    gpus: tuple[SeenGpu, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class NodeGpu:
    """A node's GPU. `visible`: what its process sees, its own GPU first, then the GPUs of nodes that hand over to it.

    `num_nodes`: how many nodes share the GPU."""

    number: int
    name: str
    visible: str
    num_nodes: int


def find_gpus(parts: NodeParts, *, is_asked: bool) -> GpusHere:
    """Ask a process with torch which GPUs nodes would use. `is_asked`: even if there seems to be none.

    Raise ConfigError if such nodes can't start, or if there is no answer.
    """
    if parts.sched.device in WITHOUT_GPU:
        return GpusHere()
    if not is_asked and parts.sched.device == "auto":
        if not has_driver():
            return GpusHere()
        visible = visible_gpus()
        if visible is not None and visible.partition(",")[0].strip() in NO_GPU:
            return GpusHere(why=f"{VISIBLE}={visible} hides all GPUs")
    found = ask_torch(to_argv(NodeProcessConfig(parts), frozenset({"role"})))
    if "refused" in found:
        raise ConfigError(found["refused"])
    return GpusHere(seen_gpus(found.get("names", ()), visible_gpus()), found.get("why", ""))


def ask_torch(flags: Sequence[str]) -> dict[str, Any]:
    command = launcher.command(PROBE, str(os.getpid()), *flags)
    try:
        done = run_short(command, PROBE_TIMEOUT_S)
        found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        raise no_answer(f"no answer within {PROBE_TIMEOUT_S:g} s") from None
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        raise no_answer(last or f"the process that asks {describe_end(done.returncode)}") from None
    return found


def no_answer(why: str) -> ConfigError:
    return ConfigError(f"can't tell this machine's GPUs: {why}; see `baton doctor --gpu`, or use --device cpu")


def seen_gpus(names: Sequence[str], visible: str | None) -> tuple[SeenGpu, ...]:
    """`visible`: CUDA_VISIBLE_DEVICES, of which CUDA counts the entries before the first unknown one.

    Of several slices (MIG) a process sees only the first one, but each node may have its own.
    """
    entries = [str(number) for number in range(len(names))] if visible is None else visible.replace(" ", "").split(",")
    if names and entries[0].startswith(SLICE):
        return tuple(SeenGpu(entry, entry) for entry in entries if entry.startswith(SLICE))
    return tuple(map(SeenGpu, entries, names))


def deal_gpus(local: LocalConfig, found: GpusHere) -> tuple[NodeGpu, ...]:
    """Return each node's GPU, prefill nodes first; () if nodes compute on the CPU.

    Raise ConfigError for unknown GPUs, and for nodes that would share one unasked.
    """
    if local.devices and not found.gpus:
        raise ConfigError(f"--devices {local.named_devices}: {found.why}")
    if not found.gpus:
        return ()
    numbers = chosen(local, len(found.gpus)) if local.devices else dealt_in_turn(local, len(found.gpus))
    shares = Counter(numbers)
    return tuple(
        NodeGpu(
            own,
            found.gpus[own].name,
            ",".join(found.gpus[number].entry for number in (own, *sorted(shares.keys() - {own}))),
            shares[own],
        )
        for own in numbers
    )


def chosen(local: LocalConfig, num_gpus: int) -> tuple[int, ...]:
    """Return --devices. Raise ConfigError if they don't fit the GPUs or the nodes."""
    unknown = [number for number in local.devices if number >= num_gpus]
    if unknown:
        there = f"{counted(num_gpus)}, from 0 to {num_gpus - 1}" if num_gpus > 1 else "1 GPU, number 0"
        raise ConfigError(
            f"--devices {local.named_devices}: there is no GPU {unknown[0]}; nodes may use {there} ({VISIBLE} counts)"
        )
    if len(local.devices) != local.num_nodes:
        raise ConfigError(
            f"--devices {local.named_devices} names {counted(len(local.devices))} for {local.num_nodes} nodes "
            f"({local.named_nodes}): name one for each node, prefill nodes first"
        )
    return local.devices


def dealt_in_turn(local: LocalConfig, num_gpus: int) -> tuple[int, ...]:
    """Let two nodes share the only GPU. Elsewhere only --devices lets nodes share one."""
    num_nodes = local.num_nodes
    numbers = tuple(index % num_gpus for index in range(num_nodes))
    if num_nodes > num_gpus and (num_nodes, num_gpus) != (2, 1):
        listed = ",".join(map(str, numbers))
        raise ConfigError(
            f"{local.named_nodes}: each of {num_nodes} nodes needs a GPU, and nodes may use {counted(num_gpus)}. Start "
            f"fewer, or let nodes share a GPU and its memory with --devices {listed}: {MPS}"
        )
    return numbers


def counted(num_gpus: int) -> str:
    return f"{num_gpus} GPU" if num_gpus == 1 else f"{num_gpus} GPUs"


def with_gpu(parts: NodeParts, gpu: NodeGpu) -> NodeParts:
    """Give the node its share of the GPU's memory, and let it not fall back to the CPU."""
    memory = replace(parts.memory, gpu_mem_fraction=parts.memory.gpu_mem_fraction / gpu.num_nodes)
    return replace(parts, memory=memory, sched=replace(parts.sched, device="cuda"))


def tell_gpus(log: Logger, nodes: Sequence[str], gpus: Sequence[NodeGpu], found: GpusHere) -> None:
    """`nodes`: their names, in the order of `gpus`."""
    if found.why:
        log.warning("nodes compute on the CPU", why=found.why)
    for node, gpu in zip(nodes, gpus, strict=False):
        log.info("GPU of a node", id=node, gpu=gpu.number, name=gpu.name)
    for number, num_nodes in Counter(gpu.number for gpu in gpus).items():
        if num_nodes > 1:
            log.warning("nodes share a GPU and its memory", gpu=number, nodes=num_nodes, note=MPS)
    unused = [number for number in range(len(found.gpus)) if number not in {gpu.number for gpu in gpus}]
    if unused:
        log.info("GPUs without a node; --prefill and --decode start more", gpus=",".join(map(str, unused)))
