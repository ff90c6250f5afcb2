"""Show a load's progress: a table twice a second, or a line every 10 s without a terminal."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table

from deploy.tools.concurrently import concurrently, every
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.runner import LoadRunner

REDRAW_S = 0.5
LINE_S = 10.0
RECENT_S = 10.0


@dataclass(frozen=True, slots=True)
class Glance:
    now: float
    sent: int
    open: int
    failed: int
    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    send_lag: float

    def cells(self) -> list[str]:
        latencies = [f"{1e3 * value:,.0f}" for value in (self.ttft_p50, self.ttft_p99)]
        return [
            f"{self.now:.0f} s",
            str(self.sent),
            str(self.open),
            str(self.sent - self.open - self.failed),
            str(self.failed),
            f"{self.tokens_per_s:,.0f}",
            *["-" if math.isnan(self.ttft_p50) else text for text in latencies],
            f"{1e3 * self.send_lag:.1f}",
        ]


HEADS = ("time", "sent", "open", "done", "failed", "tokens/s", "TTFT p50 ms", "p99 ms", "own lag ms")


def glance_at(records: list[RequestRecord], opened: Collection[RequestRecord], now: float) -> Glance:
    """A chunk counts as one token."""
    since = now - RECENT_S
    recent = list(newest(records, since))
    ttfts = sorted(one.ttft for one in recent if one.at)
    span = min(now, RECENT_S) or 1.0
    tokens = sum(len(one.at) - bisect(one.at, since) for one in {id(one): one for one in (*recent, *opened)}.values())
    return Glance(
        now=now,
        sent=len(records),
        open=len(opened),
        failed=sum(bool(one.error) for one in records),
        tokens_per_s=tokens / span,
        ttft_p50=ttfts[len(ttfts) // 2] if ttfts else math.nan,
        ttft_p99=ttfts[int(0.99 * len(ttfts))] if ttfts else math.nan,
        send_lag=max((one.send_lag for one in recent if not math.isnan(one.sent)), default=0.0),
    )


def newest(records: list[RequestRecord], since: float) -> Iterator[RequestRecord]:
    for record in reversed(records):
        if record.due < since:
            return
        yield record


def table_of(glance: Glance) -> Table:
    table = Table(*HEADS, box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_row(*glance.cells())
    return table


@contextlib.asynccontextmanager
async def shown(runner: LoadRunner, console: Console, *, quiet: bool) -> AsyncIterator[None]:
    if quiet:
        yield
        return
    show = in_place if console.is_terminal else in_lines
    async with concurrently(show(runner, console)):
        yield


async def in_place(runner: LoadRunner, console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        await every(REDRAW_S, lambda: live.update(table_of(now_of(runner)), refresh=True))


async def in_lines(runner: LoadRunner, console: Console) -> None:
    def line() -> None:
        pairs = zip(HEADS, now_of(runner).cells(), strict=True)
        console.print("  ".join(f"{head} {cell}" for head, cell in pairs), highlight=False, soft_wrap=True)

    await every(LINE_S, line)


def now_of(runner: LoadRunner) -> Glance:
    return glance_at(runner.records, runner.open.values(), runner.now())
