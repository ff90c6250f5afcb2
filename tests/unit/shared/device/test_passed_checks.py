"""Checks of GPU features are remembered for the driver, torch and kind of GPU with which they passed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.device import passed_checks
from shared.device.passed_checks import has_passed, remember, results_file
from shared.node.assembly import build_memory
from tests.support.virtual_gpu.device import VirtualGpu, make_device


@pytest.fixture(autouse=True)
def own_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    set_driver(monkeypatch, tmp_path, "580.1")


def set_driver(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str) -> None:
    file = folder / "version"
    file.write_text(f"NVRM version: {version}\nGCC version: 12\n")
    monkeypatch.setattr(passed_checks, "DRIVER_FILE", file)


class SeveralGpus(VirtualGpu):
    """Sees the GPUs with these numbers."""

    seen: tuple[int, ...] = ()

    def device_count(self) -> int:
        return len(self.seen)

    def uuid(self, device: torch.device) -> str:
        return f"virtual-{self.seen[device.index]}"


def seeing(*numbers: int) -> VirtualGpu:
    gpu = make_device()
    gpu.__class__ = type("Seeing", (SeveralGpus,), {"seen": numbers})
    return gpu


def test_a_passed_check_is_remembered_and_a_failed_one_forgotten() -> None:
    assert not has_passed("cuda_ipc", make_device())
    remember("cuda_ipc", make_device(), True)
    remember("attention", make_device(), True)
    assert has_passed("cuda_ipc", make_device()) and has_passed("attention", make_device())
    remember("cuda_ipc", make_device(), False)
    assert not has_passed("cuda_ipc", make_device()) and has_passed("attention", make_device())
    assert [file.name for file in results_file().parent.iterdir()] == ["gpu_checks.json"]


def test_it_holds_for_this_driver_torch_and_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number in (0, 1):
        remember("cuda_ipc", seeing(number), True)
    assert has_passed("cuda_ipc", seeing(1)) and not has_passed("cuda_ipc", seeing(0, 1)), "not tried together"
    remember("cuda_ipc", seeing(0, 1), True)
    assert has_passed("cuda_ipc", seeing(1, 0)) and not has_passed("cuda_ipc", seeing())
    with monkeypatch.context() as another:
        another.setattr(torch, "__version__", "9.9")
        assert not has_passed("cuda_ipc", seeing(0, 1))
    set_driver(monkeypatch, tmp_path, "590.2")
    assert not has_passed("cuda_ipc", seeing(0, 1))


def test_without_gpus_nothing_is_written() -> None:
    remember("cuda_ipc", seeing(), True)
    assert not results_file().exists()


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', "\x00"])
def test_a_spoiled_file_has_nothing_and_is_written_anew(text: str) -> None:
    results_file().parent.mkdir(parents=True)
    results_file().write_text(text)
    assert not has_passed("cuda_ipc", make_device())
    remember("cuda_ipc", make_device(), True)
    assert has_passed("cuda_ipc", make_device())


def test_a_node_on_a_gpu_asks_and_one_on_a_cpu_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_memory, "TorchCuda", make_device)
    assert not build_memory.shares_gpu_memory("cuda")
    remember("cuda_ipc", make_device(), True)
    assert build_memory.shares_gpu_memory("cuda") and not build_memory.shares_gpu_memory("cpu")
