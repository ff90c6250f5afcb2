"""What the command does: a profile out of this machine, or an answer out of a profile, as a table and a verdict."""

from __future__ import annotations

import argparse
import shlex
import sys

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from deploy.load.plan import LoadPlan
from deploy.load.table import ms, with_interval
from deploy.plan import profile as profiles
from deploy.plan.asked import load_plan_of
from deploy.plan.layout import Layout
from deploy.plan.profile import AT_ONCE, Profile, StepCosts, StepShape
from deploy.plan.search import Finding, fewest_machines, find
from deploy.plan.simulate import Forecast, forecast
from deploy.plan.tokens import Tokens
from router.text.load import load_text_model
from shared.config.core_plan import usable_cores
from shared.config.flags import given_values
from shared.config.load import load
from shared.config.processes import NodeProcessConfig
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
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    return run_measure(args, console) if args.word == "measure" else run_find(args, console)


def run_measure(args: argparse.Namespace, console: Console) -> int:
    from deploy.plan.measure import measure  # reads the load test's client, which `find` does without

    cores = usable_cores()
    config = load(NodeProcessConfig, given_values(args))
    shares = shares_of(args.cores_per_node, len(cores))
    console.print(f"measuring on {len(cores)} cores; anything else that runs here falsifies it", highlight=False)
    profile = measure(config, cores, shares, lambda line: console.print(line, markup=False, highlight=False))
    profiles.save(profile, args.out)
    show_profile(profile, console)
    console.print(f"\nwritten: {args.out}; next: baton plan find --profile {args.out} --rate 4", highlight=False)
    return 0


def shares_of(text: str, num_cores: int) -> list[int]:
    """Largest first. All cores and half of them where nothing is said."""
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
    table = Table("cores of a node", *SHOWN_SHAPES, "the fit is off by", title_justify="left")
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


def rates(costs: StepCosts) -> list[str]:
    return [f"{shape.tokens / costs.seconds(shape):,.0f}" for shape in SHOWN_SHAPES.values()]


def run_find(args: argparse.Namespace, console: Console) -> int:
    if args.machines < 1 or args.most_machines < 1:
        raise ConfigError("--machines and --most-machines must be 1 or more")
    profile = profiles.read(args.profile)
    plan = load_plan_of(args)
    tokens = Tokens(load_text_model(profile.model))
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("")

        def forecaster(layout: Layout, load: LoadPlan) -> Forecast:
            progress.update(task, description=f"simulating {layout}")
            return forecast(layout, profile, tokens, load)

        machines: int | None = args.machines
        if args.fewest:
            machines = fewest_machines(profile, plan, args.most_machines, args.slo_share, forecaster)
        finding = find(profile, plan, machines or args.most_machines, forecaster)
    for line in verdict(finding, plan, args.slo_share, machines or args.most_machines):
        console.print(line, highlight=False)
    console.print(table_of(finding))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(finding), indent=1))
    return 0


def verdict(finding: Finding, plan: LoadPlan, share: float, machines: int) -> list[str]:
    best, other = finding.best, finding.other
    unit = f"{machines} machine{'s' if machines > 1 else ''}"
    meets = "meets" if best.share >= share else "does not meet"
    kind = "Disaggregate" if best.layout.is_disaggregated else "Do not disaggregate"
    lines = [f"[bold]{kind}[/]: on {unit}, {best.layout} {meets} {plan.slo} ({best.share:.1%} of requests)."]
    if other is not None:
        lines.append(f"The best of the other kind, {other.layout}, has {other.share:.1%}.")
    if best.share < share:
        lines.append("Fewer requests a second, more machines (--fewest) or a wider SLO are needed.")
    return [*lines, f"  baton up {shlex.join(best.layout.flags())}"]


def table_of(finding: Finding) -> Table:
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
