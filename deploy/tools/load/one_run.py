"""One run from beginning to end: golden answers, the load, what the server says of itself, the checks."""

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

from deploy.metrics_page import OPEN, Page, parse_page, unrest
from deploy.tools.load import drills, golden, golden_run
from deploy.tools.load.check import Check, needs_ours
from deploy.tools.load.client import Client
from deploy.tools.load.collector import no_collector
from deploy.tools.load.golden import Golden
from deploy.tools.load.live import shown
from deploy.tools.load.load_plan import LoadPlan, golden_prompts
from deploy.tools.load.loop_lag import Pulse, beating
from deploy.tools.load.record import Record
from deploy.tools.load.request_builder import Asking
from deploy.tools.load.runner import Runner
from deploy.tools.load.summary import Lag, Summary, summarize
from deploy.tools.load.target import Server, resolve
from deploy.tools.load.truth import (
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
RESTED_POLLS = 3  # nodes report once a second at the latest: so long it must stay


@dataclass(frozen=True, slots=True)
class Outcome:
    begun: str
    seconds: float  # from the first request to the last answer
    records: list[Record]
    summary: Summary
    checks: list[Check]
    was_interrupted: bool


@dataclass(frozen=True, slots=True)
class Sent:
    """The raw outcome. `drill`: seconds until the node was back (NaN: not), or why the drill could not be done."""

    records: list[Record]
    seconds: float
    drill: float | BaseException
    interrupted_at: float  # infinite: it was not
    pulse: Pulse


@dataclass(frozen=True, slots=True)
class Stage:
    """Where runs take place: the server, how it is asked, who watches."""

    server: Server
    asking: Asking
    console: Console
    quiet: bool
    admin_key: str = ""


def play(plan: LoadPlan, stage: Stage, goldens: Sequence[Golden]) -> Outcome:
    """Blocks for the time of the load."""
    action = drills.prepare(plan.drill, stage.server, stage.admin_key) if plan.drill else None
    before = metrics_of(stage)
    begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with no_collector():
        sent = uvloop.run(send(plan, stage, goldens, action))
    records = sent.records
    window = plan.window(records, sent.interrupted_at)
    summary = summarize(records, window, plan.slo, plan.reader, plan.load.seed, sent.pulse.samples())
    checks = [
        check_answers(records),
        golden.check_tokens(goldens, records, plan.truth.near_tie),
        check_stalls(records, plan.truth.stall_s, sent.pulse),
        *own_checks(plan, stage, records, before, summary.lag),
        *drill_checks(plan, sent),
        check_client(summary.lag),
    ]
    return Outcome(begun, sent.seconds, records, summary, checks, math.isfinite(sent.interrupted_at))


async def send(plan: LoadPlan, stage: Stage, goldens: Sequence[Golden], action: Callable[[], None] | None) -> Sent:
    probes = [one.as_session(number) for number, one in enumerate(goldens)]
    client = Client(resolve(stage.server.url), plan.timeout_s)
    driver = plan.load.driver(probes, plan.truth.every)
    until_s = plan.load.duration_s + plan.drain_s
    runner = Runner(driver, client, stage.asking, until_s=until_s, storms=plan.storms)
    loop = asyncio.get_running_loop()
    drilled: list[asyncio.Future[float]] = []
    if plan.drill and action:
        limit_s = max(0.0, plan.load.duration_s - plan.drill.at_s) + plan.truth.rest_s
        take_away = functools.partial(drills.take_away, plan.drill, action, stage.server, limit_s)
        loop.call_later(plan.drill.at_s, lambda: drilled.append(loop.run_in_executor(None, take_away)))
    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGINT, runner.interrupt)
    async with shown(runner, stage.console, quiet=stage.quiet):
        with beating(client.now) as pulse:
            records = await runner.run()
    client.close()
    seconds = client.now()
    drill: float | BaseException = math.nan
    if drilled:
        (drill,) = await asyncio.gather(*drilled, return_exceptions=True)
    at = runner.interrupted_at
    return Sent(records, seconds, drill, math.inf if at is None else at, pulse)


def own_checks(plan: LoadPlan, stage: Stage, records: Sequence[Record], before: Page | None, lag: Lag) -> list[Check]:
    """Those that only a Baton router's metrics allow."""
    if before is None and stage.asking.target.is_ours:
        return [Check(name, "doubtful", "/metrics gave no page ahead of the load") for name in ("leaks", "agreement")]
    if before is None:
        return [needs_ours("leaks", "/metrics"), needs_ours("agreement", "/metrics")]
    after, waited_s = page_at_rest(plan.truth.rest_s, stage)
    rest = check_rest(records, before, after, waited_s)
    if after is None:
        return [rest, Check("agreement", "skipped", "skipped: /metrics no longer answers")]
    return [rest, check_agreement(records, before, after, lag)]


def page_at_rest(rest_s: float, stage: Stage) -> tuple[Page | None, float]:
    """(the last page, seconds until then): once all has been at rest for a while, or `rest_s` are over. None: the
    server did not answer any more."""
    begin = time.monotonic()
    num_rested = 0
    while True:
        time.sleep(POLL_S)
        page = page_if_any(stage)
        num_rested = num_rested + 1 if page is not None and is_at_rest(page) else 0
        waited_s = time.monotonic() - begin
        if num_rested == RESTED_POLLS or waited_s > rest_s:
            return page, waited_s


def is_at_rest(page: Page) -> bool:
    return not unrest(page) and not page.total(OPEN)


def page_if_any(stage: Stage) -> Page | None:
    """A server that died under load is a finding, and no reason to lose the report."""
    with contextlib.suppress(ConfigError):
        return metrics_of(stage)
    return None


def metrics_of(stage: Stage) -> Page | None:
    """None for a server that is not ours."""
    if not stage.asking.target.is_ours:
        return None
    status, body = stage.server.get("/metrics")
    return parse_page(body.decode()) if status == 200 else None


def drill_checks(plan: LoadPlan, sent: Sent) -> list[Check]:
    if plan.drill is None:
        return []
    kind, node = plan.drill.kind, plan.drill.node
    if isinstance(sent.drill, BaseException):
        return [Check("drills", "failed", f"{kind} of {node} could not be done: {sent.drill}")]
    return [check_drill(Drill(kind, node, plan.drill.at_s, sent.drill), sent.records)]


def golden_answers(plan: LoadPlan, stage: Stage) -> list[Golden]:
    """From the file, if it is there; else asked for, and kept where a file was named."""
    truth = plan.truth
    if not truth.golden:
        return []
    if truth.file is not None and truth.file.exists():
        return golden.read(truth.file, stage.asking.target.model)
    answers = golden_run.ask_all(stage.server, stage.asking, golden_prompts(plan), plan.timeout_s)
    if truth.file is not None:
        golden.save(truth.file, stage.asking.target.model, answers)
    return answers
