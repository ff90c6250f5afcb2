"""The files for other launchers, by the tools of those, where they are installed; and the batch script with stand-ins
for Slurm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.house.launch_lines import LAUNCH
from tests.support.machine.patience import HANG_GUARD_S

SCRIPT = LAUNCH / "slurm" / "baton.sbatch"


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False)


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"no {tool} here")


def can_compose() -> bool:
    return shutil.which("docker") is not None and run("docker", "compose", "version").returncode == 0


def copied_units(folder: Path) -> list[str]:
    """Instances of the templates, with a program that exists here."""
    names = []
    for path in sorted((LAUNCH / "systemd").iterdir()):
        name = path.name.replace("@.", "@0.")
        (folder / name).write_text(path.read_text("utf-8").replace("/opt/baton/bin/baton", "/bin/true"))
        names.append(str(folder / name))
    return names


@needs("systemd-analyze")
def test_systemd_has_nothing_to_say_about_the_units(tmp_path: Path) -> None:
    """It ends with 0 for keys that it does not know, but says so."""
    names = copied_units(tmp_path)
    found = run("systemd-analyze", "verify", *names)
    said = [line for line in found.stderr.splitlines() if str(tmp_path) in line or "baton" in line]
    assert len(names) == 3 and (found.returncode, said) == (0, []), found.stderr
    (tmp_path / "baton-router.service").write_text("[Service]\nExecStrat=/bin/true\n")
    assert "ExecStrat" in run("systemd-analyze", "verify", names[2]).stderr


@pytest.mark.skipif(not can_compose(), reason="no docker compose here")
def test_compose_takes_the_file() -> None:
    found = run("docker", "compose", "-f", str(LAUNCH / "docker" / "compose.yaml"), "config", "--quiet")
    assert found.returncode == 0, found.stderr


@needs("shellcheck")
def test_shellcheck_has_nothing_to_say() -> None:
    found = run("shellcheck", str(SCRIPT))
    assert found.returncode == 0, found.stdout


STAND_INS = {
    "scontrol": 'printf "%s\\n" m0 m1 m2',
    "hostname": "echo 10.0.0.9 fe80::1",
    # runs here what it should run there, and tells where that is
    "srun": """
for word in "$@"; do case $word in --nodelist=*) machine=${word#*=};; esac; done
while [[ ${1:-} == --* ]]; do shift; done
echo "$machine $*" >> "$LOG"
exec "$@"
""",
    "baton": """
if [[ $1 == keys ]]; then mkdir -p "$3"; echo "here baton $*" >> "$LOG"; exit; fi
trap 'echo "ended $1" >> "$LOG"; exit 0' TERM
echo "up $1" >> "$LOG"
while true; do sleep 0.05; done
""",
}


def start(tmp_path: Path, **environment: str) -> tuple[subprocess.Popen[str], Path]:
    """The script with stand-ins in its way, and the log that they write."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    log = tmp_path / "log"
    given = {"PATH": f"{folder}:{os.defpath}", "HOME": str(tmp_path), "LOG": str(log), "SLURM_JOB_ID": "7",
             "SLURM_JOB_NODELIST": "m[0-2]", "SLURM_CPUS_PER_TASK": "4"}  # fmt: skip
    process = subprocess.Popen(
        ["bash", str(SCRIPT)], env=given | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return process, log


def wait_for(log: Path, count: int, word: str) -> list[str]:
    deadline = time.monotonic() + HANG_GUARD_S
    while True:
        lines = [line for line in (log.read_text().splitlines() if log.exists() else []) if word in line]
        if len(lines) >= count:
            return lines
        assert time.monotonic() < deadline, lines
        time.sleep(0.02)


def end(process: subprocess.Popen[str], log: Path) -> None:
    """As Slurm ends a job, once all four would hear it: before, a signal would find nobody who listens to it."""
    try:
        wait_for(log, 4, "up ")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_GUARD_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert len(wait_for(log, 4, "ended")) == 4


@pytest.mark.parametrize(
    ("prefill", "names"),
    [("1", ["prefill-0", "decode-0", "decode-1"]), ("2", ["prefill-0", "prefill-1", "decode-0"])],
)
def test_the_batch_script_starts_every_node_and_ends_all_of_them(
    tmp_path: Path, prefill: str, names: list[str]
) -> None:
    process, log = start(tmp_path, PREFILL=prefill)
    try:
        started = sorted(line for line in wait_for(log, 5, " baton ") if not line.startswith("here"))
        (made,) = wait_for(log, 1, "here baton keys")
        assert made.endswith(f"--router router --node {' '.join(names)}")
        folder = Path(made.split()[4])
        assert folder.parent == tmp_path / ".baton" and folder.stat().st_mode & 0o077 == 0
        assert (folder / "admin.key").stat().st_mode & 0o077 == 0
        wanted = ["m0 baton router", *(f"m{i} baton {name[:-2]}" for i, name in enumerate(names))]
        assert sorted(" ".join(line.split()[:3]) for line in started) == sorted(wanted)
        assert all(any(f"--node-id {name} " in line for line in started) for name in names)
        assert all(f"--keys {folder} " in line and "tcp://10.0.0.9:7001" in line for line in started)
    finally:
        end(process, log)
    assert list((tmp_path / ".baton").iterdir()) == []


@pytest.mark.parametrize(("variable", "is_used"), [("KEYS", False), ("BATON_KEYS", True)])
def test_the_batch_script_removes_no_folder_that_it_did_not_make(tmp_path: Path, variable: str, is_used: bool) -> None:
    """sbatch hands the submitter's environment on, with whatever names there are in it."""
    permanent = tmp_path / "permanent"
    permanent.mkdir(mode=0o700)
    (permanent / "allowed").write_text("of years")
    process, log = start(tmp_path, **{variable: str(permanent)})
    end(process, log)
    assert {path.name: path.read_text() for path in permanent.glob("*")} == {"allowed": "of years"}
    nodes = wait_for(log, 3, "--node-id")
    assert all((f"--keys {permanent} " in line) == is_used for line in nodes)
    assert list((tmp_path / ".baton").iterdir()) == []
