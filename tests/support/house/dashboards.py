"""Write the Grafana dashboards of deploy/launch/prometheus from a few lines each.

    python -m tests.support.house.dashboards [--write]

A panel is (title, unit, {legend: query}). Each router shows all nodes: figures of nodes are taken from any router
(`max by (node)`), those of requests are summed over routers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "launch" / "prometheus" / "dashboards"
RATE = "[$__rate_interval]"  # Grafana puts a time in
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 12, 8  # two panels side by side

Panel = tuple[str, str, dict[str, str]]


def rate(metric: str, by: str = "") -> str:
    """The routers' own counters: summed over routers."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{RATE}))"


def of_nodes(metric: str, by: str = "node") -> str:
    """Counters of nodes."""
    return f"max by ({by}) (rate({metric}{RATE}))"


def quantile(share: float, metric: str, by: str = "le") -> str:
    return f"histogram_quantile({share}, sum by ({by}) (rate({metric}_bucket{RATE})))"


def quantiles(metric: str) -> dict[str, str]:
    return {f"p{share:g}": quantile(share / 100, metric) for share in (50, 95, 99)}


def part(count: str, whole: str) -> str:
    """Of two counters of nodes, per node: 0 where nothing was counted."""
    return f"{of_nodes(count)} / ({of_nodes(whole)} > 0)"


