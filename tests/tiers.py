"""Runs lint and the test tiers one after another, and prints what each took beside a quiet machine's seconds.

    python tests/tiers.py test | deep | turn | long | lint | drill

`test`, `deep` and `long` share the tests of each tier: the lists tests/deep.txt and tests/long.txt, which
tests/mutants/choose.py wrote, say which wait. `turn` takes a twentieth of tests/long.txt, another one each hour or
so, that nothing in it rots; `turn 7` takes that one.

Seconds are there to be read: a slow machine fails nothing. Only a tier that takes several times what a quiet machine
needs is ended, as one that hangs; it is asked first, so that pytest says which test was running. A tier that can't run
on this machine is skipped, and the summary says why. GPU tests run on their own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS_COLLECTED = 5
CANT_RUN_HERE = 77
TURNS = 20  # runs of CI that take all of tests/long.txt between them
TURN_S = 3200  # 27 a day, so that a CI at one hour of each day also meets every turn
LONG_RUN = "2000"  # seeds: from here on rare events are demanded
BIN = Path(sys.executable).parent
SECONDS = ROOT / "build" / "seconds"
REQUIREMENTS = ROOT / "tests" / "requirements.txt"
WAITING = ROOT / "tests" / "long.txt"
# without dependencies, because some of these packages want older versions of others than Baton has
PIP_INSTALL = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check", "--retries=1")
INSTALL_TIMEOUT_S = 600.0
GUARD_TIMES = 8.0  # a tier may take this many times a quiet machine's seconds: slow ones, beside other work, take 4
MIN_GUARD_S = 300.0  # and never less than this: where a second is expected, a busy disk alone may take many
# What a tier that hangs is sent, and the seconds it has for an answer. pytest takes the first for Ctrl-C and sums up;
# if it can't, faulthandler prints all stacks at the second. Then its process group is killed.
LAST_WORDS = ((signal.SIGINT, 120.0), (signal.SIGABRT, 30.0))


@dataclass(frozen=True, slots=True)
class Tier:
    """One command and the seconds it takes on two quiet cores (AMD Zen 5). `needs`: a command that ends with
    CANT_RUN_HERE, and says why, where the machine can't run this tier; where it can, the tier must have tests."""

    name: str
    quiet_s: float
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()

    @property
    def guard_s(self) -> float:
        return max(MIN_GUARD_S, GUARD_TIMES * self.quiet_s)


def pytest_tier(name: str, quiet_s: float, *options: str) -> Tier:
    return Tier(name, quiet_s, (sys.executable, "-m", "pytest", "-q", f"tests/{name}", "--durations=5", *options))


def tier_of_part(name: str, quiet_s: float, part: str, *options: str) -> Tier:
    return replace(pytest_tier(name, quiet_s, f"--part={part}", *HOW[name], *options), needs=NEEDS.get(name, ()))


def shared_tiers(part: str, quiet_s: Mapping[str, float]) -> tuple[Tier, ...]:
    """One part of all tiers' tests. What each took is left in build/seconds."""
    return tuple(
        tier_of_part(name, seconds, part, f"--junitxml={SECONDS / name}-{part}.xml")
        for name, seconds in quiet_s.items()
    )


