"""What the words of `baton ray` print where, and how Ray's workers find Baton. Ray is imported in another process: it
puts its own copies of other packages on sys.path, where the test of pins would find them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.machine.installed import ROOT, other_project
from tests.support.machine.patience import HANG_GUARD_S

SCRIPT = """
import os
import ray
from deploy.ray.session import connected

ray.init = lambda **kwargs: print("a raylet died (while connecting in", os.getcwd())
ray.shutdown = lambda: print("a raylet died (while disconnecting)")
with connected("127.0.0.1:6379", "baton"):
    print("a raylet died (meanwhile)")
print("[]")
"""
FINDER = """
import sys
import ray.cloudpickle
from deploy.ray.session import code_finder

sys.stdout.buffer.write(ray.cloudpickle.dumps(code_finder()))
"""
WORKER = """
import pickle, sys

pickle.loads(sys.stdin.buffer.read())()
from shared.core import launcher

print(launcher.CODE)
"""
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


def test_whatever_ray_prints_goes_to_stderr() -> None:
    """`status --json | jq` must not break because Ray has heard, at any moment, that a machine died."""
    done = run_script(ROOT)
    assert done.stdout == "[]\n", done.stdout + done.stderr
    assert done.stderr.count("a raylet died") == 3


def run_script(cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=HANG_GUARD_S)


def test_workers_do_not_import_from_where_the_command_is_typed(tmp_path: Path) -> None:
    """Ray puts the folder of a process that connects first on its workers' path."""
    assert f"while connecting in {ROOT}\n" in run_script(tmp_path).stderr


def test_a_worker_finds_baton_before_another_project(tmp_path: Path) -> None:
    """On a machine where Baton is elsewhere than on the machine that the command was typed on."""
    theirs = other_project(tmp_path)
    finder = subprocess.run([sys.executable, "-c", FINDER], cwd=ROOT, capture_output=True, check=True).stdout
    env = {**os.environ, "PYTHONPATH": f"{theirs}{os.pathsep}{ROOT}"}
    found = subprocess.run([sys.executable, "-c", WORKER], cwd=theirs, env=env, input=finder, capture_output=True)
    assert found.stdout.decode() == f"{ROOT}\n", found.stderr.decode()
