"""One prefill and one decode node with a core each, against one aggregated node on both: measured, and as planned.

    python -m benchmarks.layouts.disaggregation --out DIR [--profile FILE] [--seconds 45] [--mixes chat,long]

Measures a profile (`baton plan measure`) unless one is given, runs every mix of `pd_workloads` on both layouts with
`baton load`'s own machinery, plays the same requests through the planner, and writes figures.json.
Needs two cores that do nothing else, for about half an hour.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.layouts.pd_study import FIELDS, SIDES, Figures, Row, Study, misses
from benchmarks.layouts.pd_workloads import MIXES, Mix
from deploy.cluster.own_cluster import own_cluster
from deploy.tools.plan import profile as profiles
from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.measure import measure
from deploy.tools.plan.profile import Profile
from deploy.tools.plan.router_load import load_plan, put_load
from deploy.tools.plan.simulate import forecast
from deploy.tools.plan.tokens import SimTokens
from deploy.tools.traffic.figures.summary import Summary
from router.text.load import load_text_model
from shared.config.core_plan import usable_cores
from shared.config.device_defaults import CPU
from shared.config.processes import NodeProcessConfig
from shared.config.settings.router_settings import UNMEASURED_LOCAL_TOKENS


def layouts(profile: Profile) -> dict[str, ClusterLayout]:
    """Settings as `baton up` has them, but for a constant length from which prompts are handed over: the planner knows
    no other rule."""
    half = profile.cores // 2
    common = (CPU.chunk_size, CPU.mixed_chunk_size, UNMEASURED_LOCAL_TOKENS)
    return {
        "aggregated": ClusterLayout(0, 1, profile.cores, 1, *common),
        "disaggregated": ClusterLayout(1, 1, half, 2, *common),
    }


def figures_of(summary: Summary) -> Figures:
    latencies = summary.latencies
    return Figures(
        *(latencies[name][level].value for name, level in (("ttft", "p50"), ("ttft", "p99"))),
        *(latencies[name][level].value for name, level in (("itl", "p50"), ("itl", "p99"), ("tpot", "p50"))),
        goodput=summary.goodput.value,
        tokens_per_s=summary.output_tokens_per_s.value,
        slo_share=summary.slo_share.value,
        num_ok=summary.num_ok,
        num_failed=summary.num_failed,
    )


def measured(mix: Mix, layout: ClusterLayout, folder: Path, seconds: float) -> Figures:
    """On a cluster of its own: nothing is cached from another run. What compiles late does so before."""
    with own_cluster(layout.flags(), folder / "cluster.log") as url:
        put_load(url, ["--prompt-tokens", "400", "--output-tokens", "8", "--rate", "4", "--requests", "8"])
        outcome = put_load(url, mix.flags(folder, seconds))
    return figures_of(outcome.summary)


def run_both(mix: Mix, profile: Profile, folder: Path, seconds: float) -> dict[str, Figures]:
    return {side: measured(mix, layout, folder, seconds) for side, layout in layouts(profile).items()}


def study(mixes: Sequence[Mix], profile: Profile, seconds: float, known: Mapping[str, Row]) -> Study:
    """`known`: rows whose measured figures are taken as they are."""
    tokens = SimTokens(load_text_model(profile.model))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        folder = Path(name)
        for mix in mixes:
            real = known[mix.name].measured if mix.name in known else run_both(mix, profile, folder, seconds)
            plan = load_plan([*mix.flags(folder, seconds), "--golden", "0"])
            virtual = {
                side: figures_of(forecast(layout, profile, tokens, plan).summary)
                for side, layout in layouts(profile).items()
            }
            rows.append(Row(mix.name, mix.what, mix.rate, mix.is_held_out, real, virtual))
            for line in lines_of(rows[-1]):
                print(line, file=sys.stderr, flush=True)
    return Study(profile.machine, seconds, MIXES[0].slo, rows)


def lines_of(row: Row) -> list[str]:
    lines = []
    for side in SIDES:
        pairs = [(name, getattr(row.measured[side], name), row.error(side, name)) for name in FIELDS]
        lines.append(f"{row.mix:10} {side:13} " + "  ".join(f"{n} {v:.4g} ({e:+.0%})" for n, v, e in pairs))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--measured", type=Path, help="figures.json of a run before, whose mixes are not run again")
    parser.add_argument("--mixes", default="", help="names, with commas; all where not given")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = args.mixes.split(",") if args.mixes else [mix.name for mix in MIXES]
    if args.profile is None:
        cores = usable_cores()[:2]
        made = measure(NodeProcessConfig(), cores, (len(cores), 1), lambda line: print(line, file=sys.stderr))
        profiles.save(made, args.out / "profile.json")
    profile = profiles.read(args.profile or args.out / "profile.json")
    before = msgspec.json.decode(args.measured.read_bytes(), type=Study).rows if args.measured else []
    known = {row.mix: row for row in before}
    found = study([mix for mix in MIXES if mix.name in wanted], profile, args.seconds, known)
    (args.out / "figures.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    print("\n".join(misses(found)) or "the planner is within 25 % everywhere and picks the better side")
    return 0


if __name__ == "__main__":
    sys.exit(main())