def on_every_core() -> tuple[str, ...]:
    """Tests compute with one thread each, so several processes share their files; memory allows no more than four."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ("-n", str(min(num_cores, 4)), "--dist", "loadfile")


LINT = (
    Tier("ruff", 1, (str(BIN / "ruff"), "check", ".")),
    Tier("format", 1, (str(BIN / "ruff"), "format", "--check", ".")),
    Tier("mypy", 27, (str(BIN / "mypy"),)),
    Tier("layers", 31, (str(BIN / "lint-imports"),)),
    Tier("mutants", 4, (sys.executable, "tests/mutants/check.py")),
    Tier("prose", 9, (sys.executable, "-m", "tests.support.house.prose", "--check")),
    Tier("titles", 1, (sys.executable, "-m", "tests.support.house.titles")),
)
NEEDS = {"drill": (sys.executable, "-m", "tests.drill.needs")}
HOW = {"unit": on_every_core(), "simulation": on_every_core(), "integration": (), "chaos": (), "drill": ("-rs",)}
FIRST = shared_tiers("first", {"unit": 250, "simulation": 65, "integration": 150, "chaos": 50, "drill": 50})
DEEP = shared_tiers("deep", {"unit": 380, "simulation": 110, "integration": 320, "chaos": 130, "drill": 55})
DRILL = replace(pytest_tier("drill", 220, *HOW["drill"]), needs=NEEDS["drill"])
RANKS = (
    "tests/integration/nodes/test_rank_pairs.py",
    "tests/integration/nodes/test_rank_adapters.py",
    "tests/integration/nodes/test_tensor_parallel.py",
)
MARKED = ("-m", "long", "--long", "--durations=5")
CLUSTERS = ("tests/integration", "tests/chaos", *(f"--ignore={path}" for path in RANKS))  # "ranks" has run those
AHEAD = (sys.executable, "-m", "tests.support.kernels.ahead", "--all")
LONG = (
    *shared_tiers("long", {"unit": 500, "integration": 580, "chaos": 430}),  # the others run whole below
    pytest_tier("simulation", 900, "--seeds=600", "--all-ranks", "--long", *on_every_core()),
    Tier("ranks", 900, (sys.executable, "-m", "pytest", "-q", *RANKS, "--durations=5", "--all-ranks", "--long")),
    Tier("computed", 900, (sys.executable, "-m", "pytest", "-q", "tests/unit", *MARKED, *on_every_core())),
    Tier("clusters", 1200, (sys.executable, "-m", "pytest", "-q", *CLUSTERS, *MARKED)),
    replace(DRILL, quiet_s=320, command=(*DRILL.command, "--long")),
    Tier("cluster", 1500, (sys.executable, "-m", "tests.support.sim.run", "--seeds", LONG_RUN)),
    Tier("fuzz", 660, (sys.executable, "-m", "tests.chaos.fuzz", "--seconds", "600")),
    Tier("bodies", 900, (sys.executable, "-m", "tests.chaos.bodies", "--bodies", "1000000")),
    Tier("kernels", 300, AHEAD, needs=(*AHEAD, "--needs")),
    Tier("soak", 1900, (sys.executable, "-m", "tests.chaos.soak", "--minutes", "30", "--faults")),
    Tier("mutants", 3600, (sys.executable, "tests/mutants/run.py")),
)
OF_A_TURN = {"unit": 30, "simulation": 10, "integration": 40, "chaos": 30, "drill": 115}  # where a share has it
WITH_REQUIREMENTS = ("test", "deep", "turn", "long")
PLANS = {"lint": LINT, "test": LINT + FIRST, "deep": DEEP, "turn": (), "long": LONG, "drill": (DRILL,)}


def run(tier: Tier) -> tuple[bool, float]:
    """Whether it passed, and the seconds it took."""
    with started(tier) as process:
        return finish(tier, process, time.monotonic())


def run_at_once(tiers: Sequence[Tier]) -> list[tuple[bool, float]]:
    """The same of several, each of which needs one core: what one says is shown when those before it have ended."""
    start, results = time.monotonic(), []
    with ThreadPoolExecutor(len(tiers) or 1) as pool, contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in tiers]
        processes = [stack.enter_context(started(*one)) for one in zip(tiers, outputs, strict=True)]
        ends = [pool.submit(finish, tier, process, start) for tier, process in zip(tiers, processes, strict=True)]
        for tier, end, output in zip(tiers, ends, outputs, strict=True):
            results.append(end.result())
            output.seek(0)
            print(f"\n== {tier.name}\n{output.read().decode(errors='replace')}", end="", flush=True)
    return results


@contextlib.contextmanager
def started(tier: Tier, output: IO[bytes] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Its whole process group goes in the end."""
    with hearing_ctrl_c():
        process = subprocess.Popen(
            tier.command, cwd=ROOT, start_new_session=True, stdout=output, stderr=output and subprocess.STDOUT
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def finish(tier: Tier, process: subprocess.Popen[bytes], start: float) -> tuple[bool, float]:
    try:
        status = process.wait(timeout=tier.guard_s)
    except subprocess.TimeoutExpired:
        print(f"\ntiers: {tier.name} is ended: no end after {tier.guard_s:.0f} s", flush=True)
        hear_last_words(process)
        status = -1
    fine = (0,) if tier.needs else (0, NO_TESTS_COLLECTED)
    return status in fine, time.monotonic() - start


@contextlib.contextmanager
def hearing_ctrl_c() -> Iterator[None]:
    """Make processes that start here hear SIGINT: a script's background jobs and their children ignore it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def reason_to_skip(tier: Tier) -> str:
    """Return why this machine can't run the tier; "" when it can, or must show that it can't."""
    if not tier.needs:
        return ""
    done = subprocess.run(tier.needs, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no reason given" if done.returncode == CANT_RUN_HERE else ""


def hear_last_words(process: subprocess.Popen[bytes]) -> None:
    for number, wait_s in LAST_WORDS:
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return


def missing_requirements(text: str) -> list[str]:
    """Return what tests alone need, is for this machine and is not here in any version: a GPU machine has its own."""
    wanted = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    here = [one for one in wanted if one.marker is None or one.marker.evaluate()]
    return [f"{one.name}{one.specifier}" for one in here if importlib.util.find_spec(one.name) is None]


def install_requirements() -> None:
    """Where they can't be had, the tests that need them are skipped and say so."""
    if not (missing := missing_requirements(REQUIREMENTS.read_text())):
        return
    print(f"tiers: installing {', '.join(missing)}, for tests only", flush=True)
    try:
        status = subprocess.run((*PIP_INSTALL, *missing), check=False, timeout=INSTALL_TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        status = -1
    if status:
        print(f"tiers: {', '.join(missing)} can't be had: tests that need it are skipped", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("turn", nargs="?", type=int, default=time.time() // TURN_S, help="of `turn`: else by the clock")
    options = parser.parse_args(argv[1:])
    if options.plan in WITH_REQUIREMENTS:
        install_requirements()
    plan, start = PLANS[options.plan], time.monotonic()
    if options.plan == "turn":
        turn = int(options.turn) % TURNS
        print(f"tiers: share {turn} of {TURNS} of tests/long.txt; again with `make test-turn TURN={turn}`", flush=True)
        plan = in_turn(turn)
    together = [tier for tier in plan if tier in LINT]
    results = [(tier, "", *took) for tier, took in zip(together, run_at_once(together), strict=True)]
    for tier in plan[len(together) :]:
        print(f"\n== {tier.name}", flush=True)
        reason = reason_to_skip(tier)
        results.append((tier, reason, *((True, 0.0) if reason else run(tier))))
    print()
    for tier, reason, passed, seconds in results:
        verdict = "skipped" if reason else ("FAILED", "passed")[passed]
        print(line(verdict, tier.name, seconds, tier.quiet_s) + (f": {reason}" if reason else ""))
    print(line("", "in all", time.monotonic() - start, quiet_s(plan)))
    return 0 if all(passed for _, _, passed, _ in results) else 1


def in_turn(turn: int) -> tuple[Tier, ...]:
    """The tiers that have tests in this share."""
    share = share_of(turn)
    return tuple(
        tier_of_part(name, seconds, "long", f"--turn={turn}")
        for name, seconds in OF_A_TURN.items()
        if any(entry.startswith(f"tests/{name}/") for entry in share)
    )


def share_of(turn: int) -> list[str]:
    return WAITING.read_text(encoding="utf-8").splitlines()[turn::TURNS]


def quiet_s(plan: Sequence[Tier]) -> float:
    at_once = max((tier.quiet_s for tier in plan if tier in LINT), default=0.0)
    return at_once + sum(tier.quiet_s for tier in plan if tier not in LINT)


def end_at_signals() -> None:
    """Make signals exceptions, so that `run` ends its tier, which they don't reach in its own session."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def line(verdict: str, name: str, seconds: float, quiet_s: float) -> str:
    return f"{verdict:<8}{name:<12} {seconds:6.0f} s (quiet machine: {quiet_s:.0f})"


if __name__ == "__main__":
    end_at_signals()
    sys.exit(main(sys.argv))
