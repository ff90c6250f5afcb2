"""The memory limit of a container: the KV pool and the check of the weights' size keep it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.config.machine import host_memory
from shared.core.errors import ConfigError
from shared.model.formats.opened import LoadOptions
from shared.node.assembly.build_memory import available_bytes
from shared.node.assembly.build_model import Loaded

GIB = 1 << 30


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine has 64 GiB, the container may use 4 GiB, of which 3 GiB are in use, half of that file pages."""
    machine = SimpleNamespace(total=64 * GIB, available=60 * GIB)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {GIB}\nactive_file {GIB // 2}\n")
    return tmp_path


@pytest.mark.usefixtures("container")
def test_a_container_has_its_limit_less_what_can_t_be_dropped() -> None:
    assert host_memory.host_memory() == (4 * GIB, 5 * GIB // 2)


def test_without_a_limit_the_machine_s_memory_counts(container: Path) -> None:
    (container / "memory.max").write_text("max\n")
    assert host_memory.host_memory() == (64 * GIB, 60 * GIB)


@pytest.mark.usefixtures("container")
def test_weights_larger_than_the_container_are_refused() -> None:
    LoadOptions().check_memory(2 * GIB)
    with pytest.raises(ConfigError, match="2.50 GiB of 4.00 GiB are free"):
        LoadOptions().check_memory(3 * GIB)


@pytest.mark.usefixtures("container")
def test_the_kv_pool_is_planned_within_the_container() -> None:
    made_up = SimpleNamespace(spec=SimpleNamespace(stored=None))
    assert available_bytes(Loaded(made_up, None)) == 5 * GIB // 2  # type: ignore[arg-type]
