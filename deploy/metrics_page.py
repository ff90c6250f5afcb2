"""Parse Prometheus text, and read figures from a router's /metrics. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shared.core.states import PageState, RowState

NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|Inf|NaN)"
LABELS = r'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}'
# a timestamp and OpenMetrics' exemplar may follow
SAMPLE = re.compile(rf"^([\w:]+)(?:{LABELS})?[ \t]+({NUMBER})(?:[ \t]+-?[0-9.]+)?(?: # .*)?$")
LABEL = re.compile(r'(\w+)="([^"]*)"')
RESTING_PAGES = (PageState.FREE, PageState.CACHED)
OPEN = "baton_open_requests"
TOTAL = "baton_kv_pool_pages"  # a node's number of pages; one sample per node


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Page:
    samples: tuple[Sample, ...]

    def total(self, name: str) -> float:
        return sum(sample.value for sample in self.samples if sample.name == name)

    def mean_since(self, before: Page, name: str) -> tuple[float, float]:
        """Return (number, mean) of a histogram's observations since `before`."""
        count = self.total(f"{name}_count") - before.total(f"{name}_count")
        spent = self.total(f"{name}_sum") - before.total(f"{name}_sum")
        return count, spent / count if count > 0 else 0.0


def parse_page(text: str) -> Page:
    """Lines of another form are left out: a proxy may answer any path with a page in HTML."""
    found = (SAMPLE.match(line) for line in text.splitlines())
    return Page(tuple(Sample(m[1], dict(LABEL.findall(m[2] or "")), float(m[3])) for m in found if m))


def merged(pages: Sequence[Page]) -> Page:
    """Merge the pages of routers that serve the same nodes."""
    first, *others = pages
    return Page((*first.samples, *(one for page in others for one in page.samples if "node" not in one.labels)))


def has_nodes(page: Page) -> bool:
    return any(sample.name == TOTAL for sample in page.samples)


def unrest(page: Page) -> list[str]:
    """Return texts on KV pages and request rows in use, and on pages in no state. An idle server has none."""
    found: list[str] = []
    for total in (sample for sample in page.samples if sample.name == TOTAL):
        node = total.labels["node"]
        pages = states_of(page, "baton_kv_pages", node)
        rows = states_of(page, "baton_request_rows", node)
        found += [f"{node}: {int(n)} pages {state}" for state, n in pages.items() if n and state not in RESTING_PAGES]
        found += [f"{node}: {int(n)} rows {state}" for state, n in rows.items() if n and state != RowState.FREE]
        missing = total.value - sum(pages.values())
        if missing:
            found.append(f"{node}: {int(missing)} of {int(total.value)} pages in no state")
    return found


def states_of(page: Page, name: str, node: str) -> dict[str, float]:
    return {s.labels["state"]: s.value for s in page.samples if s.name == name and s.labels["node"] == node}
