"""Processes of ours import our packages, wherever they are started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shared.core import launcher
from tests.support.machine.installed import other_project


@pytest.mark.parametrize("module", ["deploy.cli", "shared.ranks.process", "deploy.tools.plan.measure_steps"])
def test_a_child_does_not_import_from_another_project(tmp_path: Path, module: str) -> None:
    """Neither from the current directory nor from PYTHONPATH."""
    theirs = other_project(tmp_path)
    done = subprocess.run(
        launcher.command(module, "--help"),
        cwd=theirs,
        env={**os.environ, "PYTHONPATH": str(theirs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


def test_a_child_s_path_begins_with_our_packages(tmp_path: Path) -> None:
    """And has no folder of a package: its files would be modules such as `errors`."""
    (tmp_path / "shown.py").write_text("import sys; print(*sys.path, sep='\\n')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(launcher.command("shown"), cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    found = done.stdout.splitlines()
    assert found[:2] == [str(launcher.CODE), str(tmp_path)]
    assert str(Path(launcher.__file__).parent) not in found
