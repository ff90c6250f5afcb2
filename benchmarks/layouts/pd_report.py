"""The comparison of both layouts as one HTML page: who wins where, bars of what was measured, and what was planned."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from matplotlib.axes import Axes

from benchmarks.layouts.pd_study import FIELDS, GAP, NEEDED, SIDES, Row, Study
from deploy.tools.load.page import STYLE, rows_html
from deploy.tools.load.plots import BLUE, GREY, RED, svg_of

PLOTS = (
    ("ttft_p50", "TTFT, median", "ms", 1e3),
    ("ttft_p99", "TTFT, p99", "ms", 1e3),
    ("itl_p99", "ITL, p99", "ms", 1e3),
    ("goodput", "Goodput: requests within the SLO", "per second", 1.0),
)
JUDGED = (("ttft_p50", "TTFT"), ("itl_p99", "ITL p99"), ("goodput", "goodput"))
COLOURS = {"aggregated": GREY, "disaggregated": BLUE}


def page(study: Study, misses: Sequence[str]) -> str:
    title = "One core each for prefill and decode, against one aggregated node on both"
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="dim">{escape(study.machine)}; {study.seconds:g} s a run; SLO {escape(study.slo)}; '
        "hatched: held out from the planner&#39;s making</p>",
        verdict_html(study.rows),
        plots_html(study.rows),
        table_html(study.rows),
        misses_html(misses),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def verdict_html(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        cells = [row.mix, row.what, f"{row.rate:g}", *(side_of(row, name) for name, _ in JUDGED)]
        lines.append(cells)
    head = ["mix", "what", "requests/s", *(title for _, title in JUDGED)]
    note = f"Named is the side that is more than {GAP:.0%} better, with how much; “even” where none is."
    return f"<h2>Who wins where</h2><p>{note}</p>" + rows_html(head, lines)


def side_of(row: Row, name: str) -> str:
    gap = row.gap(row.measured, name)
    if abs(gap) <= GAP:
        return "even"
    better = max(gap, 1 / (1 + gap) - 1) if gap > -1 else float("inf")
    return f"{'disaggregated' if gap > 0 else 'aggregated'} (+{better:.0%})"


def plots_html(rows: Sequence[Row]) -> str:
    figures = [
        f"<figure>{svg_of(lambda axes, n=name, s=scale, u=unit: bars(axes, rows, n, s, u))}"
        f"<figcaption>{title}; dots: what the planner said</figcaption></figure>"
        for name, title, unit, scale in PLOTS
    ]
    return f'<h2>Measured and planned</h2><div class="plots">{"".join(figures)}</div>'


def bars(axes: Axes, rows: Sequence[Row], name: str, scale: float, unit: str) -> None:
    for number, side in enumerate(SIDES):
        at = [i + (number - 0.5) * 0.38 for i in range(len(rows))]
        heights = [scale * getattr(row.measured[side], name) for row in rows]
        hatches = ["//" if row.is_held_out else "" for row in rows]
        axes.bar(at, heights, 0.36, color=COLOURS[side], label=side, hatch=hatches, edgecolor="white")
        planned = [scale * getattr(row.planned[side], name) for row in rows]
        axes.scatter(at, planned, s=14, color=RED, zorder=3, label="planned" if number else None)
    axes.set_xticks(range(len(rows)), [row.mix for row in rows], rotation=30, ha="right")
    axes.set_ylabel(unit)
    axes.legend()


def table_html(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        for side in SIDES:
            cells = [cell(row, side, name) for name in FIELDS]
            lines.append([f"{row.mix}, {side}", *cells, f"{row.measured[side].slo_share:.0%}"])
    head = ["measured (planned is off by)", *FIELDS, "within SLO"]
    return "<h2>All figures</h2><p>Latencies in ms.</p>" + rows_html(head, lines)


def cell(row: Row, side: str, name: str) -> str:
    scale = 1.0 if name in ("goodput", "tokens_per_s") else 1e3
    return f"{scale * getattr(row.measured[side], name):.4g} ({row.error(side, name):+.0%})"


def misses_html(misses: Sequence[str]) -> str:
    said = "".join(f"<li>{escape(line)}</li>" for line in misses)
    none = f"Within {NEEDED:.0%} everywhere, and the better side wherever the gap is above {GAP:.0%}."
    return f"<h2>Where the planner was wrong</h2>{f'<ul>{said}</ul>' if misses else f'<p>{none}</p>'}"
