"""What nodes make of packed weights: a file for each, and memory that is counted."""

from __future__ import annotations

import io
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.config.machine.cache_folder import packed_folder
from shared.config.processes import NodeParts
from shared.config.settings.settings import MemoryConfig, ModelConfig
from shared.kernel.product.product import supports
from shared.model.formats.packed_folder import packed_of
from shared.node.assembly import build_memory, build_model
from shared.observe.log import Logger
from shared.ranks import follower
from shared.ranks.orders import Start
from tests.support.models.tiny_llama import write_tiny_llama

GIB = 1 << 30
needs_kernels = pytest.mark.skipif(not supports(64, torch.float32), reason="nothing is packed on this processor")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "baton" / "packed"


def parts(model: str, packed_bytes: int = GIB) -> NodeParts:
    return NodeParts(model=ModelConfig(model=model, dtype="float32"), memory=MemoryConfig(packed_bytes=packed_bytes))


def loaded(model: Path, packed_bytes: int = GIB) -> build_model.Loaded:
    cores = types.SimpleNamespace(team=None, threads=1)
    return build_model.load(parts(str(model), packed_bytes), "cpu", cores, None, None)  # type: ignore[arg-type]


@needs_kernels
def test_a_node_keeps_its_weights_in_a_file_unless_told_not_to(tmp_path: Path, cache: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    assert loaded(model, 0).packed is None and not cache.exists()
    found = loaded(model).packed
    (file,) = cache.glob("*.packed")
    assert found is not None and found.mapped_bytes == file.stat().st_size


@needs_kernels
def test_a_rank_with_the_whole_model_maps_it_too(tmp_path: Path, cache: Path) -> None:
    model = str(write_tiny_llama(tmp_path / "model"))
    start = Start(
        rank=1,
        size=2,
        is_dp=True,
        device="cpu",
        store="",
        model=model,
        dtype="float32",
        kv_dtype="auto",
        weight_dtype="auto",
        library="auto",
        max_context=0,
        packed_bytes=GIB,
        adapters={},
        load_s=1.0,
        silence_s=1.0,
    )
    follower.load(start, None, 1)  # type: ignore[arg-type]
    assert len(list(cache.glob("*.packed"))) == 1


@needs_kernels
def test_mapped_weights_are_not_taken_for_free_memory(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    one = loaded(write_tiny_llama(tmp_path / "model"))
    assert one.packed is not None
    one.packed.mapped_bytes = 3 * GIB
    monkeypatch.setattr(build_memory, "host_memory", lambda: (8 * GIB, 8 * GIB))
    plan = build_memory.plan_memory
    monkeypatch.setattr(build_memory, "plan_memory", lambda *args: (given.append(args[5]), plan(*args))[1])
    log = Logger("x", io.StringIO())
    small = replace(parts("x"), memory=MemoryConfig(kv_bytes=1 << 20, max_running=1))
    for wanted in (one, replace(one, packed=None)):
        build_memory.measured_plan(small, wanted, "cpu", 1, None, lambda: None, log, list)  # type: ignore[arg-type, return-value]
    assert given == [5 * GIB, 8 * GIB]


def test_the_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert packed_folder() == Path("/var/cache/baton/packed")
    monkeypatch.setenv("HOME", "/home/somebody")
    for given in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert packed_folder() == Path("/home/somebody/.cache/baton/packed")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("shared.model.formats.packed_folder.packed_folder", homeless)
    assert packed_of(GIB) is None and "no home folder" in caplog.text
