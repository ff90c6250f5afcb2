"""Find clocks that disagree with the router's.

- This machine's clock: the answer to /admin/status has the router's time, read between our request and the answer.
- A node's clock: the node's epoch is the time of its start by its own clock. If the router heard of the node before
  that time, the node's clock is ahead. If it heard more than LONG_START_S after that time, the node's clock is behind,
  or its start was slow.
"""

from __future__ import annotations

from deploy.tools.doctor.facts import SeenNode, Status
from deploy.tools.doctor.finding import BROKEN, LOOK, Finding, or_well

LOOK_S = 1.0
BROKEN_S = 60.0
LONG_START_S = 900.0  # a start may read weights over a network
US = 1e-6
ADVICE = "start a time service there (chrony, systemd-timesyncd)"
WHY = "logs and traces of several machines can't be put in order, and a restarted node may look like an older one"


def check_clocks(status: Status) -> list[Finding]:
    found = check_here(status) + [finding for node in status.nodes for finding in check_node(node, status)]
    return or_well(found, "clocks", "cluster", f"within {LOOK_S:g} s, as far as can be told")


def check_here(status: Status) -> list[Finding]:
    """Judge our clock. The router's clock minus ours is between `least` and `most`."""
    least, most = status.time_s - status.answered_s, status.time_s - status.asked_s
    if least <= LOOK_S and most >= -LOOK_S:
        return []
    off = least if least > 0 else most
    return [
        finding(
            "this machine", off, f"its clock is {abs(off):.1f} s {'behind' if off > 0 else 'ahead of'} the router's"
        )
    ]


def check_node(node: SeenNode, status: Status) -> list[Finding]:
    heard_s = status.time_s - node.known_s
    ahead = node.hello.epoch * US - heard_s
    if ahead > LOOK_S:
        return [finding(node.name, ahead, f"its clock is at least {ahead:.1f} s ahead of the router's")]
    router_began_s = (status.epoch >> 16) / 1000
    # the node may have waited for the router
    was_there_first = heard_s - router_began_s < LONG_START_S
    if -ahead > LONG_START_S and not was_there_first:
        what = (
            f"by its own clock it started {-ahead:.0f} s before the router heard of it: "
            "its clock is behind, or its start was very slow"
        )
        return [Finding("clocks", node.name, LOOK, what, f"compare `date` there; {ADVICE}")]
    return []


def finding(where: str, off_s: float, what: str) -> Finding:
    return Finding("clocks", where, BROKEN if abs(off_s) > BROKEN_S else LOOK, f"{what}: {WHY}", ADVICE)
