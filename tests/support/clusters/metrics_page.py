"""What /metrics of a router says, and whether it says that everything is back where it belongs."""

from __future__ import annotations

import re

import httpx

from tests.support.machine.patience import HANG_GUARD_S

SAMPLE = re.compile(r"^(\w+)(?:\{([^}]*)\})? (\S+)$")
NODE = re.compile(r'node="([^"]*)"')
GAUGES = ("baton_kv_pages", "baton_request_rows")
BUSY = ("active", "granted", "held", "running", "prefilling")

Metrics = dict[tuple[str, str], float]  # (name, labels) -> value


def bearer(api_key: str) -> dict[str, str]:
    """Return the header that shows `api_key`; no header where there is no key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def read_metrics(url: str, api_key: str = "") -> Metrics:
    text = httpx.get(f"{url}/metrics", headers=bearer(api_key), timeout=HANG_GUARD_S, verify=False).text
    found = (SAMPLE.match(line) for line in text.splitlines())
    return {(m[1], m[2] or ""): float(m[3]) for m in found if m}


def total(metrics: Metrics, name: str, *labels: str) -> float:
    """Return the sum of a metric's samples that have all of `labels`, such as `role="decode"`."""
    return sum(v for (known, found), v in metrics.items() if known == name and all(label in found for label in labels))


def nodes_of(metrics: Metrics) -> set[str]:
    return {found[1] for name, labels in metrics if name in GAUGES and (found := NODE.search(labels))}


def at_rest(metrics: Metrics) -> bool:
    """No open request; every page free or cached and every row free, on every node."""
    if metrics.get(("baton_open_requests", ""), 0.0):
        return False
    return not any(
        value
        for (name, labels), value in metrics.items()
        if name in GAUGES and any(f'state="{state}"' in labels for state in BUSY)
    )


def pages_partition(metrics: Metrics) -> bool:
    """free + cached + active + granted + held == total, for each node."""
    totals = {labels: value for (name, labels), value in metrics.items() if name == "baton_kv_pool_pages"}
    for labels, total in totals.items():
        node = NODE.search(labels)
        assert node
        parts = [v for (name, text), v in metrics.items() if name == "baton_kv_pages" and f'"{node[1]}"' in text]
        if sum(parts) != total:
            return False
    return bool(totals)
