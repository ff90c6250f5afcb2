"""`baton prove` with clusters of its own."""

from __future__ import annotations

import subprocess

from shared.core import launcher
from tests.support.clusters.cluster import ROOT
from tests.support.machine.patience import HANG_GUARD_S


def test_hashlm_is_the_same_handed_over_and_local() -> None:
    argv = launcher.command("deploy.cli", "prove", "--model", "hashlm", "--cells", "chunks-24", "--max-tokens", "16")
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=HANG_GUARD_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (plain,), (chunks,) = ([line.split() for line in done.stdout.splitlines() if line.startswith(name + " ")]
                           for name in ("local-plain", "chunks-24"))  # fmt: skip
    assert plain[1:4] == chunks[1:4] == ["11/11"] * 3
    assert plain[4:6] == ["0", "0"]  # neither handed over nor cached
    assert int(chunks[4]) >= 30 and int(chunks[5]) > 1000
