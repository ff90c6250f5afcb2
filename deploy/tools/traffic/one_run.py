"""Do one run: golden answers, load, metrics and checks."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop
from rich.console import Console

from deploy.metrics_page import OPEN, Page, merged, parse_page, unrest
from deploy.tools.traffic import drills, golden, golden_run
from deploy.tools.traffic.client import Client
from deploy.tools.traffic.collector import no_collector
from deploy.tools.traffic.figures.check import Check, needs_ours
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.figures.summary import Lag, Summary, summarize
from deploy.tools.traffic.golden import Golden
from deploy.tools.traffic.live import shown
from deploy.tools.traffic.load_plan import LoadPlan, golden_prompts
from deploy.tools.traffic.loop_lag import LoopLag, watching_lag
from deploy.tools.traffic.request_builder import RequestBuilder
from deploy.tools.traffic.runner import LoadRunner
from deploy.tools.traffic.target import Server, resolve
from deploy.tools.traffic.truth import (
    Drill,
    check_agreement,
    check_answers,
    check_client,
    check_drill,
    check_rest,
    check_stalls,
)
from shared.core.errors import ConfigError

POLL_S = 0.5
RESTED_POLLS = 3  # polls in a row that must show an idle server; nodes report at least once a second


@dataclass(frozen=True, slots=True)
class Outcome:
    begun: str
    seconds: float  # from the first request to the last answer
    records: list[RequestRecord]
    summary: Summary
    checks: list[Check]
    was_interrupted: bool


@dataclass(frozen=True, slots=True)
class Sent:
    """`drill`: seconds until the node was back (or NaN), or the drill's error."""

    records: list[RequestRecord]
    seconds: float
    drill: float | BaseException
    interrupted_at: float  # time of Ctrl-C; infinite without one
    loop_lag: LoopLag


@dataclass(frozen=True, slots=True)
class RunContext:
    """`others`: routers with the same nodes as `server`."""

    server: Server
    builder: RequestBuilder
    console: Console
    quiet: bool
    admin_key: str = ""
    others: tuple[Server, ...] = ()


def run_load(plan: LoadPlan, context: RunContext, goldens: Sequence[Golden]) -> Outcome:
    """Block until the load is over and judged."""
    action = drills.prepare(plan.drill, context.server, context.admin_key) if plan.drill else None
    before = metrics_of(context)
    begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with no_collector():
        sent = uvloop.run(send_load(plan, context, goldens, action))
    records = sent.records
    window = plan.window(records, sent.interrupted_at)
    summary = summarize(records, window, plan.slo, plan.reader, plan.load.seed, sent.loop_lag.samples())
    checks = [
        check_answers(records),
        golden.check_tokens(goldens, records, plan.truth.near_tie),
        check_stalls(records, plan.truth.stall_s, sent.loop_lag),
        *own_checks(plan, context, records, before, summary.lag),
        *drill_checks(plan, sent),
        check_client(summary.lag),
    ]
    return Outcome(begun, sent.seconds, records, summary, checks, math.isfinite(sent.interrupted_at))


async def send_load(
    plan: LoadPlan, context: RunContext, goldens: Sequence[Golden], action: Callable[[], object] | None
) -> Sent:
    probes = [one.as_session(number) for number, one in enumerate(goldens)]
    addresses = [resolve(server.url, server.ca) for server in (context.server, *context.others)]
    client = Client(addresses, plan.timeout_s, resumes=plan.resume)
    driver = plan.load.driver(probes, plan.truth.every)
    until_s = plan.load.duration_s + plan.drain_s
    runner = LoadRunner(driver, client, context.builder, until_s=until_s, storms=plan.storms)
    loop = asyncio.get_running_loop()
    drilled: list[asyncio.Future[float]] = []
    if plan.drill and action:
        limit_s = max(0.0, plan.load.duration_s - plan.drill.at_s) + plan.truth.rest_s
        take_away = functools.partial(drills.take_away, plan.drill, action, context.server, limit_s)
        loop.call_later(plan.drill.at_s, lambda: drilled.append(loop.run_in_executor(None, take_away)))
    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGINT, runner.interrupt)
    async with shown(runner, context.console, quiet=context.quiet):
        with watching_lag(client.now) as loop_lag:
            records = await runner.run()
    client.close()
    seconds = client.now()
    drill: float | BaseException = math.nan
    if drilled:
        (drill,) = await asyncio.gather(*drilled, return_exceptions=True)
    at = runner.interrupted_at
    return Sent(records, seconds, drill, math.inf if at is None else at, loop_lag)


def own_checks(
    plan: LoadPlan, context: RunContext, records: Sequence[RequestRecord], before: Page | None, lag: Lag
) -> list[Check]:
    if before is None and context.builder.target.is_ours:
        return [Check(name, "doubtful", "/metrics had no page before the load") for name in ("leaks", "agreement")]
    if before is None:
        return [needs_ours("leaks", "/metrics"), needs_ours("agreement", "/metrics")]
    after, waited_s = page_at_rest(plan.truth.rest_s, context)
    rest = check_rest(records, before, after, waited_s)
    if after is None:
        return [rest, Check("agreement", "skipped", "skipped: /metrics no longer answers")]
    return [rest, check_agreement(records, before, after, lag)]


def page_at_rest(rest_s: float, context: RunContext) -> tuple[Page | None, float]:
    """Poll /metrics until it shows an idle server RESTED_POLLS times in a row, or `rest_s` is over.

    Return (the last page, the seconds of polling). The page is None if that poll got no answer.
    """
    begin = time.monotonic()
    num_rested = 0
    while True:
        time.sleep(POLL_S)
        page = page_if_any(context)
        is_at_rest = page is not None and not unrest(page) and not page.total(OPEN)
        num_rested = num_rested + 1 if is_at_rest else 0
        waited_s = time.monotonic() - begin
        if num_rested == RESTED_POLLS or waited_s > rest_s:
            return page, waited_s


def page_if_any(context: RunContext) -> Page | None:
    """A dead server raises no error, so that the report is kept."""
    with contextlib.suppress(ConfigError):
        return metrics_of(context)
    return None


def metrics_of(context: RunContext) -> Page | None:
    """Return None if a server has no such page."""
    if not context.builder.target.is_ours:
        return None
    answers = [server.get("/metrics") for server in (context.server, *context.others)]
    if any(status != 200 for status, _ in answers):
        return None
    return merged([parse_page(body.decode()) for _, body in answers])


def drill_checks(plan: LoadPlan, sent: Sent) -> list[Check]:
    if plan.drill is None:
        return []
    kind, node = plan.drill.kind, plan.drill.node
    if isinstance(sent.drill, BaseException):
        return [Check("drills", "failed", f"{kind} of {node} failed: {sent.drill}")]
    return [check_drill(Drill(kind, node, plan.drill.at_s, sent.drill), sent.records)]


def golden_answers(plan: LoadPlan, context: RunContext) -> list[Golden]:
    truth = plan.truth
    if not truth.golden:
        return []
    if truth.file is not None and truth.file.exists():
        return golden.read(truth.file, context.builder.target.model)
    if not context.quiet:
        context.console.print(f"asking {truth.golden} golden prompts before the load, one by one", highlight=False)
    prompts = golden_prompts(plan)
    answers = [golden_run.ask(context.server, context.builder, one, plan.timeout_s) for one in prompts]
    if truth.file is not None:
        golden.save(truth.file, context.builder.target.model, answers)
    return answers
