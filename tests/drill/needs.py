"""What the drill needs of a machine, and whether this one has it.

python -m tests.drill.needs        status 0: it can run; 77, with the reason: it can't here; 1: a tool is missing
"""

from __future__ import annotations

import os
import sys

from tests.drill.namespaces import ip_tool, new_namespace

CANT_RUN_HERE = 77
NO_TOOL = "the drill needs iproute2, and there is no `ip` on PATH, in /usr/sbin or in /sbin: apt-get install iproute2"


def why_not_here() -> str:
    """Return why no network namespace can be made by this user on this system; "" when one can."""
    if sys.platform != "linux":
        return "network namespaces are there on Linux only"
    try:
        os.close(new_namespace())
    except OSError as error:
        return f"this user can't make network namespaces ({error.strerror}); root can"
    return ""


def missing_tool() -> str:
    return "" if ip_tool() else NO_TOOL


def main() -> int:
    reason = why_not_here()
    if reason:
        print(reason)
        return CANT_RUN_HERE
    missing = missing_tool()
    print(missing, end="\n" if missing else "", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
