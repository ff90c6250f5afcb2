"""Runs the checks on a GPU, several at a time, and writes what was found.

    python -m tests.gpu.run right|fast|served ... [--keep FOLDER] [--only NAME] [--jobs N]

right: is it right? fast: how fast is it? served: router, prefill and decode with a real model. Each ends by a clock of
its own: seven, four and three minutes. Each check is a process of its own. Results come to build/gpu/cuda as they are
found: results.jsonl (the book), summary.json, report.md, log.txt; with --keep they are copied to that folder, too. The
next script adds to them, and the same command again goes on with what is left. It needs no network: packages and the
model that are missing come from build/gpu-pack, which `make gpu-pack` fills where there is one.

Exit status: 0 when all checks are done and well, 1 when one failed, 75 when none failed and some are left, 77 when none
could be run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.gpu.book import BAD, FAILED, PASSED, SKIPPED, Book, Outcome
from tests.gpu.pack import install_missing
from tests.gpu.page import measured_by, write_results
from tests.gpu.plan import CHECKS, HANG_GUARD_S, MEASURED, SCRIPTS, Check

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu"
EXIT_FAILED, EXIT_LEFT, EXIT_NOT_HERE = 1, 75, 77
LAST_WORDS = 4000  # characters of a check's output that its result keeps
SOURCES = ("shared", "router", "prefill_node", "decode_node", "deploy", "tests/gpu", "tests/support")
LAST_WORDS_S = 5.0  # of a check that is ended, to write down where its threads are
POLL_S = 0.05
MACHINE_S = 60.0  # longest wait for what the machine is
THREADS = "2"  # of torch, in each of several checks


class Running(Protocol):
    """A check under way."""

    def poll(self) -> Outcome | None:
        """Return what came out, once. None: it goes on."""
        ...

    def kill(self) -> None: ...


Start = Callable[[Check, float], Running]  # the time.monotonic() at which it has to be over


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    began = time.monotonic()
    known = [check for name in args.scripts for check in SCRIPTS[name].checks]
    for name in args.only:
        if name not in names(known):
            raise SystemExit(f"nothing was run: there is no check {name!r}. There are: {names(known)}")
    site = install_missing()
    facts = machine(args.device, site)
    book = Book(args.out / args.device)
    book.begin_run(facts, code_digest(facts))
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    for name in args.only:  # named ones are run again
        book.forget(name)
    out = args.out / args.device
    asked: list[Check] = []
    for script in map(SCRIPTS.__getitem__, args.scripts):
        checks = [check for check in script.checks if not args.only or check.name in args.only]
        jobs = min(args.jobs or script.jobs, script.jobs)
        start = Processes(args.device, out / "log.txt", site, THREADS if jobs > 1 else None)
        try:
            run(
                book, checks, start, began + script.most_s - 2 * LAST_WORDS_S, jobs, lambda: write(book, out, args.keep)
            )
        finally:
            write(book, out, args.keep)
        asked, began = [*asked, *checks], time.monotonic()
    if args.renew and args.device == "cuda":
        MEASURED.write_text(json.dumps(measured_by(book, CHECKS), indent=1) + "\n", encoding="utf-8")
    return conclude(book, asked, out)


def write(book: Book, out: Path, keep: Path | None) -> None:
    write_results(book, CHECKS, out)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for file in filter(Path.is_file, out.iterdir()):
            shutil.copyfile(file, keep / file.name)


def names(checks: Sequence[Check]) -> str:
    return "; ".join(check.name for check in checks)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", choices=SCRIPTS, help="pair: of a machine with two GPUs")
    parser.add_argument(
        "--out", type=Path, default=OUT, help="results, in a folder of the device (default: %(default)s)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="results are copied there, too, as they come")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this check, again; more than once")
    parser.add_argument(
        "--jobs", type=int, default=0, help="checks at a time, if fewer than usual (8 for right, else 1)"
    )
    parser.add_argument("--renew", action="store_true", help="what was measured is what later reports compare with")
    parser.add_argument(
        "--device", choices=("cuda", "virtual"), default="cuda", help="virtual: the tests' own, with tiny shapes"
    )
    return parser.parse_args(argv)


def run(
    book: Book, checks: Sequence[Check], start: Start, ends_at: float, jobs: int, on_end: Callable[[], None]
) -> None:
    """Start what is left, `jobs` at a time. At `ends_at` (of time.monotonic) none runs any more: those under way have
    failed, the others are left."""
    left = [check for check in checks if book.is_left(check.name)]
    running: list[Running] = []
    try:
        while running or (left and time.monotonic() < ends_at):
            while left and len(running) < jobs and time.monotonic() < ends_at:
                check = left.pop(0)
                book.begin(check.name)
                running.append(start(check, min(ends_at, time.monotonic() + HANG_GUARD_S)))
            for one in list(running):
                outcome = one.poll()
                if outcome is not None:
                    running.remove(one)
                    book.end(outcome)
                    print(f"{outcome.state:<8} {outcome.seconds:5.0f} s  {outcome.name}  {brief(outcome)}", flush=True)
                    on_end()
            time.sleep(POLL_S)
    finally:
        for one in running:
            one.kill()


def brief(outcome: Outcome) -> str:
    if outcome.state == PASSED:
        return ", ".join(f"{name} {value}" for name, value in list(outcome.figures.items())[:4])
    return outcome.told.strip().rsplit("\n", 1)[-1]


def conclude(book: Book, checks: Sequence[Check], out: Path) -> int:
    """Say what there is, and what to do next."""
    outcomes = [book.outcome(check.name) for check in checks]
    bad = [outcome.name for outcome in outcomes if outcome is not None and outcome.state in BAD]
    skipped = [outcome for outcome in outcomes if outcome is not None and outcome.state == SKIPPED]
    left = [check for check, outcome in zip(checks, outcomes, strict=True) if outcome is None]
    print(f"\n{len(checks) - len(left)} of {len(checks)} checks done; results: {out / 'report.md'}")
    if bad:
        print(f"not well: {'; '.join(bad)}")
    for why in dict.fromkeys(outcome.told for outcome in skipped):
        print(f"skipped, {why}: {'; '.join(outcome.name for outcome in skipped if outcome.told == why)}")
    if left:
        print(f"left: {names(left)}\ngo on with the same command")
    if bad or left:
        return EXIT_FAILED if bad else EXIT_LEFT
    return EXIT_NOT_HERE if len(skipped) == len(checks) else 0


class Processes:
    """Starts checks, each in a process of its own, whose children go with it."""

    def __init__(self, device: str, log: Path, site: Path | None, threads: str | None = None) -> None:
        self._device, self._log = device, log
        self._environment = environment(site) | ({} if threads is None else {"OMP_NUM_THREADS": threads})

    def __call__(self, check: Check, ends_at: float) -> Process:
        command = [sys.executable, "-m", "tests.gpu.one", check.name, "--device", self._device]
        command += ["--parent-pid", str(os.getpid())]
        return Process(check.name, command, self._environment, ends_at, self._log)


class Process:
    """A check's. What it says is appended to `log` when it ends."""

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str], ends_at: float, log: Path
    ) -> None:
        self._name, self._ends_at, self._log = name, ends_at, log
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        environment = {**environment, "TMPDIR": self._folder.name}  # what it leaves there goes, too
        self._result, self._said = (Path(self._folder.name) / name for name in ("result.json", "said.txt"))
        self._began, self._is_late = time.monotonic(), False
        with self._said.open("wb") as sink:
            self._process = subprocess.Popen(
                [*command, "--result", str(self._result)],
                cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def poll(self) -> Outcome | None:
        """At the end of its time, its threads are asked where they are, then it is killed."""
        now = time.monotonic()
        if self._process.poll() is None and now < self._ends_at:
            return None
        if self._process.poll() is None and not self._is_late:
            self._is_late = True
            self._process.send_signal(signal.SIGABRT)
        if self._process.poll() is None and now < self._ends_at + LAST_WORDS_S:
            return None
        return self._outcome()

    def kill(self) -> None:
        """Nothing of it is left running."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_WORDS_S)  # a process that waits inside the driver does not end
        self._folder.cleanup()

    def _outcome(self) -> Outcome:
        status, seconds = self._process.poll(), time.monotonic() - self._began
        words = self._said.read_text(encoding="utf-8", errors="replace")
        found = json.loads(self._result.read_text(encoding="utf-8")) if self._result.exists() else None
        logs = [f"-- {file.name}\n{last_words(file)}" for file in sorted(Path(self._folder.name).rglob("*.log"))]
        self.kill()
        with self._log.open("a", encoding="utf-8") as log:
            log.write("\n".join([f"== {self._name}: status {status} after {seconds:.0f} s\n{words}", *logs, ""]))
        if self._is_late:
            return Outcome(
                self._name, FAILED, seconds, {}, f"{words[-LAST_WORDS:]}\nended: no end after {seconds:.0f} s"
            )
        if status == 0 and found is not None:
            return Outcome(self._name, PASSED, seconds, found)
        if status == EXIT_NOT_HERE:
            return Outcome(self._name, SKIPPED, seconds, {}, words.strip())
        return Outcome(self._name, FAILED, seconds, {}, f"{words[-LAST_WORDS:]}\n{reason(status)}")


def last_words(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")[-LAST_WORDS:]


def reason(status: int | None) -> str:
    return f"signal {signal.Signals(-status).name}" if status is not None and status < 0 else f"exit status {status}"


def environment(site: Path | None) -> dict[str, str]:
    """For processes of this checkout, which need not be installed, and theirs; without a word to any network."""
    paths = [str(ROOT), *([] if site is None else [str(site)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths)}


def machine(device: str, site: Path | None) -> dict[str, Any]:
    """Asked in a process of its own, which frees the GPU when it ends. SystemExit where there is none."""
    command = [sys.executable, "-m", "tests.gpu.machine", "--device", device]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(site), capture_output=True, text=True, check=False, timeout=MACHINE_S
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"nothing was run: the GPU did not answer in {MACHINE_S:.0f} s") from None
    if done.returncode:
        raise SystemExit(f"nothing was run: {done.stderr.strip().rsplit(chr(10), 1)[-1]}")
    facts: dict[str, Any] = json.loads(done.stdout.strip().rsplit("\n", 1)[-1])
    return facts


def code_digest(facts: dict[str, Any]) -> str:
    """Of the sources and the machine: results of others say nothing of these."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for file in sorted(file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # the checks under way end, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
