"""Plot a report as standalone SVG: matplotlib without display or global state."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from deploy.tools.traffic.figures.outcome import LoadReport, RequestRow

MAX_POINTS = 3000  # more dots would only enlarge the file
SIZE = (6.4, 3.2)
BLUE, RED, GREY = "#2468a8", "#c23b22", "#888888"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "baton",  # equal reports make equal files
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}
Draw = Callable[[Axes], None]


def plots_of(report: LoadReport) -> list[tuple[str, str]]:
    """Return (title, SVG) pairs."""
    drawings: list[tuple[str, Draw | None]] = [
        ("Time to first token of each request, by when it was sent", ttft_over_time(report.rows)),
        ("Waits between tokens, per second of the run", waits_over_time(report)),
        ("Output tokens and open requests, per second", tokens_over_time(report)),
        ("Share of requests that took no longer", distributions(report.rows)),
        ("How late the client itself sent", own_lag(report.rows)),
        ("Sweep: share within the SLO by rate", sweep_curve(report)),
    ]
    return [(title, svg_of(draw)) for title, draw in drawings if draw is not None]


def svg_of(draw: Draw) -> str:
    with rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def thinned(rows: Sequence[RequestRow]) -> Sequence[RequestRow]:
    return rows[:: -(-len(rows) // MAX_POINTS) or 1]


def ttft_over_time(rows: Sequence[RequestRow]) -> Draw | None:
    shown = [(row.sent, row.ttft) for row in thinned(rows) if row.sent is not None and row.ttft is not None]
    failed = [row.sent for row in thinned(rows) if row.error and row.sent is not None]

    def draw(axes: Axes) -> None:
        axes.scatter([x for x, _ in shown], [1e3 * y for _, y in shown], s=6, color=BLUE, alpha=0.6)
        for position, at in enumerate(failed):
            axes.axvline(at, color=RED, linewidth=0.6, alpha=0.5, label="failed" if position == 0 else None)
        if failed:
            axes.legend()
        axes.set(xlabel="s", ylabel="ms", ylim=(0, None))

    return draw if shown else None


def waits_over_time(report: LoadReport) -> Draw | None:
    levels = (("p50", report.series.gap_p50, BLUE), ("p99", report.series.gap_p99, RED))

    def draw(axes: Axes) -> None:
        for name, values, colour in levels:
            known = [(second, 1e3 * value) for second, value in enumerate(values) if value is not None]
            axes.plot([x for x, _ in known], [y for _, y in known], color=colour, label=name, linewidth=1.2)
        axes.legend()
        axes.set(xlabel="s", ylabel="ms", ylim=(0, None))

    return draw if any(value is not None for value in report.series.gap_p50) else None


def tokens_over_time(report: LoadReport) -> Draw | None:
    def draw(axes: Axes) -> None:
        seconds = range(len(report.series.tokens))
        axes.plot(seconds, report.series.tokens, color=BLUE, linewidth=1.2)
        axes.set(xlabel="s", ylim=(0, None))
        axes.set_ylabel("tokens", color=BLUE)
        beside = axes.twinx()
        beside.plot(seconds, report.series.open_requests, color=GREY, linewidth=1)
        beside.set_ylabel("open requests", color=GREY)
        beside.set_ylim(0, None)
        beside.grid(False)

    return draw if any(report.series.tokens) else None


def distributions(rows: Sequence[RequestRow]) -> Draw | None:
    curves = [
        ("TTFT", sorted(row.ttft for row in rows if row.ttft is not None), BLUE),
        ("E2E", sorted(row.e2e for row in rows if row.e2e is not None), GREY),
        ("TPOT", sorted(row.tpot for row in rows if row.tpot), RED),
    ]

    def draw(axes: Axes) -> None:
        for name, values, colour in curves:
            step = -(-len(values) // MAX_POINTS) or 1
            points = [(1e3 * value, (i + 1) / len(values)) for i, value in enumerate(values)][::step]
            axes.plot([x for x, _ in points], [y for _, y in points], color=colour, label=name, linewidth=1.2)
        axes.set(xlabel="ms", xscale="log", ylim=(0, 1.02))
        axes.legend()

    return draw if curves[0][1] else None


def own_lag(rows: Sequence[RequestRow]) -> Draw | None:
    shown = [(row.sent, row.send_lag) for row in thinned(rows) if row.sent is not None and row.send_lag is not None]

    def draw(axes: Axes) -> None:
        axes.scatter([x for x, _ in shown], [1e3 * y for _, y in shown], s=4, color=GREY)
        axes.set(xlabel="s", ylabel="ms", ylim=(0, None))

    return draw if shown else None


def sweep_curve(report: LoadReport) -> Draw | None:
    points = sorted(report.sweep, key=lambda point: point.rate)

    def draw(axes: Axes) -> None:
        rates = [point.rate for point in points]
        shares = [point.slo_share for point in points]
        below = [one.value - one.low for one in shares]
        above = [one.high - one.value for one in shares]
        axes.errorbar(rates, [one.value for one in shares], yerr=[below, above], marker="o", color=BLUE, capsize=3)
        if report.best_rate is not None:
            axes.axvline(report.best_rate, color=RED, linewidth=1, label=f"highest within: {report.best_rate:.3g}/s")
            axes.legend()
        axes.set(xlabel="requests per second", ylabel="share", ylim=(0, 1.05))

    return draw if points else None
