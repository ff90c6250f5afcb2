"""What `baton up` asks before it starts anything: would nodes refuse this folder, by its config.json and headers?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from deploy.cluster import model_check
from deploy.cluster.facts import find_facts
from shared.config.processes import ClusterConfig, NodeParts
from shared.config.settings.settings import ModelConfig
from shared.core.errors import ConfigError
from shared.core.short_process import NoEnd
from shared.node.assembly.model_check import refused
from shared.observe.log import open_log
from tests.support.models.library_families import write_config
from tests.support.models.tiny_families import SIZES
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.models.tiny_models import save_random


def test_a_kind_that_the_library_can_t_serve(tmp_path: Path) -> None:
    write_config("bloom", tmp_path)
    assert refused(["--model", str(tmp_path)]).startswith(
        f"{tmp_path}: the layers of bloom attend in a way of their own"
    )


def test_a_folder_of_ours_with_a_strange_tensor(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path) / "model.safetensors"
    assert refused(["--model", str(tmp_path)]) == ""
    save_file(load_file(path) | {"model.layers.0.twist": torch.ones(2)}, path)
    assert "qwen2 has no tensor model.layers.0.twist" in refused(["--model", str(tmp_path)])
    path.write_bytes(b"cut")
    assert refused(["--model", str(tmp_path)]).startswith(f"can't read {path}")


def test_flags_that_only_our_programs_take(tmp_path: Path) -> None:
    folder = tmp_path / "granite-code"
    save_random(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, mlp_bias=True)), folder)
    given = ["--model", str(folder)]
    assert refused(given) == ""
    both = "models that the library transformers runs (granite-code: mlp_bias is not supported)"
    for flag, value in (("--weight-dtype", "int8"), ("--pp", "2"), ("--lora", "own=/nowhere")):
        assert f"{flag}" in refused([*given, flag, value]) and both in refused([*given, flag, value])
    assert refused([*given, "--kv-dtype", "int8", "--tp", "2"]).startswith("--tp with --kv-dtype: models that ranks")
    assert "mlp_bias is not supported; --model-library transformers may run it" in refused(
        [*given, "--model-library", "baton"]
    )


def test_what_the_process_says_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = NodeParts(model=ModelConfig(model=str(write_tiny_llama(tmp_path)), weight_dtype="int8"))
    asked: list[str] = []
    answers = [
        "warning: a line\n" + json.dumps({"refused": "no"}) + "\n",
        json.dumps({"refused": ""}),
        "",
        "no JSON",
        "{}",
    ]

    def run_short(command: list[str], timeout_s: float) -> object:
        asked.append(" ".join(command))
        return SimpleNamespace(stdout=answers[len(asked) - 1])

    monkeypatch.setattr(model_check, "run_short", run_short)
    with pytest.raises(ConfigError, match="^no$"):
        model_check.check_folder(parts)
    assert re.search(rf"{model_check.CHECK} \d+ .*--model[ =]{tmp_path} .*--weight-dtype[ =]int8", asked[0])
    for _ in answers[1:]:
        model_check.check_folder(parts)
    model_check.check_folder(NodeParts(model=ModelConfig(model="hashlm")))
    assert len(asked) == len(answers), "a model without a folder is not asked about"


def test_nothing_is_started_for_a_refused_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(stdout=json.dumps({"refused": "no"}))
    monkeypatch.setattr(model_check, "run_short", lambda command, timeout_s: answer)
    config = ClusterConfig(nodes=NodeParts(model=ModelConfig(model=str(write_tiny_llama(tmp_path)))))
    with pytest.raises(ConfigError, match="^no$"):
        find_facts(config, open_log("up", config.nodes.log))


def test_a_process_without_an_end_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_short(command: list[str], timeout_s: float) -> object:
        raise NoEnd(command, timeout_s, is_held=False)

    monkeypatch.setattr(model_check, "run_short", run_short)
    model_check.check_folder(NodeParts(model=ModelConfig(model=str(write_tiny_llama(tmp_path)))))


def test_an_adapter_s_folder_says_how_to_use_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    (tmp_path / "adapter_model.safetensors").touch()
    said = rf"{re.escape(str(tmp_path))}: the folder is an adapter of org/base; .*--model org/base --lora NAME="
    with pytest.raises(ConfigError, match=said):
        model_check.check_folder(NodeParts(model=ModelConfig(model=str(tmp_path))))
