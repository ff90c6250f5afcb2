"""Find ports that do not answer, and slow hand-offs.

The receiver counts bytes and hand-offs. The sender measures a hand-off's time, from the end of the prompt's last chunk
to the installation on the receiver. Most pages travel earlier, so bytes divided by this time overstate the link's rate.
So only a low rate is evidence.
"""

from __future__ import annotations

import statistics

from deploy.metrics_page import Page
from deploy.tools.doctor.check_nodes import check_addresses
from deploy.tools.doctor.facts import Cluster, DialFacts, Status
from deploy.tools.doctor.finding import BROKEN, LOOK, OK, Finding, or_well

SLOW_DIAL_S = 0.05
SLOW_HANDOFF_S = 1.0
SLOW_BYTES_PER_S = 100e6
FAR_OFF = 3.0  # a node is slow above this multiple of the other nodes' median time
NOTICEABLE_S = 0.05
ENOUGH_BYTES = 1 << 20  # smaller hand-offs measure latency, not rate
ENOUGH_HANDOFFS = 5
HANDOFF = "baton_handoff_seconds"
BUSY = "a busy decode node also causes this: compare with --transport shm on one machine, or at rest"


def check_links(cluster: Cluster) -> list[Finding]:
    addresses = check_addresses(cluster.status.nodes) if cluster.status is not None else []
    routers = check_routers(cluster.status)
    return [*addresses, *check_reach(cluster.status), *routers, *check_handoffs(cluster.after)]


def check_routers(status: Status | None) -> list[Finding]:
    if status is None:
        return []
    advice = (
        "is it running? can the node's machine dial it (firewall, routes)? is its key allowed there (`baton keys "
        "show`), and its --router-id its own? Take a router that is gone for good off the list (--router, "
        "--routers-file, DNS)"
    )
    lacking = [(node.name, endpoint) for node in status.nodes for endpoint in node.lacks_routers]
    found = [
        Finding("routers", name, BROKEN, f"{name} can't reach the router at {endpoint}", advice)
        for name, endpoint in lacking
    ]
    return or_well(found, "routers", "cluster", "every node reaches each router of its list")


def check_reach(status: Status | None) -> list[Finding]:
    if status is None:
        return []
    advice = "see whether {endpoint} can be dialled from {prefill}'s machine: firewall, routes, --bind-host of {decode}"
    found = [
        Finding("reach", f"{pair.prefill}, {pair.decode}", BROKEN,
                f"{pair.prefill} can't connect to {pair.decode}, for {pair.since_s:.0f} s ({pair.tries} tries)",
                advice.format(endpoint=pair.endpoint, prefill=pair.prefill, decode=pair.decode))
        for pair in status.unreachable
    ]  # fmt: skip
    return or_well(found, "reach", "cluster", "no hand-off has failed because nodes could not connect")


def check_dial(dial: DialFacts) -> Finding:
    where = f"{dial.whose} {dial.endpoint}"
    if dial.error:
        advice = (
            "is it running? does a firewall stand between? (dialled from here: other machines may see something else)"
        )
        return Finding("ports", where, BROKEN, f"no answer: {dial.error}", advice)
    took = f"answers after {1000 * dial.seconds:.1f} ms"
    if dial.seconds > SLOW_DIAL_S:
        return Finding("ports", where, LOOK, took, "hand-offs over this path are slow: put the nodes closer together")
    return Finding("ports", where, OK, took)


def check_handoffs(page: Page) -> list[Finding]:
    means = mean_by_node(page)
    num_handoffs = page.total("baton_handoffs_total")
    if not means or num_handoffs < ENOUGH_HANDOFFS or not page.total(f"{HANDOFF}_sum"):
        return [Finding("hand-offs", "cluster", OK, f"{num_handoffs:.0f} hand-offs so far: too few to judge")]
    found = [finding for node, mean in sorted(means.items()) for finding in check_mean(node, mean, means)]
    found += check_rate(page, num_handoffs)
    spent, moved = page.total(f"{HANDOFF}_sum"), page.total("baton_handoff_bytes_total")
    mean_ms = 1000 * spent / page.total(f"{HANDOFF}_count")
    well = (
        f"{mean_ms:.1f} ms on average, {moved / num_handoffs / 1e6:.1f} MB each: at most {moved / spent / 1e6:.0f} MB/s"
    )
    return or_well(found, "hand-offs", "cluster", well)


def mean_by_node(page: Page) -> dict[str, float]:
    counts, sums = by_node(page, f"{HANDOFF}_count"), by_node(page, f"{HANDOFF}_sum")
    return {node: sums[node] / count for node, count in counts.items() if count >= ENOUGH_HANDOFFS}


def by_node(page: Page, name: str) -> dict[str, float]:
    return {sample.labels["node"]: sample.value for sample in page.samples if sample.name == name}


def check_mean(node: str, mean: float, means: dict[str, float]) -> list[Finding]:
    others = [value for other, value in means.items() if other != node]
    what = f"a hand-off takes {1000 * mean:.0f} ms on average, from the last chunk to its installation"
    if mean > SLOW_HANDOFF_S:
        return [Finding("hand-offs", node, LOOK, what, BUSY)]
    if others and mean > NOTICEABLE_S and mean > FAR_OFF * statistics.median(others):
        slower = f"{what}; {1000 * statistics.median(others):.0f} ms from the other prefill nodes"
        return [Finding("hand-offs", node, LOOK, slower, "compare its machine and network with the others'")]
    return []


def check_rate(page: Page, num_handoffs: float) -> list[Finding]:
    moved, spent = page.total("baton_handoff_bytes_total"), page.total(f"{HANDOFF}_sum")
    if moved / num_handoffs < ENOUGH_BYTES or moved / spent >= SLOW_BYTES_PER_S:
        return []
    what = f"at most {moved / spent / 1e6:.0f} MB/s ({moved / num_handoffs / 1e6:.1f} MB a hand-off)"
    return [Finding("hand-offs", "cluster", LOOK, what, BUSY)]
