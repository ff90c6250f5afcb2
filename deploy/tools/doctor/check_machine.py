"""Judge this machine's cores, memory, disks and file descriptors."""

from __future__ import annotations

from deploy.tools.doctor.facts import DaemonFacts, Disk, MachineFacts
from deploy.tools.doctor.finding import BROKEN, LOOK, Finding, or_well

COMPUTES = ("prefill", "decode")
BUSY_LOAD = 1.5  # above this load average per core, the machine is too busy
SHARES = {LOOK: 0.05, BROKEN: 0.25}
LOW_MEMORY = {LOOK: 0.10, BROKEN: 0.03}
LOW_DISK_BYTES = {LOOK: 1 << 30, BROKEN: 100 << 20}
FEW_FILES = 1024
MIB = 1 << 20
# With these drivers, even the governor `powersave` speeds cores up under load.
DRIVERS_WITH_OWN_MIND = ("intel_pstate", "amd-pstate-epp")
HERE = "this machine"


def check_machine(machine: MachineFacts) -> list[Finding]:
    return [
        *or_well(check_cpu(machine), "cpu", HERE, f"{machine.num_cpus} cores, load {machine.load:.1f}, none contended"),
        *or_well(check_memory(machine), "memory", HERE, f"{machine.available_bytes // MIB} MiB available"),
        *or_well(check_disks(machine.disks), "disk", HERE, "enough room on all disks in use"),
        *check_files(machine),
        *check_settings(machine.daemons),
    ]


def check_cpu(machine: MachineFacts) -> list[Finding]:
    return [
        *check_daemons(machine.daemons),
        *check_load(machine),
        *check_share(machine.steal_share, "of the time other virtual machines had our cores (steal)",
                     "ask for dedicated cores"),
        *check_share(machine.throttled_share, "of the time the container's CPU limit throttled it",
                     "raise the limit, or start with fewer --threads"),
        *check_governors(machine),
    ]  # fmt: skip


def check_daemons(daemons: tuple[DaemonFacts, ...]) -> list[Finding]:
    """Threads are assumed to spread evenly over a daemon's cores."""
    nodes = [daemon for daemon in daemons if daemon.command in COMPUTES and daemon.cores]
    found = [
        Finding("cpu", say(node), LOOK, f"{node.num_threads} compute threads on {len(node.cores)} cores",
                "--threads at most its cores")
        for node in nodes if node.num_threads > len(node.cores)
    ]  # fmt: skip
    shared = shared_cores(nodes)
    for node in nodes:
        crowd = sorted(core for core in node.cores if core in shared)
        if crowd:
            found.append(check_crowd(node, crowd, shared))
    return found


def check_settings(daemons: tuple[DaemonFacts, ...]) -> list[Finding]:
    return [
        Finding("config", say(daemon), LOOK, f"its settings are not fully known: {daemon.problem}",
                f"run this as root or uid {daemon.uid}; if that user can't read it, the daemon can't start again")
        for daemon in daemons if daemon.problem
    ]  # fmt: skip


def shared_cores(nodes: list[DaemonFacts]) -> dict[int, float]:
    """Return {core: number of compute threads} for cores that several nodes share and that have more than 1.0."""
    shares: dict[int, list[float]] = {}
    for node in nodes:
        for core in node.cores:
            shares.setdefault(core, []).append(node.num_threads / len(node.cores))
    return {core: sum(each) for core, each in shares.items() if len(each) > 1 and sum(each) > 1.0}


def check_crowd(node: DaemonFacts, crowd: list[int], shared: dict[int, float]) -> Finding:
    most = max(shared[core] for core in crowd)
    what = f"cores {','.join(map(str, crowd))} have up to {most:.1f} compute threads each, from several nodes"
    if node.spins:
        why = "its idle threads spin: a step takes many times as long beside a busy process"
        return Finding("cpu", say(node), BROKEN, f"{what}; {why}", "--wait-policy passive, and --cpus of its own")
    advice = "give each node --cpus of its own (one `baton up` does; another cluster here competes), or fewer --threads"
    return Finding("cpu", say(node), LOOK, what, advice)


def say(daemon: DaemonFacts) -> str:
    return f"{daemon.command} (pid {daemon.pid})"


def check_load(machine: MachineFacts) -> list[Finding]:
    if machine.load <= BUSY_LOAD * machine.num_cpus:
        return []
    what = f"load {machine.load:.1f} on {machine.num_cpus} cores"
    return [Finding("cpu", HERE, LOOK, what, "see `top` for what else runs here")]


def check_share(share: float, what: str, advice: str) -> list[Finding]:
    level = next((level for level in (BROKEN, LOOK) if share > SHARES[level]), None)
    return [] if level is None else [Finding("cpu", HERE, level, f"{share:.0%} {what}", advice)]


def check_governors(machine: MachineFacts) -> list[Finding]:
    slow = {driver for driver, name in machine.governors if name == "powersave" and driver not in DRIVERS_WITH_OWN_MIND}
    if not slow:
        return []
    return [Finding("cpu", HERE, LOOK, "cores stay at their lowest frequency (governor powersave)",
                    "cpupower frequency-set -g performance")]  # fmt: skip


def check_memory(machine: MachineFacts) -> list[Finding]:
    """Ignore /dev/shm: the KV pools' shared memory is not there."""
    share = machine.available_bytes / max(1, machine.memory_bytes)
    level = next((level for level in (BROKEN, LOOK) if share < LOW_MEMORY[level]), None)
    if level is None:
        return []
    what = (
        f"{machine.available_bytes // MIB} of {machine.memory_bytes // MIB} MiB available; shared memory counts as used"
    )
    return [Finding("memory", HERE, level, what, "give nodes less: --kv-bytes, --mem-fraction")]


def check_disks(disks: tuple[Disk, ...]) -> list[Finding]:
    found = []
    for disk in disks:
        level = next((level for level in (BROKEN, LOOK) if disk.free_bytes < LOW_DISK_BYTES[level]), None)
        if level is not None:
            found.append(Finding("disk", disk.path, level, f"{disk.free_bytes // MIB} MiB free", "make room"))
    return found


def check_files(machine: MachineFacts) -> list[Finding]:
    if machine.open_files >= FEW_FILES:
        return []
    what = f"a process may open {machine.open_files} files, and each open stream needs one"
    return [Finding("files", HERE, LOOK, what, "ulimit -n 4096, or LimitNOFILE= of its unit")]
