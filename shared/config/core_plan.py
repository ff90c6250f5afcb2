"""Divide the machine's cores among processes.

Idle OpenMP threads spin by default. On two cores, spinning makes a forward pass fifty times slower while another
process is busy. So each process gets its own cores, one compute thread per core, and threads that sleep while they
wait. A process must apply its plan before it loads torch or numpy, so this module loads neither.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from shared.config.settings.options import check_fields, option
from shared.config.settings.settings import ParallelConfig
from shared.core.errors import ConfigError

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class CorePlan:
    """The cores and threads of a process."""

    threads: int = option(0, "compute threads; 0: one per core that the process may use", low=0, high=1024)
    cpus: tuple[int, ...] = option((), "the only cores to run on, e.g. 0,1; none: the system chooses", metavar="LIST")
    borrow: tuple[int, ...] = option(
        (), "further cores to compute on while no other node of this user on this machine needs them",
        metavar="LIST",
    )  # fmt: skip
    wait_policy: str = option(
        "passive", "whether idle compute threads sleep (passive) or spin (active; only with cores to spare)",
        choices=("passive", "active"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)
        for flag, cores in (("--cpus", self.cpus), ("--borrow", self.borrow)):
            if any(core < 0 for core in cores):
                raise ConfigError(f"{flag} is {','.join(map(str, cores))}; core numbers start at 0")
        if self.borrow and not self.cpus:
            raise ConfigError("--borrow needs --cpus too: name the node's own cores")


@dataclass(frozen=True, slots=True)
class ClusterCores:
    router: CorePlan
    prefill: tuple[CorePlan, ...]
    decode: tuple[CorePlan, ...]


def plan_cores(cores: tuple[int, ...], num_prefill: int, num_decode: int, *, share: bool = False) -> ClusterCores:
    """Put the router on the first core: alone if there are more than two cores per node, else beside the first node.

        2 cores, 1 + 1:  | router, prefill 0 | decode 0 |
        4 cores, 1 + 1:  | router, prefill 0 | prefill 0 | decode 0 | decode 0 |
        5 cores, 1 + 1:  | router | prefill 0 | prefill 0 | decode 0 | decode 0 |

    With fewer cores than nodes, nodes share cores and have one thread each. With `share`, each node may borrow the
    other nodes' cores.
    """
    num_nodes = num_prefill + num_decode
    if not cores or num_nodes == 0:
        raise ValueError("a core plan needs at least one core and one node")
    alone = len(cores) > 2 * num_nodes
    shares = deal(cores[1:] if alone else cores, num_nodes)
    lent = (cores[1:] if alone else cores) if share else ()
    plans = tuple(CorePlan(threads=len(own), cpus=own, borrow=lent) for own in shares)
    router = CorePlan(threads=1, cpus=cores[:1])
    return ClusterCores(router=router, prefill=plans[:num_prefill], decode=plans[num_prefill:])


def deal(cores: tuple[int, ...], num_nodes: int) -> list[tuple[int, ...]]:
    """Give each node neighbouring cores. Prefill nodes gain most from more cores, so the first nodes get
    the leftover cores."""
    if len(cores) < num_nodes:
        return [(cores[i % len(cores)],) for i in range(num_nodes)]
    each, extra = divmod(len(cores), num_nodes)
    ends = [each * (i + 1) + min(i + 1, extra) for i in range(num_nodes)]
    starts = [0, *ends[:-1]]
    return [cores[start:end] for start, end in zip(starts, ends, strict=True)]


def of_rank(plan: CorePlan, rank: int, size: int) -> CorePlan:
    """With fewer cores than ranks, ranks share cores."""
    if size == 1:
        return plan
    share = deal(plan.cpus, size)[rank] if plan.cpus else ()
    return replace(plan, threads=max(1, num_threads(plan) // size), cpus=share)


def of_node(plan: CorePlan, parallel: ParallelConfig) -> CorePlan:
    """Return rank 0's plan. All pipeline stages use the plan's cores. `threads` is per stage, at least 1."""
    own = of_rank(plan, 0, parallel.num_ranks)
    return own if parallel.pp == 1 else replace(own, threads=max(1, num_threads(own) // parallel.pp))


def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on, within the container's CPU quota."""
    known = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores, quota = tuple(sorted(known)), cpu_quota(CGROUP_QUOTA)
    return cores if quota is None else cores[: max(1, math.ceil(quota))]


def cpu_quota(path: Path) -> float | None:
    """Return the allowed number of CPUs; None without a limit or a control group."""
    try:
        limit, period = path.read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def num_threads(plan: CorePlan) -> int:
    return plan.threads or len(plan.cpus) or len(usable_cores())


def environment(plan: CorePlan) -> dict[str, str]:
    threads = str(num_threads(plan))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    spins = plan.wait_policy == "active"
    return dict.fromkeys(names, threads) | {
        "OMP_WAIT_POLICY": plan.wait_policy.upper(),
        "GOMP_SPINCOUNT": "10000" if spins else "0",  # read by GNU OpenMP
        "KMP_BLOCKTIME": "200" if spins else "0",  # in ms; read by LLVM's and Intel's OpenMP
        "TOKENIZERS_PARALLELISM": "false",
    }


def apply(plan: CorePlan) -> None:
    os.environ.update(environment(plan))  # noqa: TID251
    if not plan.cpus or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, plan.cpus)
    except OSError as error:
        listed = ",".join(map(str, plan.cpus))
        allowed = ",".join(map(str, usable_cores()))
        raise ConfigError(f"--cpus {listed}: {error.strerror}; this process may use {allowed}") from None
