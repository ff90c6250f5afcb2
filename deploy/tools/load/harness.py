"""Run `baton load`: a run, a sweep or a comparison, from flags to terminal and files."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from deploy.cluster.admin import read_admin_key
from deploy.router_http import read_api_key
from deploy.router_url import DEFAULT_URL, Url, all_of, parse_url
from deploy.tools.load import compare, files
from deploy.tools.load.sweep import Sweep
from deploy.tools.traffic.figures import table
from deploy.tools.traffic.figures.check import Check
from deploy.tools.traffic.figures.outcome import LoadReport, SweepPoint, read_report, row_of, series_of
from deploy.tools.traffic.golden import Golden
from deploy.tools.traffic.load_plan import LoadPlan, plan_of
from deploy.tools.traffic.one_run import Outcome, RunContext, golden_answers, run_load
from deploy.tools.traffic.request_builder import RequestBuilder
from deploy.tools.traffic.target import Server, look_at
from shared.core.errors import ConfigError
from shared.wire.descriptors import raise_limit

EXIT_UNTRUE = 1
PIPE_WIDTH = 200
ALWAYS_TRUE = ("tokens", "leaks")


def run(args: argparse.Namespace) -> int:
    if args.words[:1] == ["compare"]:
        if args.url is not None:
            raise ConfigError("compare reads files of --out and asks no server: leave out --url")
        return run_compare(args.words[1:])
    urls = all_of(args.words, [args.url] if args.url is not None else []) or [parse_url(DEFAULT_URL)]
    if len({url.prefix for url in urls}) > 1:
        raise ConfigError("several routers must serve the same path")

    plan = plan_of(args)
    if args.out is not None:
        files.prepare(args.out)
    raise_limit()  # each stream needs a descriptor
    console = make_console()
    context = context_of(args, urls, plan, console)
    report = run_sweep(plan, context, args) if args.sweep else run_once(plan, context)
    return finish_report(report, args.out, console)


def make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def run_compare(words: list[str]) -> int:
    if len(words) != 2:
        raise ConfigError("compare needs two folders of --out, e.g. baton load compare before after")

    first, second = (read_report(Path(word)) for word in words)
    console = make_console()
    compare.show(compare.lines_of(first, second), words[0], words[1], console)
    for remark in compare.remarks(first, second):
        console.print(remark, markup=False, highlight=False)
    return 0


def context_of(args: argparse.Namespace, urls: Sequence[Url], plan: LoadPlan, console: Console) -> RunContext:
    api_key = read_api_key(args.api_key_file)
    server, *others = (Server(url, api_key, args.ca) for url in urls)
    target = look_at(server, args.model)
    admin_key = read_admin_key(args.admin_key_file) if plan.drill else ""
    builder = RequestBuilder(target, args.api, api_key, args.temperature, plan.extra)
    return RunContext(server, builder, console, args.quiet, admin_key, tuple(others))


def run_once(plan: LoadPlan, context: RunContext) -> LoadReport:
    goldens = golden_answers(plan, context)
    return report_of(run_load(plan, context, goldens), plan, context, [], None)


def run_sweep(plan: LoadPlan, context: RunContext, args: argparse.Namespace) -> LoadReport:
    """Report the run at the best rate, or at the lowest rate if no run met the SLO."""
    goldens = golden_answers(plan, context)
    sweep = Sweep(args.rate, args.slo_share)
    outcomes: dict[float, Outcome] = {}
    while (rate := sweep.next_rate()) is not None:
        try:
            outcomes[rate] = run_at(rate, plan, context, goldens)
        except ConfigError as error:  # perhaps the previous rate killed the server; report the runs so far
            if not outcomes:
                raise
            context.console.print(f"{rate:.3g} requests/s: {error}", markup=False, highlight=False)
            break
        if outcomes[rate].was_interrupted:
            break
        share = outcomes[rate].summary.slo_share.value
        context.console.print(f"{rate:.3g} requests/s: {share:.1%} within {plan.slo}", highlight=False)
        sweep.went(rate, share)
    shown = outcomes[sweep.best if sweep.best is not None else min(outcomes)]
    worst = failed_elsewhere(outcomes, shown, sweep.best or 0.0)
    points = [point_of(rate, outcome) for rate, outcome in outcomes.items()]
    return report_of(replace(shown, checks=[*shown.checks, *worst]), plan, context, points, sweep.best)


def failed_elsewhere(outcomes: Mapping[float, Outcome], shown: Outcome, best: float) -> list[Check]:
    """Return the failed checks of all runs but `shown`.

    Up to the best rate, every check counts except `answers`, which the SLO judges. Above the best rate, only the
    checks in ALWAYS_TRUE count.
    """
    return [
        check
        for rate, outcome in outcomes.items()
        for check in outcome.checks
        if outcome is not shown and check.verdict == "failed" and may_count(check, is_overload=rate > best)
    ]


def may_count(check: Check, *, is_overload: bool) -> bool:
    return check.name in ALWAYS_TRUE if is_overload else check.name != "answers"


def run_at(rate: float, plan: LoadPlan, context: RunContext, goldens: list[Golden]) -> Outcome:
    assert plan.load.arrivals is not None
    load = replace(plan.load, arrivals=replace(plan.load.arrivals, rate=rate), seed=plan.load.seed + int(1000 * rate))
    return run_load(replace(plan, load=load), context, goldens)


def point_of(rate: float, outcome: Outcome) -> SweepPoint:
    summary = outcome.summary
    ttft, tpot = (summary.latencies[name]["p99"].value for name in ("ttft", "tpot"))
    return SweepPoint(rate, summary.slo_share, summary.goodput, ttft, tpot)


def report_of(
    outcome: Outcome, plan: LoadPlan, context: RunContext, points: list[SweepPoint], best_rate: float | None
) -> LoadReport:

    target = context.builder.target
    return LoadReport(
        title=f"{target.model} at {target.url}",
        begun=outcome.begun,
        server=" ".join(str(server.url) for server in (context.server, *context.others)),
        model=target.model,
        command=shlex.join(["baton", *sys.argv[1:]]),
        summary=outcome.summary,
        checks=outcome.checks,
        series=series_of(outcome.records, outcome.seconds),
        rows=[row_of(record) for record in outcome.records],
        sweep=points,
        best_rate=best_rate,
    )


def finish_report(report: LoadReport, folder: Path | None, console: Console) -> int:
    table.show(report, console)
    if folder is not None:
        files.write(report, folder)
        console.print(f"\nwritten: {folder / 'report.html'}, report.json, requests.csv", highlight=False)
    return EXIT_UNTRUE if any(check.verdict == "failed" for check in report.checks) else 0
