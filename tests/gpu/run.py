"""Runs the checks on a GPU, goes on where the last run stopped, and writes what was found.

    python -m tests.gpu.run test|bench [--out build/gpu] [--minutes 9]

Each check is a process of its own. Results come to the folder as they are found: results.jsonl (the book that the next
run reads), summary.json, report.md, log.txt. A run stops before a check that may not fit into its minutes: the same
command goes on there. So it may be run in pieces, on a machine that is lent for minutes; take the folder along.
It needs no network. Packages that are missing are taken from --wheels, which `python -m tests.gpu.wheels` fills
on a machine with network.

Exit status: 0 when all checks are done and well, 1 when one failed, 75 when none failed and some are left.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.book import BAD, FAILED, PASSED, SKIPPED, Book, Outcome
from tests.gpu.page import write_results
from tests.gpu.plan import CHECKS, HANG_GUARD_S, PLANS, Check, checks_of
from tests.gpu.wheels import OUT as WHEELS
from tests.gpu.wheels import install_missing

ROOT = Path(__file__).resolve().parents[2]
EXIT_FAILED, EXIT_LEFT, EXIT_NOT_HERE = 1, 75, 77
LAST_WORDS = 4000  # characters of a check's output that its result keeps
SOURCES = ("shared", "router", "prefill_node", "decode_node", "deploy", "tests/gpu", "tests/support")
Start = Callable[[Check], Outcome]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    site = install_missing(args.wheels)
    facts = machine(args.device, site)
    book = Book(args.out)
    book.begin_run(facts, code_digest())
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    if args.again:
        for name in [name for name, recorded in book.ended.items() if recorded.outcome.state in BAD]:
            book.forget(name)
    start = Process(args.device, args.out / "log.txt", site)
    checks = checks_of(args.plan)
    try:
        run(book, checks, start, args.minutes * 60, lambda: write_results(book, CHECKS, args.out))
    finally:
        write_results(book, CHECKS, args.out)
    return conclude(book, checks, args.out)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=PLANS, help="test: is it right? bench: how fast is it?")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="results (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this run (default: %(default)g)")
    parser.add_argument("--again", action="store_true", help="checks that failed are run again")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="folder of packages (default: %(default)s)")
    parser.add_argument(
        "--device", choices=("cuda", "virtual"), default="cuda", help="virtual: the tests' own, with tiny shapes"
    )
    return parser.parse_args(argv)


def run(book: Book, checks: Sequence[Check], start: Start, budget_s: float, on_end: Callable[[], None]) -> None:
    """Start what is left, one after the other, as far as the budget goes; the first in any case."""
    began = time.monotonic()
    left = [check for check in checks if book.is_left(check.name)]
    for number, check in enumerate(left):
        if number and time.monotonic() - began + check.seconds > budget_s:
            return
        book.begin(check.name)
        outcome = start(check)
        book.end(outcome)
        print(f"{outcome.state:<8} {outcome.seconds:5.0f} s  {check.name}  {brief(outcome)}", flush=True)
        on_end()


def brief(outcome: Outcome) -> str:
    if outcome.state == PASSED:
        return ", ".join(f"{name} {value}" for name, value in list(outcome.figures.items())[:4])
    return outcome.told.strip().rsplit("\n", 1)[-1]


def conclude(book: Book, checks: Sequence[Check], out: Path) -> int:
    """Say what there is, and what to do next."""
    outcomes = [book.outcome(check.name) for check in checks]
    bad = [outcome.name for outcome in outcomes if outcome is not None and outcome.state in BAD]
    left = [check.name for check, outcome in zip(checks, outcomes, strict=True) if outcome is None]
    print(f"\n{len(checks) - len(left)} of {len(checks)} checks done; results: {out}")
    if bad:
        print(f"not well: {'; '.join(bad)} (see {out / 'report.md'})")
    if left:
        print(f"left: {'; '.join(left)}\ngo on with the same command")
    return EXIT_FAILED if bad else EXIT_LEFT if left else 0


class Process:
    """Runs a check in a process of its own, whose children go with it."""

    def __init__(self, device: str, log: Path, site: Path | None) -> None:
        self._device, self._log = device, log
        self._environment = environment(site)

    def __call__(self, check: Check) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            result, said = Path(folder) / "result.json", Path(folder) / "said.txt"
            command = [sys.executable, "-m", "tests.gpu.one", check.name, "--device", self._device]
            began = time.monotonic()
            status = guarded([*command, "--result", str(result)], said, self._environment, HANG_GUARD_S)
            seconds = time.monotonic() - began
            words = said.read_text(encoding="utf-8", errors="replace")
            with self._log.open("a", encoding="utf-8") as log:
                log.write(f"== {check.name}: status {status} after {seconds:.0f} s\n{words}\n")
            if status == 0 and result.exists():
                return Outcome(check.name, PASSED, seconds, json.loads(result.read_text(encoding="utf-8")))
        if status == EXIT_NOT_HERE:
            return Outcome(check.name, SKIPPED, seconds, {}, words.strip())
        return Outcome(check.name, FAILED, seconds, {}, f"{words[-LAST_WORDS:]}\n{reason(status)}")


def guarded(command: Sequence[str], said: Path, environment: dict[str, str], guard_s: float) -> int | None:
    """Exit status; None where it hung. Whatever happens, nothing of it is left running."""
    with said.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(guard_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def reason(status: int | None) -> str:
    if status is None:
        return f"ended: no end after {HANG_GUARD_S:.0f} s"
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def environment(site: Path | None) -> dict[str, str]:
    """For processes of this checkout, which need not be installed, and theirs; without a word to any network."""
    paths = [str(ROOT), *([] if site is None else [str(site)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths)}


def machine(device: str, site: Path | None) -> dict[str, Any]:
    """Asked in a process of its own, which frees the GPU when it ends. SystemExit where there is none."""
    command = [sys.executable, "-m", "tests.gpu.machine", "--device", device]
    done = subprocess.run(command, cwd=ROOT, env=environment(site), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"nothing was run: {done.stderr.strip().rsplit(chr(10), 1)[-1]}")
    facts: dict[str, Any] = json.loads(done.stdout.strip().rsplit("\n", 1)[-1])
    return facts


def code_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the check under way ends, too
    sys.exit(main())
