"""Read the memory that this process may use: the machine's, within its container's limit."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def host_memory() -> tuple[int, int]:
    """Return (total, available) bytes."""
    memory = psutil.virtual_memory()
    return within_limit(memory.total, memory.available)


def within_limit(total: int, available: int) -> tuple[int, int]:
    """Limit (total, available) bytes to the container's limit.

    File pages, which the kernel can drop, count as available, as they do on a machine without a limit.
    """
    try:
        limit = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no container, or its limit is "max"
        return total, available
    stat = read_pairs(CGROUP / "memory.stat")
    dropable = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return min(total, limit), max(0, min(available, limit - used + dropable))


def read_pairs(path: Path) -> dict[str, int]:
    """Read a file whose lines have a name and a number; {} if it is unreadable."""
    try:
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
