"""`baton up` with a folder that nodes would refuse ends with one sentence, before it starts a process."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from shared.core import launcher
from shared.core.exit_codes import EXIT_CONFIG
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.library_families import write_config


def test_up_says_one_sentence_and_ends(tmp_path: Path) -> None:
    write_config("bloom", tmp_path)
    command = launcher.command("deploy.cli", "up", "--model", str(tmp_path), "--port", "0")
    begun = time.monotonic()
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_GUARD_S)
    print(f"{time.monotonic() - begun:.1f} s")
    assert done.returncode == EXIT_CONFIG and not done.stdout
    said = f"baton up: {tmp_path}: the layers of bloom attend in a way of their own, which can't read pages"
    assert done.stderr.splitlines()[-1] == said and "starting" not in done.stderr
