"""Look at this machine: cores, memory, disks, secrets, ports."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from deploy.tools.doctor.facts import DialFacts, Disk, KeysFolder, MachineFacts, Secret
from deploy.tools.doctor.look_daemons import find_daemons
from shared.config.core_plan import usable_cores
from shared.config.machine.host_memory import CGROUP, host_memory, read_pairs
from shared.core.errors import ConfigError
from shared.wire.keys.key_files import ALLOWED, NEXT, SECRET, names_with_secret, read_allowed, read_pair

CPUFREQ = "/sys/devices/system/cpu"
DIAL_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class CpuSample:
    cpu_s: float
    steal_s: float
    periods: int
    throttled: int


def take_pulse() -> CpuSample:
    times = psutil.cpu_times()
    stat = read_pairs(CGROUP / "cpu.stat")
    steal_s = float(getattr(times, "steal", 0.0))
    return CpuSample(sum(times[:8]), steal_s, stat.get("nr_periods", 0), stat.get("nr_throttled", 0))


def look_at_machine(before: CpuSample, after: CpuSample) -> MachineFacts:
    total, available = host_memory()
    return MachineFacts(
        cores=usable_cores(),
        num_cpus=os.cpu_count() or 1,
        load=os.getloadavg()[0],
        steal_share=ratio(after.steal_s - before.steal_s, after.cpu_s - before.cpu_s),
        throttled_share=ratio(after.throttled - before.throttled, after.periods - before.periods),
        governors=frozenset(governors(Path(CPUFREQ))),
        daemons=tuple(find_daemons()),
        memory_bytes=total,
        available_bytes=available,
        open_files=open_files(),
        disks=tuple(look_at_disks((Path.home(), Path(tempfile.gettempdir())))),
    )


def ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def governors(folder: Path) -> Iterable[tuple[str, str]]:
    """Yield (driver, governor) of each core."""
    for cpufreq in folder.glob("cpu[0-9]*/cpufreq"):
        with contextlib.suppress(OSError, ValueError):
            yield read_word(cpufreq / "scaling_driver"), read_word(cpufreq / "scaling_governor")


def read_word(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


def open_files() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 30


def look_at_disks(paths: Iterable[Path]) -> Iterable[Disk]:
    for path in paths:
        with contextlib.suppress(OSError):
            yield Disk(str(path), psutil.disk_usage(str(path)).free)


def look_at_keys(folder: Path, uid: int) -> KeysFolder:
    whole = look_at_secret(folder)
    try:
        with as_user(uid):
            problem = keys_problem(folder)
    except OSError:  # we are neither that user nor root
        return KeysFolder(str(folder), uid, () if whole.error else (whole,), "", is_open=False)
    files: list[Secret] = []
    if not whole.error:
        names = [ALLOWED, *(path.name for suffix in (SECRET, NEXT) for path in sorted(folder.glob(f"*{suffix}")))]
        files = [look_at_secret(folder / name) for name in names]
    return KeysFolder(str(folder), uid, (whole, *files), problem)


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Access files as user `uid`. Raise OSError if this is not allowed."""
    own = os.geteuid()
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(own)


def look_at_secret(path: Path) -> Secret:
    try:
        info = os.stat(path)
    except OSError as error:
        return Secret(str(path), False, -1, 0, error.strerror or str(error))
    return Secret(str(path), path.is_dir(), info.st_uid, info.st_mode & 0o777)


def keys_problem(folder: Path) -> str:
    """Return why a node would not start with these keys; "" if it would start."""
    try:
        allowed = read_allowed(folder)
        for name in names_with_secret(folder):
            if allowed.of_key(read_pair(folder, name).public) is None:
                return f"{folder / ALLOWED} does not list the key of {name}"
    except ConfigError as error:
        return error.message
    except OSError as error:
        return str(error)
    return ""


def dial(whose: str, endpoint: str) -> DialFacts:
    address = endpoint.partition("#")[0]
    began = time.monotonic()
    error = ""
    try:
        connect(address)
    except (OSError, ValueError) as problem:
        error = getattr(problem, "strerror", None) or str(problem)
    return DialFacts(whose, address, time.monotonic() - began, error)


def connect(address: str) -> None:
    if address.startswith("ipc://"):
        with socket.socket(socket.AF_UNIX) as local:
            local.settimeout(DIAL_TIMEOUT_S)
            local.connect(address.removeprefix("ipc://"))
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    bare = host.strip("[]")
    address = bare if ":" in bare else socket.gethostbyname(bare)  # nodes dial a name at its IPv4 address
    socket.create_connection((address, int(port)), DIAL_TIMEOUT_S).close()
