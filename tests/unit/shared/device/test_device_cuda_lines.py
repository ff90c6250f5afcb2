"""One file talks to the GPU's runtime, and nothing else does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared.core.errors import ConfigError
from shared.device.streams import make_streams
from shared.device.torch_cuda import TorchCuda

ROOT = Path(__file__).resolve().parents[4]
PACKAGES = ("shared", "prefill_node", "decode_node", "deploy", "router")
FACE = ROOT / "shared" / "device" / "torch_cuda.py"


def names_cuda(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            yield f"{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if any(name == "cuda" or name.startswith("torch.cuda") for name in names):
                yield f"{node.lineno}: imports {names}"


CALLS = ["torch.cuda.Event()", "x.cuda()", "from torch import cuda", "import torch.cuda.graphs"]


@pytest.mark.parametrize("code", CALLS)
def test_the_rule_refuses(code: str) -> None:
    assert list(names_cuda(ast.parse(code)))


def test_one_file_talks_to_the_gpu_s_runtime() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if file != FACE]
    found = {str(file.relative_to(ROOT)): list(names_cuda(ast.parse(file.read_text()))) for file in files}
    assert not {file: places for file, places in found.items() if places}
    assert list(names_cuda(ast.parse(FACE.read_text())))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_making_the_real_face_touches_no_gpu() -> None:
    gpu = TorchCuda()
    assert not gpu.is_available() and gpu.device_count() == 0 and not torch.cuda.is_initialized()
    with gpu.closure_mode():
        assert torch.is_inference_mode_enabled()
    with pytest.raises((AssertionError, RuntimeError, ConfigError)):
        make_streams("cuda")


class Recorded:
    """A CUDAGraph that writes down what is asked of it. `broken`: its end raises, as after an error inside."""

    broken = False

    def __init__(self) -> None:
        self.calls: list[object] = []

    def capture_begin(self, **how: object) -> None:
        self.calls.append(how)

    def capture_end(self) -> None:
        self.calls.append("end")
        if self.broken:
            raise RuntimeError("the capture was invalidated")


def test_a_capture_of_torch_s_ends_whatever_happens_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself; the error that is raised is the one inside. The allocator leaves a capture that can't end."""
    left: list[object] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch.cuda.memory, name, lambda *given, name=name: left.append((name, *given)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    with TorchCuda().capture((1, 2)) as graph:
        assert graph.calls == [{"pool": (1, 2), "capture_error_mode": "thread_local"}]  # type: ignore[attr-defined]
    assert graph.calls[1:] == ["end"]  # type: ignore[attr-defined]
    assert not left
    monkeypatch.setattr(Recorded, "broken", True)
    with pytest.raises(ValueError, match="inside"), TorchCuda().capture((1, 2)) as graph:
        raise ValueError("inside")
    assert graph.calls[1:] == ["end"]  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="invalidated"), TorchCuda().capture((1, 2)):
        pass
    assert left == [("_cuda_endAllocateToPool", 3, (1, 2)), ("_cuda_releasePool", 3, (1, 2))] * 2
