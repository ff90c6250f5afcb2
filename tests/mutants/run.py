"""Take a rule out of the code, one mutant at a time. The tests named for it must fail, and fail by an assertion or an
oracle, not by breaking.

    python tests/mutants/run.py [NAME ...]        # all mutants, or those whose name contains one of these

A check that can't fail is not a check. The mutants are those of catalogue.py. Works on a copy of the tree, which keeps
its compiled kernels from mutant to mutant.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from catalogue import ROOT, CatalogueError, Mutant, find_tests, mutated, node_id, read_all

FOLDERS = (
    "baton_serve", "shared", "router", "prefill_node", "decode_node", "deploy", "benchmarks", "docs", "tests"
)  # fmt: skip
FILES = ("pyproject.toml", "README.md", "LICENSE")
TEST_TIMEOUT_S = 300
GROUP_TIMEOUT_S = 1200  # of all tests of a mutant: pytest itself can hang, in C or at its end
HANG_GUARD_S = 30  # of one wait in a test: a mutant that hangs fails there, by an assertion, before its time is up
ORACLES = (
    "AssertionError",
    "IntegrityError",
    "Failed",  # pytest.raises that saw nothing raised
    # the simulations', the hazard detector's, the virtual GPU's
    "DeadlockError",
    "HazardError",
    "LatencyError",
    "RaceError",
    "Violation",
    "WrongStream",
)
TIMED_OUT = "Timeout"
HUNG = "TIMED OUT"  # what is said of a pytest that does not end, in a test's place


@dataclass(frozen=True)
class Verdict:
    killed: bool
    why: str
    seconds: float


def copy_tree(target: Path) -> None:
    """With modification times, so that compiled kernels stay valid."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns(".pytest_cache"))
    for name in FILES:
        shutil.copy2(ROOT / name, target / name)


def run_group(command: Sequence[str], cwd: Path, env: Mapping[str, str], timeout_s: float) -> tuple[int | None, str]:
    """Exit status and output of a command; None: it had to be killed. Nothing of its process group outlives it.

    pytest's own timeout is a signal, which a thread that never ends outlives. The output is a file, because a process
    that a test left behind would keep a pipe open.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")


def run_tests(root: Path, tests: tuple[str, ...]) -> list[tuple[str, str]]:
    """(test, failure message) of every test that failed; an empty list: all passed."""
    report = root / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    options = [f"--timeout={TEST_TIMEOUT_S}", "--timeout-method=signal"]
    patience = {"BATON_TEST_HANG_GUARD_S": str(HANG_GUARD_S)}
    status, output = run_group([*command, *options, *tests], root, os.environ | patience, GROUP_TIMEOUT_S)
    if status is None:
        return [(HUNG, f"pytest was killed after {GROUP_TIMEOUT_S} s")]
    if status not in (0, 1) or not report.exists():
        return [("collection", "pytest: " + output.strip()[-400:])]
    failures = []
    for case in ElementTree.parse(report).iter("testcase"):
        for kind in ("failure", "error"):
            for entry in case.findall(kind):
                failures.append((case.get("name", ""), entry.get("message", "")))
    return failures


def is_oracle(message: str) -> bool:
    """Whether a failure is an assertion's or an oracle's word: not a crash, not a time-out."""
    error = message.split(":")[0].split("\n")[0].rpartition(".")[2].strip()
    return (message.startswith("assert ") or error in ORACLES) and TIMED_OUT not in message[:60]


def judge(kills: tuple[str, ...], failures: list[tuple[str, str]]) -> tuple[bool, str]:
    """Killed when every test named failed, and every failure came from an assertion or an oracle."""
    failed = {name.partition("[")[0] for name, _ in failures}
    for name, message in failures:
        if name == HUNG:
            return False, f"{HUNG}: {message}"
        if not is_oracle(message):
            return False, f"{name} broke: {message[:120]!r}"
    passed = [test for test in kills if test.partition("::")[2] not in failed]
    if passed:
        return False, f"SURVIVED: {', '.join(passed)} passed"
    name, message = failures[0]
    return True, f"{name}: {' '.join(message.split())[:100]}"


@contextlib.contextmanager
def replaced(texts: dict[Path, str]) -> Iterator[None]:
    """Give files another text for a while. They come back with their times, so that what was compiled stays valid."""
    originals = {path: (path.read_text(), path.stat()) for path in texts}
    try:
        for path, text in texts.items():
            path.write_text(text)
        yield
    finally:
        for path, (text, stat) in originals.items():
            path.write_text(text)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def try_mutant(root: Path, mutant: Mutant, kills: tuple[str, ...]) -> Verdict:
    start = time.monotonic()
    try:
        texts = mutated(mutant, root)
    except CatalogueError as error:
        return Verdict(False, f"does not apply: {error}", 0.0)
    with replaced(texts):
        killed, why = judge(kills, run_tests(root, kills))
    return Verdict(killed, why, time.monotonic() - start)


def needs_triton(mutant: Mutant) -> bool:
    return any(edit.at.startswith("shared.gpu_kernel.") for edit in mutant.edits)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a mutant's name (default: all mutants)")
    names: list[str] = parser.parse_args(argv).names
    mutants = read_all(tuple(names))
    if not mutants:
        parser.error(f"no mutant's name contains any of {names}")
    if importlib.util.find_spec("triton") is None:
        print("mutants of shared.gpu_kernel are left out: no Triton here")
        mutants = [mutant for mutant in mutants if not needs_triton(mutant)]
    named = find_tests()
    kills = {mutant.name: tuple(node_id(test, named) for test in mutant.kills) for mutant in mutants}
    with tempfile.TemporaryDirectory(prefix="baton-mutants-") as folder:
        root = Path(folder)
        copy_tree(root)
        tests = tuple(dict.fromkeys(test for ids in kills.values() for test in ids))
        print(f"{len(mutants)} mutants; first their {len(tests)} tests on the code as it is", flush=True)
        failures = run_tests(root, tests)
        if failures:
            print(f"these fail without any mutant: {failures}")
            return 1
        survivors = 0
        for mutant in mutants:
            verdict = try_mutant(root, mutant, kills[mutant.name])
            survivors += not verdict.killed
            mark = "killed" if verdict.killed else "ALIVE "
            print(f"{mark} {mutant.name:<34} {verdict.seconds:4.0f} s  {mutant.why}\n{'':9}{verdict.why}", flush=True)
    print(f"\n{len(mutants) - survivors} of {len(mutants)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
