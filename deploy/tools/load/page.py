"""Format the report as one HTML page, without scripts or other resources."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from deploy.tools.traffic.figures.check import Check
from deploy.tools.traffic.figures.outcome import LoadReport
from deploy.tools.traffic.figures.summary import Lag, Summary
from deploy.tools.traffic.figures.table import (
    COLUMNS,
    NAMES,
    TURN_HEADS,
    counts_line,
    ms,
    talks_line,
    turn_rows,
    with_interval,
)
from deploy.tools.traffic.figures.talk_figures import TalkFigures

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 66rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; margin: .6rem 0 } th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } th { text-align: left; font-weight: 600 }
.ok { color: #187a36 } .failed { color: #b3261e; font-weight: 700 } .doubtful { color: #9a6700 }
.skipped { color: #777 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem }
figure { margin: 0 } figcaption { font-size: .9rem; color: #444 } svg { width: 100%; height: auto }
code { background: #f4f4f4; padding: .1rem .3rem; overflow-wrap: anywhere } .dim { color: #666 }
"""


def page_of(report: LoadReport) -> str:
    title = escape(f"baton load: {report.title}")
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="dim">{escape(report.begun)} &middot; <code>{escape(report.command)}</code></p>',
        f"<p>{escape(counts_line(report.summary))}</p>",
        checks_html(report.checks),
        latencies_html(report.summary),
        rates_html(report.summary),
        talks_html(report.summary.talks),
        errors_html(report.summary),
        sweep_html(report),
        plots_html(report),
        lag_html(report.summary.lag),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(filter(None, parts)) + "\n</body></html>\n"
    )


def rows_html(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heads = "".join(f'<th class="{"n" if i else ""}">{escape(cell)}</th>' for i, cell in enumerate(head))
    lines = [f"<tr>{heads}</tr>"]
    for row in rows:
        cells = "".join(f'<td class="{"n" if i else ""}">{escape(cell)}</td>' for i, cell in enumerate(row))
        lines.append(f"<tr>{cells}</tr>")
    return "<table>" + "\n".join(lines) + "</table>"


def checks_html(checks: Sequence[Check]) -> str:
    lines = [
        f'<tr><td>{escape(one.name)}</td><td class="{one.verdict}">{one.verdict}</td>'
        f"<td>{'<br>'.join(map(escape, (one.text, *one.details)))}</td></tr>"
        for one in checks
    ]
    return "<h2>Is it true?</h2><table>" + "\n".join(lines) + "</table>"


def latencies_html(summary: Summary) -> str:
    rows = [
        [NAMES[name], *(ms(row[column]) for column in COLUMNS), with_interval(row["p99"], 1e3)]
        for name, row in summary.latencies.items()
    ]
    return "<h2>Latencies</h2>" + rows_html(["ms", *COLUMNS, "p99, 95 % interval"], rows)


def rates_html(summary: Summary) -> str:
    rows = [
        ["requests that ended", with_interval(summary.requests_per_s)],
        ["output tokens", with_interval(summary.output_tokens_per_s)],
        [f"goodput: requests that arrived, and had {summary.slo}", with_interval(summary.goodput)],
        ["share of requests within the SLO", with_interval(summary.slo_share)],
        ["smooth goodput, tokens", with_interval(summary.smooth_goodput)],
    ]
    return "<h2>Rates</h2>" + rows_html(["per second", "with 95 % interval"], rows)


def talks_html(talks: TalkFigures) -> str:
    if not talks.by_turn:
        return ""
    return f"<h2>Sessions</h2><p>{escape(talks_line(talks))}</p>" + rows_html(TURN_HEADS, turn_rows(talks))


def errors_html(summary: Summary) -> str:
    if not summary.errors:
        return ""
    return "<h2>Failures</h2>" + rows_html(["", "requests"], [[text, str(n)] for text, n in summary.errors.items()])


def sweep_html(report: LoadReport) -> str:
    if not report.sweep:
        return ""
    rows = [
        [f"{one.rate:.3g}", with_interval(one.slo_share), with_interval(one.goodput), f"{1e3 * one.ttft_p99:,.0f}"]
        for one in sorted(report.sweep, key=lambda one: one.rate)
    ]
    best = f"highest rate within {report.summary.slo}: {report.best_rate:.3g} requests/s" if report.best_rate else ""
    table = rows_html(["requests per second", "share within the SLO", "goodput", "TTFT p99 ms"], rows)
    return f"<h2>Sweep</h2><p>{escape(best or 'no tried rate is within the SLO')}</p>{table}"


def plots_html(report: LoadReport) -> str:
    from deploy.tools.load.plots import plots_of  # needs the extra `load`

    figures = [f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in plots_of(report)]
    return f'<h2>Plots</h2><div class="plots">{"".join(figures)}</div>' if figures else ""


def lag_html(lag: Lag) -> str:
    rows = [
        ["sending", *map(lag_ms, (lag.send_p50, lag.send_p99, lag.send_max))],
        ["handling what had arrived", *map(lag_ms, (lag.handle_p50, lag.handle_p99, lag.handle_max))],
    ]
    return "<h2>How late the client was</h2>" + rows_html(["ms", "p50", "p99", "max"], rows)


def lag_ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1e3 * seconds:.2f}"
