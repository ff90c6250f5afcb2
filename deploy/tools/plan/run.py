"""Run `baton plan`: make a profile, print a verdict from a profile, or act."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.hub.local_model import local_path, with_local_model
from deploy.router_http import read_api_key
from deploy.router_url import url_of
from deploy.tools.plan import profile as profiles
from deploy.tools.plan.act import act
from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.profile import AT_ONCE, Profile, ProfiledCosts, StepShape
from deploy.tools.plan.progress import watching
from deploy.tools.plan.router_load import load_plan_of
from deploy.tools.plan.running import changes, look_at_cluster
from deploy.tools.plan.search import SearchResult, find_fewest, find_plan
from deploy.tools.plan.simulate import Forecast, forecast
from deploy.tools.plan.tokens import SimTokens
from deploy.tools.traffic.collector import no_collector
from deploy.tools.traffic.figures.table import ms, with_interval
from deploy.tools.traffic.load_plan import LoadPlan
from router.text.load import load_text_model
from shared.config.core_plan import usable_cores
from shared.config.device_defaults import CPU, with_device_defaults
from shared.config.flags import given_values, to_argv
from shared.config.load import load
from shared.config.processes import NodeParts, NodeProcessConfig
from shared.config.settings.settings import MemoryConfig, ModelConfig, SchedConfig
from shared.core.errors import ConfigError

SHOWN = 12
SHOWN_SHAPES = {
    "prompt tokens/s": StepShape(256, 1, pairs=256 * 257 // 2),
    "tokens/s, 1 row": StepShape(1, 1, keys=256),
    "8 rows": StepShape(8, 8, keys=8 * 256),
    "32 rows": StepShape(32, 32, keys=32 * 256),
}
PIPE_WIDTH = 200


def run(args: argparse.Namespace) -> int:
    if args.word == "act":
        return act.run(args)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    return run_measure(args, console) if args.word == "measure" else run_find(args, console)


def run_measure(args: argparse.Namespace, console: Console) -> int:
    # imports the load test's client, which `find` does not need
    from deploy.tools.plan.measure import measure

    cores = usable_cores()
    config = load(NodeProcessConfig, given_values(args))
    shares = shares_of(args.cores_per_node, len(cores))
    require_writable("--out", args.out)
    console.print(f"measuring on {len(cores)} cores; other programs falsify it", highlight=False)
    on_cpu = replace(config.parts, sched=replace(config.parts.sched, device="cpu"))
    here = replace(config, parts=with_device_defaults(with_local_model(on_cpu), "cpu"))
    measured = measure(here, cores, shares, lambda line: console.print(line, markup=False, highlight=False))
    profile = replace(measured, model=config.parts.model.model)
    profiles.save(profile, args.out)
    show_profile(profile, console)
    console.print(f"\nwritten: {args.out}; next: baton plan find --profile {args.out} --rate 4", highlight=False)
    return 0


def shares_of(text: str, num_cores: int) -> list[int]:
    if not text:
        return sorted({num_cores, max(1, num_cores // 2)}, reverse=True)
    try:
        shares = sorted({int(part) for part in text.split(",")}, reverse=True)
    except ValueError:
        shares = [0]
    if shares[-1] < 1 or shares[0] > num_cores:
        raise ConfigError(f"--cores-per-node is {text!r}; it must be numbers like 2,1, none above {num_cores}")
    return shares


def show_profile(profile: Profile, console: Console) -> None:
    table = Table("cores of a node", *SHOWN_SHAPES, "error of the fit", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for node in profile.nodes.values():
        table.add_row(f"{node.cores}", *rates(node.alone), f"{node.error:.0%}")
        if node.beside is not None:
            table.add_row(f"{node.cores}, beside another", *rates(node.beside), "")
    console.print(table)
    for cores, path in profile.paths.items():
        rate = path.bytes_per_s / 1e6
        handed = f"; a hand-off {1e3 * path.handoff:.1f} ms and {rate:,.0f} MB/s" if path.bytes_per_s < AT_ONCE else ""
        console.print(
            f"in a cluster, nodes on {cores}: {1e3 * path.to_node:.1f} ms to the first token; steps with prompts take "
            f"{path.prompt_stretch:.2f} times as long, others {path.decode_stretch:.2f} times{handed}",
            highlight=False,
        )


def rates(costs: ProfiledCosts) -> list[str]:
    return [f"{shape.tokens / costs.seconds(shape):,.0f}" for shape in SHOWN_SHAPES.values()]


def run_find(args: argparse.Namespace, console: Console) -> int:
    if args.machines < 1 or args.most_machines < 1:
        raise ConfigError("--machines and --most-machines must be 1 or more")
    if args.json is not None:
        require_writable("--json", args.json)
    url = url_of(args)
    profile = profiles.read(args.profile)
    plan = load_plan_of(args)
    cluster = look_at_cluster(url, read_api_key(args.api_key_file), args.ca) if url is not None else None
    tokens = SimTokens(load_text_model(local_path(profile.model, with_weights=False)))
    machines: int | None = args.machines
    with watching(console) as watch, no_collector():

        def forecaster(layout: ClusterLayout, load: LoadPlan) -> Forecast:
            watch.begins(layout, load.load)
            found = forecast(layout, profile, tokens, load, watch.passes)
            gc.collect()  # simulated nodes reference each other, so only the collector frees them
            return found

        if args.fewest:
            machines, finding = find_fewest(profile, plan, args.most_machines, args.slo_share, forecaster)
        else:
            finding = find_plan(profile, plan, args.machines, forecaster)
    for line in verdict(finding, plan, args, machines, profile):
        console.print(line, highlight=False)
    for line in changes(cluster, finding.best.layout) if cluster is not None else ():
        console.print(line, markup=False, highlight=False)
    console.print(table_of(finding))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(finding), indent=1))
    return 0


def require_writable(flag: str, path: Path) -> None:
    """Raise ConfigError for an unwritable file, before minutes of work and without creating it."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: can't write a file there")


