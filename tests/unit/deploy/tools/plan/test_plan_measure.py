"""`baton plan measure` ends in its midst: no process and no file is left. Children that only say who they are stand for
nodes."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from deploy.tools.plan import measure
from deploy.tools.plan.run import shares_of
from shared.config.processes import NodeProcessConfig
from shared.core.errors import ConfigError

SAYS_WHO_IT_IS = "import os, time; print({!r}, flush=True); open({!r} + str(os.getpid()), 'w'); time.sleep(600)"


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_leaves_no_child_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids, folders = tmp_path / "pids", tmp_path / "folders"
    pids.mkdir()
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))

    def child(config: NodeProcessConfig, cpus: tuple[int, ...], *words: str) -> list[str]:
        first = "busy" if "--busy" in words else "step"
        return [sys.executable, "-c", SAYS_WHO_IT_IS.format(first, f"{pids}/")]

    monkeypatch.setattr(measure, "child", child)
    config = NodeProcessConfig()

    def interrupted(line: str) -> None:
        assert len(list(folders.iterdir())) == 1
        if "step" in line.split():
            while not list(pids.iterdir()):
                pass
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure.measure(config, (0, 1), [1], interrupted)
    with pytest.raises(KeyboardInterrupt), measure.neighbour(config, (1,)):
        while len(list(pids.iterdir())) < 2:
            pass
        raise KeyboardInterrupt
    assert [is_there(int(path.name)) for path in pids.iterdir()] == [False, False]
    assert not list(folders.iterdir())


def test_a_node_that_can_not_be_measured_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "child", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(ConfigError, match="ended with 3"):
        measure.measured(NodeProcessConfig(), (0,), tmp_path, lambda line: None)
    with pytest.raises(ConfigError, match="did not start"), measure.neighbour(NodeProcessConfig(), (0,)):
        pass


def test_a_machine_of_one_core_has_nodes_of_one_core() -> None:
    assert shares_of("", 1) == [1]
    with pytest.raises(ConfigError, match="none above 1"):
        shares_of("2,1", 1)
