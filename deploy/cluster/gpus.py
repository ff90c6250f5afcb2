"""Deal this machine's GPUs to the nodes of `baton up`: one each, or --tp, unless the user lets nodes share one."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploy.cluster.child import describe_end
from shared.config.flags import to_argv
from shared.config.machine.gpus import NO_GPU, VISIBLE, has_driver, visible_gpus
from shared.config.processes import WITHOUT_GPU, ClusterConfig, NodeParts, NodeProcessConfig
from shared.config.settings.local_settings import LocalConfig
from shared.core import launcher
from shared.core.errors import ConfigError
from shared.core.short_process import NoEnd, run_short
from shared.observe.log import Logger

PROBE = "shared.node.assembly.gpu_probe"
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
    """A node's GPUs, of one kind. `visible`: what its process sees, its own first, then those of the other nodes.

    `num_nodes`: how many nodes share a GPU of the node at most."""

    numbers: tuple[int, ...]
    name: str
    visible: str
    num_nodes: int


def deal_found_gpus(config: ClusterConfig, log: Logger) -> tuple[ClusterConfig, tuple[NodeGpu, ...]]:
    """Return the settings with the number of prefill nodes, and each node's GPU. Raise ConfigError as `deal_gpus`."""
    asked = config.local
    found = find_gpus(config.nodes, is_asked=bool(asked.devices))
    tp = config.nodes.parallel.tp
    local = asked.on_gpus(len(asked.devices) or len(found.gpus), tp)
    if found.gpus:
        check_ranks(config)
    gpus = deal_gpus(local, found, tp)
    if asked.prefill < 0 and (local.prefill, local.decode) == (0, 1):
        if tp == 1:
            log.info(
                "one GPU: one node computes prompts and answers; two would share its memory. --prefill 1 starts two"
            )
        else:
            log.info("one node computes prompts and answers; two would need more GPUs", gpus=tp)
    tell_gpus(log, local.node_names, gpus, found)
    return replace(config, local=local), gpus


def check_ranks(config: ClusterConfig) -> None:
    """Raise ConfigError for decode nodes with other ranks or stages: on GPUs they would not pair with prefill nodes."""
    local, parallel, device = config.local, config.nodes.parallel, config.nodes.sched.device
    own = {"--decode-tp": (local.decode_tp, parallel.tp), "--decode-pp": (local.decode_pp, parallel.pp)}
    given = " ".join(f"{flag} {number}" for flag, (number, of_all) in own.items() if number not in (0, of_all))
    if given:
        raise ConfigError(
            f"{given} --device {device}: on GPUs decode nodes have no ranks or stages of their own; leave out {given}; "
            "else say --device cpu"
        )


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
    except NoEnd as late:
        raise no_answer(f"the process that asks {late}") from None
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


def deal_gpus(local: LocalConfig, found: GpusHere, tp: int = 1) -> tuple[NodeGpu, ...]:
    """Return each node's GPUs (`tp`), prefill nodes first; () if nodes compute on the CPU.

    Raise ConfigError for unknown GPUs, and for nodes that would share one unasked.
    """
    if local.devices and not found.gpus:
        raise ConfigError(f"--devices {local.named_devices}: {found.why}")
    if not found.gpus:
        return ()
    num_gpus = len(found.gpus)
    numbers = chosen(local, num_gpus, tp) if local.devices else dealt_in_turn(local, num_gpus, tp)
    shares = Counter(numbers)
    return tuple(
        NodeGpu(
            own,
            found.gpus[own[0]].name,
            ",".join(found.gpus[number].entry for number in (*own, *sorted(shares.keys() - set(own)))),
            max(shares[number] for number in own),
        )
        for own in (numbers[first : first + tp] for first in range(0, len(numbers), tp))
    )


def chosen(local: LocalConfig, num_gpus: int, tp: int) -> tuple[int, ...]:
    """Return --devices. Raise ConfigError if they don't fit the GPUs or the nodes."""
    unknown = [number for number in local.devices if number >= num_gpus]
    if unknown:
        there = f"{counted(num_gpus)}, from 0 to {num_gpus - 1}" if num_gpus > 1 else "1 GPU, number 0"
        raise ConfigError(
            f"--devices {local.named_devices}: there is no GPU {unknown[0]}; nodes may use {there} ({VISIBLE} counts)"
        )
    if len(local.devices) != tp * local.num_nodes:
        each = "one" if tp == 1 else f"{tp} (--tp)"
        raise ConfigError(
            f"--devices {local.named_devices} names {counted(len(local.devices))} for {local.num_nodes} nodes "
            f"({local.named_nodes}): name {each} for each node, prefill nodes first"
        )
    for first in range(0, len(local.devices), tp):
        check_apart(local, local.devices[first : first + tp])
    return local.devices


def check_apart(local: LocalConfig, own: Sequence[int]) -> None:
    """Raise ConfigError for a node whose ranks would share a GPU, which NCCL refuses."""
    if len(set(own)) < len(own):
        raise ConfigError(
            f"--devices {local.named_devices}: the ranks of a node (--tp {len(own)}) need a GPU each, and one node "
            f"has {','.join(map(str, own))}"
        )


def dealt_in_turn(local: LocalConfig, num_gpus: int, tp: int) -> tuple[int, ...]:
    """Let two nodes share the only GPU. Elsewhere only --devices lets nodes share one."""
    num_nodes, wanted = local.num_nodes, tp * local.num_nodes
    if tp > num_gpus:
        raise ConfigError(f"--tp {tp}: a node needs {counted(tp)}, and nodes may use {counted(num_gpus)}")
    numbers = tuple(index % num_gpus for index in range(wanted))
    if wanted > num_gpus and (wanted, num_gpus) != (2, 1):
        each = "a GPU" if tp == 1 else f"{counted(tp)} (--tp)"
        listed = ",".join(map(str, numbers))
        raise ConfigError(
            f"{local.named_nodes}: each of {num_nodes} nodes needs {each}, and nodes may use {counted(num_gpus)}. "
            f"Start fewer, or let nodes share a GPU and its memory with --devices {listed}: {MPS}"
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
        log.info("GPU of a node", id=node, gpu=",".join(map(str, gpu.numbers)), name=gpu.name)
    used = Counter(number for gpu in gpus for number in gpu.numbers)
    for number, num_nodes in used.items():
        if num_nodes > 1:
            log.warning("nodes share a GPU and its memory", gpu=number, nodes=num_nodes, note=MPS)
    unused = [number for number in range(len(found.gpus)) if number not in used]
    if unused:
        log.info("GPUs without a node; --prefill and --decode start more", gpus=",".join(map(str, unused)))