OVERVIEW: list[Panel] = [
    ("Requests by how they ended", "reqps", {"{{outcome}}": rate("baton_requests_total", "outcome")}),
    ("Open and waiting requests", "short", {
        "open": "sum(baton_open_requests)",
        "queued in routers": "sum(baton_queued_requests)",
        "waiting on {{node}}": "max by (node) (baton_waiting_requests)",
    }),
    ("Time to the first token", "s", quantiles("baton_ttft_seconds")),
    ("Time between tokens", "s", quantiles("baton_itl_seconds")),
    ("Time of whole answers", "s", quantiles("baton_e2e_seconds")),
    ("Time in queues, p95", "s", {"{{stage}}": quantile(0.95, "baton_queue_seconds", "le, stage")}),
    ("Tokens per second", "short", {
        "prompts, computed, {{node}}": of_nodes("baton_prompt_tokens_total"),
        "prompts, cached, {{node}}": of_nodes("baton_cached_prompt_tokens_total"),
        "answers, {{node}}": of_nodes("baton_output_tokens_total"),
    }),
    ("KV pages in use", "percentunit", {
        "{{node}}": '1 - sum by (node) (max by (node, state) (baton_kv_pages{state=~"free|cached"}))'
                    " / max by (node) (baton_kv_pool_pages)",
    }),
    ("Requests in decode", "short", {"{{node}}": 'max by (node) (baton_request_rows{state="running"})'}),
    ("Step time, p95", "s", {"{{node}}": quantile(0.95, "baton_step_seconds", "le, node")}),
    ("Nodes against their peers (1: as fast)", "short", {"{{node}}": "max by (node) (baton_node_slowness)"}),
    ("What should not happen, per second", "short", {
        "retractions, {{node}}": of_nodes("baton_retractions_total"),
        "failed steps, {{node}}": of_nodes("baton_failed_steps_total"),
        "dropped messages, {{node}}": of_nodes("baton_wire_errors_total"),
        "attempts after the first": rate("baton_resumed_total"),
    }),
]  # fmt: skip
HANDOFF: list[Panel] = [
    ("Hand-offs per second", "short", {"to {{node}}": of_nodes("baton_handoffs_total")}),
    ("Bytes per second", "Bps", {"to {{node}}": of_nodes("baton_handoff_bytes_total")}),
    ("From the last chunk to the installation", "s", quantiles("baton_handoff_seconds")),
    ("The part after computing", "s", quantiles("baton_handoff_tail_seconds")),
    ("What a hand-off costs, p95", "s", {"{{node}}": quantile(0.95, "baton_handoff_cost_seconds", "le, node")}),
    ("Time in a hand-off's queues, p95", "s", {
        "{{stage}}": 'histogram_quantile(0.95, sum by (le, stage) (rate(baton_queue_seconds_bucket'
                     f'{{stage=~"bootstrap|inflight|prealloc|transfer|prebuilt"}}{RATE})))',
    }),
    ("Begun at the decode node, since a hand-off costs more", "reqps", {"all": rate("baton_started_by_cost_total")}),
    ("Nodes that could not be reached, per second", "short", {"{{node}}": of_nodes("baton_unreachable_total")}),
    ("Pulled prefixes by outcome, per second", "short", {
        "{{outcome}}": "sum by (outcome) (max by (node, outcome) (rate(baton_prefix_pulls_total" + RATE + ")))",
    }),
    ("Prompt tokens from other nodes, per second", "short", {"{{node}}": of_nodes("baton_pulled_prefix_tokens_total")}),
]  # fmt: skip
SPECULATION: list[Panel] = [
    ("Accepted drafts per verify", "short", {
        "{{node}}": part("baton_spec_accepted_tokens_total", "baton_spec_steps_total"),
    }),
    ("Tokens per step of a request (drafts + 1)", "short", {"{{node}}": "max by (node) (baton_spec_width)"}),
    ("Accepted drafts by their depth, per second", "short", {
        "{{position}}": "sum by (position) (max by (node, position) (rate(baton_spec_accepted_at_total" + RATE + ")))",
    }),
    ("Device time of drafts, part of a second", "percentunit", {
        "{{node}}": of_nodes("baton_spec_draft_seconds_total"),
    }),
    ("Device time of verifies, part of a second", "percentunit", {
        "{{node}}": of_nodes("baton_spec_verify_seconds_total"),
    }),
    ("Requests whose drafts don't know the prompt, per second", "short", {
        "{{node}}": of_nodes("baton_spec_rows_without_draft_state_total"),
    }),
]  # fmt: skip
TENANTS: list[Panel] = [
    ("Tokens per second", "short", {"{{tenant}}": rate("baton_tenant_tokens_total", "tenant")}),
    ("Refused requests", "reqps", {"{{tenant}}: {{code}}": rate("baton_tenant_refused_total", "tenant, code")}),
    ("Requests that wait in routers", "short", {"{{tenant}}": "sum by (tenant) (baton_queued_requests)"}),
    ("Tokens that wait in routers", "short", {"{{tenant}}": "sum by (tenant) (baton_queued_tokens)"}),
    ("Time in the routers' queue, p95", "s", {
        "all": f'histogram_quantile(0.95, sum by (le) (rate(baton_queue_seconds_bucket{{stage="router"}}{RATE})))',
    }),
    ("Requests by model and adapter", "reqps", {"{{model}}": rate("baton_model_requests_total", "model")}),
]  # fmt: skip
BOARDS = {"overview": OVERVIEW, "hand-off": HANDOFF, "speculation": SPECULATION, "tenants": TENANTS}


def panel(number: int, one: Panel) -> dict[str, Any]:
    title, unit, found = one
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": number % 2 * WIDTH, "y": number // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query, "legendFormat": legend}
            for at, (legend, query) in enumerate(found.items())
        ],
    }


def board(name: str) -> dict[str, Any]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "uid": f"baton-{name}",
        "title": f"Baton: {name}",
        "tags": ["baton"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": [panel(number, one) for number, one in enumerate(BOARDS[name])],
    }


def texts() -> dict[str, str]:
    return {f"{name}.json": json.dumps(board(name), indent=1) + "\n" for name in BOARDS}


def asked() -> list[str]:
    """Return every query, with a time where Grafana would put one."""
    return [
        query.replace(RATE, "[5m]") for panels in BOARDS.values() for *_, found in panels for query in found.values()
    ]


def main(argv: list[str]) -> int:
    stale = [name for name, text in texts().items() if (FOLDER / name).read_text("utf-8") != text] if not argv else []
    if argv == ["--write"]:
        for name, text in texts().items():
            (FOLDER / name).write_text(text, "utf-8")
    print("stale: " + ", ".join(stale) if stale else f"{len(BOARDS)} dashboards, {len(asked())} queries")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
