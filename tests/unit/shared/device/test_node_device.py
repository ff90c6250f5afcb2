"""Where a node's forwards run: `--device auto` asks the machine and the model, and by name it is that or an error."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from shared.config.processes import NodeParts
from shared.config.settings.settings import ModelConfig, ParallelConfig, SchedConfig
from shared.core.errors import ConfigError
from shared.model.loading.load import load_model, why_on_cpu
from shared.node.assembly.build_model import devices
from shared.observe.log import Logger
from tests.support.gpus.cuda_core import folder_of
from tests.support.models import tiny_t5


class Machine:
    """What `devices` asks of a GPU's runtime."""

    def __init__(self, num_gpus: int) -> None:
        self._num_gpus = num_gpus

    def is_available(self) -> bool:
        return self._num_gpus > 0

    def device_count(self) -> int:
        return self._num_gpus


def ask(
    model: str, device: str, *, has_gpu: bool = True, num_gpus: int = 1, library: str = "auto", **parallel: int
) -> tuple[str, str, str]:
    """Device, streams, and what was logged."""
    said, ranks = io.StringIO(), ParallelConfig(**parallel)
    own = ModelConfig(model=model, model_library=library)
    parts = NodeParts(model=own, sched=SchedConfig(device=device), parallel=ranks)
    found = devices(parts, Machine(num_gpus * has_gpu), Logger("d0", said))  # type: ignore[arg-type]
    return *found, said.getvalue()


@pytest.fixture
def llama() -> str:
    return str(folder_of("draft target"))


@pytest.fixture
def t5(tmp_path: Path) -> str:
    tiny_t5.write_tiny_t5(tmp_path)
    return str(tmp_path)


def test_auto_takes_the_gpu_for_a_model_that_can_use_it(llama: str) -> None:
    assert ask(llama, "auto") == ("cuda", "cuda", "")
    assert why_on_cpu(llama) == ""
    assert ask(llama, "auto", has_gpu=False) == ("cpu", "cpu", "")
    assert ask(llama, "cpu") == ("cpu", "cpu", "") and ask(llama, "inline") == ("cpu", "inline", "")
    assert ask(llama, "cuda") == ("cuda", "cuda", "")


@pytest.mark.parametrize("model", ["hashlm", "scripted"])
def test_auto_leaves_models_of_code_on_the_cpu_and_says_why(model: str) -> None:
    device, streams, said = ask(model, "auto")
    assert (device, streams) == ("cpu", "cpu")
    assert "the GPU is not used" in said and "computes in the host's memory" in said


def test_auto_leaves_models_with_an_encoder_on_the_cpu(t5: str) -> None:
    device, streams, said = ask(t5, "auto")
    assert (device, streams) == ("cpu", "cpu")
    assert "run on the CPU only" in said


def test_by_name_such_a_model_is_refused_with_the_way_out(t5: str) -> None:
    for model in ("hashlm", "scripted", t5):
        with pytest.raises(ConfigError, match="--device cuda.*use --device cpu"):
            load_model(model, device="cuda")


def test_a_gpu_that_is_not_there_is_refused_with_the_reasons(llama: str) -> None:
    with pytest.raises(
        ConfigError, match="--device cuda: torch sees no GPU.*CUDA_VISIBLE_DEVICES.*use --device cpu or auto"
    ):
        ask(llama, "cuda", has_gpu=False)


@pytest.mark.parametrize("flag", ["dp", "pp"])
def test_ranks_and_stages_take_no_cpu_beside_a_gpu_unasked(llama: str, flag: str) -> None:
    """They share pages as host memory."""
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=f"--{flag} 2 --device {device}: .* beside an idle GPU.*--device cpu"):
            ask(llama, device, **{flag: 2})
    assert ask(llama, "cpu", **{flag: 2}) == ask(llama, "auto", has_gpu=False, **{flag: 2}) == ("cpu", "cpu", "")
    assert ask("hashlm", "auto", **{flag: 2})[0] == "cpu", "one rank could not use the GPU either"


def test_ranks_with_a_gpu_each_need_a_model_of_the_library(llama: str) -> None:
    with pytest.raises(ConfigError, match="--tp 2 --device auto: only models that the library.*or say --device cpu"):
        ask(llama, "auto", tp=2)
    assert ask(llama, "cpu", tp=2) == ask(llama, "auto", has_gpu=False, tp=2) == ("cpu", "cpu", "")
    assert ask("hashlm", "auto", tp=2)[0] == "cpu", "one rank could not use the GPU either"
    with pytest.raises(ConfigError, match="--tp 2 --device cuda: each rank needs a GPU.*sees only 1"):
        ask(llama, "cuda", tp=2, library="transformers")
    assert ask(llama, "cuda", tp=2, library="transformers", num_gpus=2)[:2] == ("cuda", "cuda")
