"""Read a role's load from the routers' /metrics. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.metrics_page import RESTING_PAGES, TOTAL, Page, Sample
from deploy.ray.report import PREFILL
from deploy.ray.scaling import RoleLoad
from shared.config.settings.ray_settings import ScalingConfig
from shared.core.states import RowState


def load_of(role: str, before: Sequence[Page], now: Sequence[Page], settings: ScalingConfig) -> RoleLoad | None:
    """Return a role's load; None without figures.

    `before` and `now`: pages of the same routers in the same order. Latencies come from all pages. Gauges of nodes come
    from the first page: every page has all.
    """
    nodes = number(now[0], role) if now else 0
    if not nodes:
        return None
    waiting = sum(sample.value for sample in of_role(now[0], "baton_waiting_requests", role))
    busy = max(
        share_in_use(now[0], "baton_request_rows", role, (RowState.FREE,)),
        share_in_use(now[0], "baton_kv_pages", role, RESTING_PAGES),
    )
    metric, objective = ("ttft", settings.slo_ttft_ms) if role == PREFILL else ("itl", settings.slo_itl_ms)
    mean_ms = 1000 * mean_over(before, now, f"baton_{metric}_seconds")
    return RoleLoad(nodes, waiting, busy, mean_ms / objective if objective else 0.0)


def of_role(page: Page, name: str, role: str) -> list[Sample]:
    return [sample for sample in page.samples if sample.name == name and sample.labels.get("role") == role]


def number(page: Page, role: str) -> int:
    return len({sample.labels["node"] for sample in of_role(page, TOTAL, role)})


def serving_of(page: Page) -> dict[str, str]:
    return {one.labels["node"]: one.labels["role"] for one in page.samples if one.name == TOTAL}


def share_in_use(page: Page, name: str, role: str, resting: Sequence[str]) -> float:
    samples = of_role(page, name, role)
    total = sum(sample.value for sample in samples)
    used = sum(sample.value for sample in samples if sample.labels["state"] not in resting)
    return used / total if total else 0.0


def mean_over(before: Sequence[Page], now: Sequence[Page], name: str) -> float:
    """Return the mean of all routers' observations since `before`; 0 for none. Leave out restarted routers."""
    parts = [page.mean_since(older, name) for older, page in zip(before, now, strict=True)]
    seen = [(count, mean) for count, mean in parts if count > 0]
    return sum(count * mean for count, mean in seen) / sum(count for count, _ in seen) if seen else 0.0
