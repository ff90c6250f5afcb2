"""Start Ray on this machine if `baton ray up` gets no address, and record the last cluster.

This Ray listens on 127.0.0.1. `baton ray status` and `down` read the record.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from deploy.cluster.ports import free_port
from shared.config.core_plan import usable_cores
from shared.config.machine.home import can_write
from shared.config.settings import ray_settings
from shared.core.errors import ConfigError

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.2
SHOWN_LOG_CHARS = 2000
RECORD = "ray.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
START_FIELD = 19  # start time's index among /proc/PID/stat's fields after the name
BIRTH_TOLERANCE_S = 10.0


@dataclass(frozen=True, slots=True)
class RayRecord:
    """`head_pid`: the Ray process started for the cluster; 0 for none. `head_born` and `head_boot`: its birth, because
    process ids are reused."""

    address: str
    cluster: str
    head_pid: int = 0
    head_born: float = 0.0
    head_boot: str = ""

    @property
    def head(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self.head_pid) if self.head_pid else None
            return process if process is not None and self._is_of(process) else None
        except (psutil.Error, OSError):
            return None

    def _is_of(self, process: psutil.Process) -> bool:
        if self.head_boot:
            return birth(process) == (self.head_born, self.head_boot)
        return bool(abs(process.create_time() - self.head_born) < BIRTH_TOLERANCE_S)


def birth(process: psutil.Process) -> tuple[float, str]:
    """Return (start in clock ticks since the boot, the boot's id).

    Without such an id, return seconds since 1970 and "". These seconds change when somebody sets the clock.
    """
    try:
        boot = BOOT_ID.read_text("ascii").strip()
    except OSError:
        return process.create_time(), ""
    stat = Path(f"/proc/{process.pid}/stat").read_text("utf-8", "replace")
    return float(stat.rpartition(")")[2].split()[START_FIELD]), boot


def record_of(address: str, cluster: str, pid: int) -> RayRecord:
    return RayRecord(address, cluster, pid, *birth(psutil.Process(pid)))


def record_path() -> Path:
    return Path.home() / ".baton" / RECORD


def read_record() -> RayRecord | None:
    try:
        return RayRecord(**json.loads(record_path().read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_record(record: RayRecord) -> None:
    (own_folder() / RECORD).write_text(json.dumps(asdict(record)), "utf-8")


def own_folder() -> Path:
    """Make the folder. Raise ConfigError if it can't be written: `down` finds a cluster by its record there."""
    folder = record_path().parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; set HOME to a folder that can be written") from None
    if not can_write(folder):
        raise ConfigError(f"{folder} can't be written; set HOME to a folder that can")
    return folder


def forget_record() -> None:
    record_path().unlink(missing_ok=True)


def start(cluster: str, num_cpus: float) -> RayRecord:
    """Start Ray's head in a new session, which Ctrl-C does not reach, and record it.

    Ray counts cores without assigning them. If more are reserved than exist, processes share them.
    """
    port = free_port(LOOPBACK)
    log = own_folder() / "ray-head.log"
    cpus = max(len(usable_cores()), int(num_cpus) + 1)
    flags = ["--head", "--block", f"--port={port}", f"--node-ip-address={LOOPBACK}", f"--num-cpus={cpus}"]
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *flags, "--include-dashboard=false"]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=ray_settings.inherited() | ray_settings.environment(""),
        )
    record = record_of(f"{LOOPBACK}:{port}", cluster, process.pid)
    before = read_record()
    try:
        write_record(record)  # before the wait, so that `down` finds this Ray even if this process is killed
        wait_for_start(process, log)
    except BaseException:  # including Ctrl-C
        stop(record)
        restore(before)
        raise
    return record


def restore(record: RayRecord | None) -> None:
    if record is None:
        forget_record()
    else:
        write_record(record)


def wait_for_start(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while "Ray runtime started" not in log.read_text("utf-8", "replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ConfigError(f"Ray did not start here:\n{log.read_text('utf-8', 'replace')[-SHOWN_LOG_CHARS:]}")
        time.sleep(POLL_S)


def stop(record: RayRecord) -> None:
    head = record.head
    if head is None:
        return
    family = [head, *head.children(recursive=True)]
    head.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)
