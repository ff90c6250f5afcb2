"""Takes a rule out of the code, one patch at a time, and requires that the tests named for it fail, and fail by an
assertion or an oracle, not by breaking.

    python tests/mutants/run.py [NAME ...]        # all patches, or those whose name contains one of these

A check that can't fail is not a check. Each `*.patch` begins with `what: ` and `kills: ` lines. Works on a copy of the
tree, which keeps its compiled kernels from patch to patch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("shared", "router", "prefill_node", "decode_node", "deploy", "tests")
FILES = ("pyproject.toml",)
TEST_TIMEOUT_S = 60
# Failed: pytest.raises that saw nothing raised; the last four are the simulations' and the hazard detector's
ORACLES = ("AssertionError", "IntegrityError", "Failed", "HazardError", "LatencyError", "Violation", "WrongStream")
TIMED_OUT = "Timeout"
HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


class PatchError(Exception):
    """The code has moved away from under a patch."""


@dataclass(frozen=True)
class Mutant:
    name: str
    what: str
    kills: tuple[str, ...]
    diff: str


@dataclass(frozen=True)
class Verdict:
    killed: bool
    why: str
    seconds: float


def read_mutant(path: Path) -> Mutant:
    head, _, diff = path.read_text().partition("\n--- ")
    fields: dict[str, list[str]] = {"what": [], "kills": []}
    for line in head.splitlines():
        name, _, value = line.partition(": ")
        fields[name].append(value.strip())
    if len(fields["what"]) != 1 or not fields["kills"] or not diff:
        raise PatchError(f"{path.name}: needs one `what: ` line, `kills: ` lines and a diff")
    return Mutant(path.stem, fields["what"][0], tuple(fields["kills"]), "--- " + diff)


def read_all(wanted: list[str]) -> list[Mutant]:
    mutants = [read_mutant(path) for path in sorted(Path(__file__).parent.glob("*.patch"))]
    return [mutant for mutant in mutants if not wanted or any(part in mutant.name for part in wanted)]


def patched(root: Path, diff: str) -> dict[Path, str]:
    """The new text of each file that a unified diff changes. Hunks may have moved; their lines must be there once."""
    texts: dict[Path, str] = {}
    for part in re.split(r"^--- a/", diff, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        path = root / name.strip()
        text = path.read_text()
        for hunk in HUNK.split(body.partition("\n")[2])[1:]:
            if not hunk.isdigit():
                text = _apply_hunk(text, hunk, name)
        texts[path] = text
    return texts


def _apply_hunk(text: str, hunk: str, name: str) -> str:
    lines = hunk.partition("\n")[2].splitlines()
    old = "".join(line[1:] + "\n" for line in lines if line[:1] in (" ", "-", ""))
    new = "".join(line[1:] + "\n" for line in lines if line[:1] in (" ", "+", ""))
    if text.count(old) != 1:
        raise PatchError(f"{name}: the lines to change occur {text.count(old)} times")
    return text.replace(old, new)


def copy_tree(target: Path) -> None:
    """With modification times, so that compiled kernels stay valid."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns(".pytest_cache"))
    for name in FILES:
        shutil.copy2(ROOT / name, target / name)


def run_tests(root: Path, tests: tuple[str, ...]) -> list[tuple[str, str]]:
    """(test, failure message) of every test that failed; an empty list: all passed."""
    report = root / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    options = [f"--timeout={TEST_TIMEOUT_S}", "--timeout-method=signal"]
    done = subprocess.run([*command, *options, *tests], cwd=root, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not report.exists():
        return [("collection", "pytest: " + (done.stdout + done.stderr).strip()[-400:])]
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
        if not is_oracle(message):
            return False, f"{name} broke: {message[:120]!r}"
    passed = [test for test in kills if test.partition("::")[2] not in failed]
    if passed:
        return False, f"SURVIVED: {', '.join(passed)} passed"
    name, message = failures[0]
    return True, f"{name}: {' '.join(message.split())[:100]}"


def try_mutant(root: Path, mutant: Mutant) -> Verdict:
    start = time.monotonic()
    try:
        texts = patched(root, mutant.diff)
    except (PatchError, OSError) as error:
        return Verdict(False, f"does not apply: {error}", 0.0)
    originals = {path: (path.read_text(), path.stat()) for path in texts}
    try:
        for path, text in texts.items():
            path.write_text(text)
        killed, why = judge(mutant.kills, run_tests(root, mutant.kills))
    finally:
        for path, (text, stat) in originals.items():
            path.write_text(text)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return Verdict(killed, why, time.monotonic() - start)


def main(wanted: list[str]) -> int:
    mutants = read_all(wanted)
    with tempfile.TemporaryDirectory(prefix="baton-mutants-") as folder:
        root = Path(folder)
        copy_tree(root)
        tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.kills))
        print(f"{len(mutants)} mutants; first their {len(tests)} tests on the code as it is", flush=True)
        failures = run_tests(root, tests)
        if failures:
            print(f"these fail without any patch: {failures}")
            return 1
        survivors = 0
        for mutant in mutants:
            verdict = try_mutant(root, mutant)
            survivors += not verdict.killed
            mark = "killed" if verdict.killed else "ALIVE "
            print(f"{mark} {mutant.name:<34} {verdict.seconds:4.0f} s  {mutant.what}\n{'':9}{verdict.why}", flush=True)
    print(f"\n{len(mutants) - survivors} of {len(mutants)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
