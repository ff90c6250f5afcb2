"""`baton plan measure`: profile nodes on this machine.

Steps are measured in child processes, and a request's path outside of the engine in whole clusters.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from deploy.tools.plan.fit import fit
from deploy.tools.plan.path import measure_path
from deploy.tools.plan.profile import MeasuredSteps, NodeProfile, Profile, ProfiledCosts
from shared.config.core_plan import CorePlan
from shared.config.flags import to_argv
from shared.config.processes import NodeProcessConfig
from shared.core import launcher
from shared.core.errors import ConfigError

LARGEST_CHUNK = 1024  # large, so that the fit sees steps of many shapes
LARGEST_MIXED_CHUNK = 512
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Fitted:
    costs: ProfiledCosts
    error: float
    num_steps: int


def measure(config: NodeProcessConfig, cores: tuple[int, ...], shares: Sequence[int], say: Say) -> Profile:
    """Return the profile. `shares`: numbers of cores per node. Raise ConfigError if a child can't start."""
    nodes: dict[int, NodeProfile] = {}
    steps: MeasuredSteps | None = None
    with tempfile.TemporaryDirectory(prefix="baton-plan-") as folder:
        for share in shares:
            say(f"steps of a node on {share} core{'s' if share > 1 else ''}")
            steps = measured(config, cores[:share], Path(folder), say)
            alone, beside = fitted(steps), None
            if 2 * share <= len(cores):
                say(f"the same beside a neighbour on {share} more")
                with neighbour(config, cores[share : 2 * share]):
                    beside = fitted(measured(config, cores[:share], Path(folder), say))
            nodes[share] = NodeProfile(
                share, alone.costs, beside.costs if beside else None, alone.error, alone.num_steps
            )
    assert steps is not None
    profile = Profile(
        model=config.parts.model.model,
        dtype=config.parts.model.dtype,
        machine=f"{cpu_name()}, {len(cores)} cores",
        cores=len(cores),
        measured=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        page_size=config.parts.memory.page_size,
        num_pages=steps.num_pages,
        max_running=config.parts.memory.max_running,
        max_context=steps.max_context,
        page_bytes=steps.page_bytes,
        nodes=nodes,
        paths={},
        growth_reserve=config.parts.sched.growth_reserve,
    )
    return with_paths(profile, config, say)


def with_paths(profile: Profile, config: NodeProcessConfig, say: Say) -> Profile:
    paths = {}
    for share in profile.nodes:
        say(f"a router and nodes on {share} core{'s' if share > 1 else ''} under a load")
        paths[share] = measure_path(config, profile, share)
    return replace(profile, paths=paths)


def fitted(steps: MeasuredSteps) -> Fitted:
    costs, error = fit(steps.shapes, steps.seconds)
    return Fitted(costs, error, len(steps.shapes))


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# ---- steps


def child(config: NodeProcessConfig, cpus: tuple[int, ...], *words: str) -> list[str]:
    parts = replace(
        config.parts,
        memory=replace(config.parts.memory, prefix_cache=False),
        sched=replace(config.parts.sched, chunk_size=LARGEST_CHUNK, mixed_chunk_size=LARGEST_MIXED_CHUNK),
    )
    node = NodeProcessConfig(parts, CorePlan(threads=len(cpus), cpus=cpus))
    own = (*words, f"--parent-pid={os.getpid()}")
    return launcher.command("deploy.tools.plan.measure_steps", *own, *to_argv(node))


def measured(config: NodeProcessConfig, cpus: tuple[int, ...], folder: Path, say: Say) -> MeasuredSteps:
    out = folder / "steps.json"
    with running(child(config, cpus, "--out", str(out))) as process:
        assert process.stdout is not None
        for line in process.stdout:
            say(f"  {line.rstrip()}")
        code = process.wait()
    if code:
        raise ConfigError(f"the measured node ended with {code}; see its output above")
    return msgspec.json.decode(out.read_bytes(), type=MeasuredSteps)


@contextlib.contextmanager
def neighbour(config: NodeProcessConfig, cpus: tuple[int, ...]) -> Iterator[None]:
    with running(child(config, cpus, "--busy")) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "busy":
            raise ConfigError("the neighbour of the measured node did not start; see above")
        yield


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Yield the process, and kill it at the end. Keep Ctrl-C from the process, because it would print errors."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait()
