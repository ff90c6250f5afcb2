"""Find leaked pages, and faults that the counters show."""

from __future__ import annotations

from deploy.metrics_page import OPEN, RESTING_PAGES, Page, states_of
from deploy.tools.doctor.facts import Cluster
from deploy.tools.doctor.finding import BROKEN, LOOK, OK, Finding, or_well
from shared.observe.metric_names import (
    REFUSED_EPOCH,
    REFUSED_FLOOD,
    REFUSED_IDENTITY,
    REFUSED_IDLE,
    REFUSED_KEY,
    REFUSED_TICKET,
)

REQUESTS, STEPS = "baton_requests_total", "baton_steps_total"
PAGES, TOTAL, ROWS = "baton_kv_pages", "baton_kv_pool_pages", "baton_request_rows"
LEAK_ADVICE = (
    "ask again after --lease-s (a stalled hand-off frees its pages then); if they stay, it is a bug: please "
    "report it with the node's log, and `baton admin restart NODE` frees them"
)
TROUBLES = (
    ("baton_failed_steps_total", LOOK, "steps raised", "see the node's log for the error"),
    ("baton_retractions_total", LOOK, "requests lost their memory and began again", "give it more --kv-bytes"),
    ("baton_wire_errors_total", LOOK, "messages were dropped as malformed, unknown or old", "see the node's log"),
)
REFUSED = {
    REFUSED_KEY: "connections with no key or an unknown one: copy DIR/allowed everywhere, or find out who connects",
    REFUSED_IDENTITY: "names that another key is bound to: is a secret used on two machines?",
    REFUSED_EPOCH: "older starts of a node: is one --node-id used twice, or did a clock go back?",
    REFUSED_TICKET: "hand-offs without a router's ticket: see the decode node's log for who offers them",
    REFUSED_FLOOD: "connections that sent more than could be read: find out who they are, or why the process was slow",
    REFUSED_IDLE: "silent connections, or too many from one node: find out who connects to the node port",
}


def check_pages(cluster: Cluster) -> list[Finding]:
    return [*check_leaks(cluster), *check_sums(cluster.after), *check_troubles(cluster.before, cluster.after)]


def check_leaks(cluster: Cluster) -> list[Finding]:
    """Report pages and rows in use at both looks. Judge only if no request was open, arrived or ended."""
    before, after = cluster.before, cluster.after
    if before.total(OPEN) or after.total(OPEN) or before.total(REQUESTS) != after.total(REQUESTS):
        return [Finding("leaks", cluster.url, OK, "not judged: requests are being served; ask again at rest")]
    first, second = in_use(before), in_use(after)
    stayed = {place: min(first[place], count) for place, count in second.items() if place in first}
    if not stayed:
        return [Finding("leaks", cluster.url, OK, "at rest all pages and rows are free or cached")]
    by_node: dict[str, list[str]] = {}
    for (node, what), count in stayed.items():
        by_node.setdefault(node, []).append(f"{count:.0f} {what}")
    if before.total(STEPS) != after.total(STEPS):
        advice = "another router's requests? ask again when it is idle, too"
        return [
            Finding("leaks", node, LOOK, f"in use, but not by this router: {', '.join(whats)}", advice)
            for node, whats in by_node.items()
        ]
    slow = slow_reports(cluster)
    return [leak(node, whats, slow) for node, whats in by_node.items()]


def in_use(page: Page) -> dict[tuple[str, str], float]:
    """Return the numbers of pages and rows in use, like {("d0", "rows running"): 3.0}."""
    return {
        (sample.labels["node"], f"{what} {sample.labels['state']}"): sample.value
        for sample in page.samples
        for name, what in ((PAGES, "pages"), (ROWS, "rows"))
        if sample.name == name and sample.value and sample.labels["state"] not in RESTING_PAGES
    }


def slow_reports(cluster: Cluster) -> set[str]:
    """Return the nodes that may not have reported between the two looks."""
    nodes = cluster.status.nodes if cluster.status is not None else ()
    return {node.name for node in nodes if node.last_seen_s >= cluster.interval_s / 2}


def leak(node: str, whats: list[str], slow: set[str]) -> Finding:
    what = f"held while no request is open, twice in a row: {', '.join(whats)}"
    if node in slow:
        return Finding("leaks", node, LOOK, what, "it reports rarely: ask again with a longer --interval")
    return Finding("leaks", node, BROKEN, what, LEAK_ADVICE)


def check_sums(page: Page) -> list[Finding]:
    found = []
    for total in (sample for sample in page.samples if sample.name == TOTAL):
        missing = total.value - sum(states_of(page, PAGES, total.labels["node"]).values())
        if missing:
            what = f"{missing:.0f} of {total.value:.0f} pages are in no state"
            found.append(Finding("leaks", total.labels["node"], BROKEN, what, "a bug: please report it"))
    return found


def check_troubles(before: Page, after: Page) -> list[Finding]:
    found = [
        Finding("counters", sample.labels.get("node", ""), level, f"{sample.value:.0f} {what}", advice)
        for name, level, what, advice in TROUBLES
        for sample in after.samples
        if sample.name == name and sample.value
    ]
    found += check_refused(refused(before), refused(after))
    return or_well(found, "counters", "cluster", "no failed steps, retractions, dropped messages or refusals")


def refused(page: Page) -> dict[tuple[str, str], float]:
    return {
        (sample.labels["node"], sample.labels["reason"]): sample.value
        for sample in page.samples
        if sample.name == "baton_refused_total"
    }


def check_refused(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> list[Finding]:
    """Connections without a key are a fault only if their count grew: earlier runs made some."""
    found = []
    for (node, reason), count in after.items():
        what, _, advice = REFUSED.get(reason, f"{reason}: see the log").partition(": ")
        if not count:
            continue
        if reason == REFUSED_KEY and count == before.get((node, reason), 0.0):
            past = f"{count:.0f} refused, none of them now: {what} (bare connections count, ours too)"
            found.append(Finding("counters", node, OK, past))
        else:
            found.append(Finding("counters", node, LOOK, f"{count:.0f} refused: {what}", advice))
    return found
