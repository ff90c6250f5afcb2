"""The stream explorer: production engines on simulated streams, any order that their events allow, by seed.

python -m tests.support.explorer.run --seeds 50    the code as it is; every failure is shrunk and shown
python -m tests.support.explorer.run --seeds 20 --mutants    how often each mutant is found, and by whom
python -m tests.support.explorer.run --seeds 20 --mutant pull_no_wait
python -m tests.support.explorer.run --scenario pair --seed 17    replay one, with its timeline
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from shared.config import core_plan  # noqa: E402
from shared.config.core_plan import CorePlan

core_plan.apply(CorePlan(threads=1))

from tests.support.explorer.cases import SCENARIOS, Case, Verdict, run_case  # noqa: E402
from tests.support.explorer.mutants import MUTANTS, Broken  # noqa: E402
from tests.support.explorer.rates import measure, print_rates  # noqa: E402
from tests.support.explorer.shrink import shrink  # noqa: E402


def show(case: Case, verdict: Verdict, mutant: Broken | None, detect: bool) -> None:
    """Shrink a failing case and print what is left of it."""
    small = shrink(case, verdict, lambda one: run_case(one, mutant, detect))
    sizes = [sum(schedule.size for schedule in v.schedules) for v in (verdict, small.verdict)]
    print(f"\nshrunk in {small.runs} runs: {len(verdict.rids)} requests and {sizes[0]} decisions of the worlds")
    print(f"became {len(small.verdict.rids)} and {sizes[1]}; {small.best}\n")
    print(small.verdict.timeline())
    print(f"\n{small.verdict.message}")
    name = f" --mutant {mutant.name}" if mutant is not None else ""
    print(f"\nreplay: python -m tests.support.explorer.run --scenario {case.scenario} --seed {case.seed}{name}")


def explore(args: argparse.Namespace) -> int:
    """Seeds over the scenarios, round robin."""
    scenarios = [args.scenario] if args.scenario else SCENARIOS
    begin, steps, found = time.monotonic(), 0, Counter[str]()
    for seed in range(args.first, args.first + args.seeds):
        case = Case(scenarios[seed % len(scenarios)], seed)
        verdict = run_case(case, detect=not args.no_detector)
        steps += verdict.num_steps
        if verdict.oracle:
            found[verdict.oracle] += 1
            print(f"{case.scenario} seed {seed}: {verdict.oracle}")
            show(case, verdict, None, not args.no_detector)
    rate = steps / (time.monotonic() - begin)
    print(f"{args.seeds} seeds, {steps} steps ({rate:.0f} a second), {sum(found.values())} failures {dict(found)}")
    return 1 if found else 0


def replay(args: argparse.Namespace) -> int:
    mutant = MUTANTS[args.mutant] if args.mutant else None
    scenario = args.scenario or (mutant.scenarios[args.seed % len(mutant.scenarios)] if mutant else SCENARIOS[0])
    case = Case(scenario, args.seed)
    verdict = run_case(case, mutant, not args.no_detector)
    if not verdict.oracle:
        print(verdict.timeline(args.lines))
        print(f"{case}: nothing found in {verdict.num_steps} steps")
        return 0
    show(case, verdict, mutant, not args.no_detector)
    return 1


def mutants(args: argparse.Namespace) -> int:
    chosen = [MUTANTS[args.mutant]] if args.mutant else list(MUTANTS.values())
    rates = []
    for mutant in chosen:
        begin = time.monotonic()
        rates.append(measure(mutant, range(args.first, args.first + args.seeds)))
        print(f"{rates[-1].summary()} in {time.monotonic() - begin:.0f} s", flush=True)
    print_rates(rates)
    return 1 if any(not rate.killed for rate in rates) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--scenario", choices=SCENARIOS)
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    parser.add_argument("--mutants", action="store_true", help="detection rates of all mutants")
    parser.add_argument("--no-detector", action="store_true", help="with the other oracles only")
    parser.add_argument("--lines", type=int, default=120, help="of the timeline of a replay")
    args = parser.parse_args()
    logging.disable(logging.ERROR)  # failed steps are what mutants are for
    if args.seed is not None:
        return replay(args)
    return mutants(args) if args.mutant or args.mutants else explore(args)


if __name__ == "__main__":
    sys.exit(main())