def verdict(
    finding: SearchResult, plan: LoadPlan, args: argparse.Namespace, machines: int | None, profile: Profile
) -> list[str]:
    """`machines` is None if --most-machines are not enough."""
    best, other, share = finding.best, finding.other, args.slo_share
    num = machines or args.most_machines
    meets = "meets" if best.share >= share else "does not meet"
    kind = "Disaggregate" if best.layout.is_disaggregated else "Do not disaggregate"
    on = f"{several(num, 'machine')}, nodes of {several(best.layout.cores, 'core')}"
    lines = [f"[bold]{kind}[/]: on {on}, {best.layout} {meets} {plan.slo} ({best.share:.1%} of requests)."]
    if other is not None:
        also = " and would meet it, too close to tell by chance" if other.share >= share > best.share else ""
        lines.append(f"The best of the other kind, {other.layout}, has {other.share:.1%}{also}.")
    if other is not None and not profile.has_handoff:
        lines.append(
            "No hand-off was measured (the machine was one node). It takes no time here, so disaggregation looks "
            "better than it is."
        )
    lines += [f"  {number} requests failed: {escape(text)}" for text, number in best.summary.errors.items()]
    if best.share < share:
        more = f"more than {num} machines (--most-machines)" if args.fewest else "more machines (--fewest)"
        lines.append(f"Fewer requests a second, {more} or a wider SLO are needed.")
    where = "over all machines, as flags of baton up:" if num > 1 else "baton up"
    return [*lines, f"  {where} {shlex.join([*best.layout.flags(), *model_flags(profile)])}"]


def several(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def model_flags(profile: Profile) -> list[str]:
    model = ModelConfig(model=profile.model, dtype=profile.dtype)
    rows = profile.max_running
    memory = MemoryConfig(page_size=profile.page_size, max_running=0 if rows == CPU.max_running else rows)
    return to_argv(NodeParts(model=model, memory=memory, sched=SchedConfig(growth_reserve=profile.growth_reserve)))


def table_of(finding: SearchResult) -> Table:
    heads = ("within SLO", "goodput /s", "TTFT p50", "p99", "ITL p50", "p99", "tokens/s", "P busy", "D busy")
    table = Table(
        "layout",
        *heads,
        title_justify="left",
        caption="latencies in ms; [] 95 % interval",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for one in finding.tried[:SHOWN]:
        latencies = one.summary.latencies
        table.add_row(
            str(one.layout),
            f"{one.share:.1%}",
            escape(with_interval(one.summary.goodput)),
            *(ms(latencies[name][level]) for name in ("ttft", "itl") for level in ("p50", "p99")),
            f"{one.summary.output_tokens_per_s.value:,.0f}",
            *(f"{one.busy[role]:.0%}" if role in one.busy else "-" for role in ("prefill", "decode")),
        )
    return table
