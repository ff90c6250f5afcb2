"""Show a run in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from deploy.tools.traffic.figures.check import Check
from deploy.tools.traffic.figures.figures import Estimate
from deploy.tools.traffic.figures.outcome import LoadReport, SweepPoint
from deploy.tools.traffic.figures.summary import Summary
from deploy.tools.traffic.figures.talk_figures import TalkFigures

MARKS = {
    "ok": "[green]ok[/]",
    "failed": "[bold red]FAILED[/]",
    "doubtful": "[yellow]doubtful[/]",
    "skipped": "[dim]-[/]",
}
NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def ms(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return "-"
    value = 1e3 * estimate.value
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def with_interval(estimate: Estimate, scale: float = 1.0) -> str:
    if math.isnan(estimate.value):
        return "-"
    value, low, high = (scale * one for one in (estimate.value, estimate.low, estimate.high))
    text = short(value)
    return text if math.isnan(low) else f"{text} [{short(low)}, {short(high)}]"


def short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show(report: LoadReport, console: Console) -> None:
    summary = report.summary
    console.print(
        f"\n[bold]{escape(report.model)}[/] at {escape(report.server)}, {counts_line(summary)}", highlight=False
    )
    console.print(latencies_table(summary))
    console.print(rates_table(summary))
    if summary.talks.by_turn:
        console.print(f"\n{talks_line(summary.talks)}", highlight=False)
        console.print(turns_table(summary.talks))
    for text, number in list(summary.errors.items())[:5]:
        console.print(f"  {number} x {text}", markup=False, style="red", highlight=False)
    if report.sweep:
        console.print(sweep_table(report.sweep))
        console.print(sweep_line(report), highlight=False)
    show_checks(report.checks, console)


def counts_line(summary: Summary) -> str:
    text = (
        f"{summary.num_requests} requests in {summary.seconds:g} s: {summary.num_ok} whole, {summary.num_failed} failed"
    )
    left = f", {summary.num_hung_up} left by us" if summary.num_hung_up else ""
    cached = f" ({summary.cached_tokens:,} from a cache)" if summary.cached_tokens else ""
    return f"{text}{left}; {summary.prompt_tokens:,} prompt tokens{cached}, {summary.output_tokens:,} output tokens"


def latencies_table(summary: Summary) -> Table:
    table = Table("ms", *COLUMNS, "p99, 95 % interval", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in summary.latencies.items():
        table.add_row(NAMES[name], *(ms(row[column]) for column in COLUMNS), with_interval(row["p99"], 1e3))
    return table


def rates_table(summary: Summary) -> Table:
    table = Table("per second", "with 95 % interval")
    table.add_row("requests that ended", with_interval(summary.requests_per_s))
    table.add_row("output tokens", with_interval(summary.output_tokens_per_s))
    table.add_row(f"goodput: requests that arrived, and had {summary.slo}", with_interval(summary.goodput))
    table.add_row("their share", with_interval(summary.slo_share))
    table.add_row("smooth goodput, tokens", with_interval(summary.smooth_goodput))
    return table


def talks_line(talks: TalkFigures) -> str:
    failed = f" ({talks.num_failed} failed)" if talks.num_failed else ""
    computed = "the server does not tell" if math.isnan(talks.computed.value) else with_interval(talks.computed, 100)
    calls = f", {talks.num_calls} calls of tools" if talks.num_calls else ""
    text = f"{talks.num_sessions} sessions{failed}, {talks.num_turns} turns{calls}"
    return f"{text}; prompt tokens that no cache had, %: {computed}"


TURN_HEADS = ("turn", "requests", "failed", "TTFT p50 ms, 95 % interval", "p90", "p99", "prompt tokens computed, %")


def turn_rows(talks: TalkFigures) -> list[list[str]]:
    return [
        [
            row.turns,
            str(row.num_requests),
            str(row.num_failed),
            with_interval(row.ttft["p50"], 1e3),
            ms(row.ttft["p90"]),
            ms(row.ttft["p99"]),
            with_interval(row.computed, 100),
        ]
        for row in talks.by_turn
    ]


def turns_table(talks: TalkFigures) -> Table:
    table = Table(*TURN_HEADS)
    for row in turn_rows(talks):
        table.add_row(*row)
    return table


def sweep_table(points: Sequence[SweepPoint]) -> Table:
    table = Table("rate", "share within the SLO", "goodput", "TTFT p99 ms", "TPOT p99 ms", title="sweep")
    for point in sorted(points, key=lambda one: one.rate):
        table.add_row(
            f"{point.rate:.3g}",
            with_interval(point.slo_share),
            with_interval(point.goodput),
            f"{1e3 * point.ttft_p99:,.0f}",
            f"{1e3 * point.tpot_p99:,.1f}",
        )
    return table


def sweep_line(report: LoadReport) -> str:
    if report.best_rate is None:
        return f"no tried rate is within {report.summary.slo}"
    return f"highest rate within {report.summary.slo}: [bold]{report.best_rate:.3g} requests/s[/]"


def show_checks(checks: Sequence[Check], console: Console) -> None:
    table = Table("check", "", "", title="is it true?", title_justify="left", box=None, show_header=False)
    for check in checks:
        words = Text("\n".join([check.text, *check.details]))  # a server's error may look like markup
        table.add_row(check.name, MARKS[check.verdict], words)
    console.print(table)
