"""A draft head in the public format: what is accepted, and how what does not fit is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config.models import model_path
from shared.config.models.model_path import resolve_head
from shared.core.errors import ConfigError
from shared.model.llama.eagle_file import HeadFolder, default_aux_layers
from shared.model.math.config import LlamaConfig, RopeConfig
from tests.support.models.draft_head import (
    AUX_LAYERS,
    DRAFT_VOCAB,
    LAYERS,
    TARGET,
    VOCAB,
    Tensors,
    head_config,
    head_tensors,
    save_head,
)

HIDDEN = TARGET["whole"]["hidden_size"]


def target(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_layers": LAYERS} | changes
    return LlamaConfig(
        name="tiny",
        family="llama",
        intermediate_size=64,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        rms_eps=1e-6,
        rope=RopeConfig(theta=1e4),
        max_context=256,
        tie_embeddings=True,
        eos_ids=(2,),
        **sizes,
    )


def opened(folder: Path, tensors: Tensors | None = None, **fields: Any) -> HeadFolder:
    config = {key: value for key, value in (head_config() | fields).items() if value is not None}
    return HeadFolder(save_head(folder, head_tensors() if tensors is None else tensors, config), target())


def test_what_the_format_holds(tmp_path: Path) -> None:
    head = opened(tmp_path)
    assert head.config.aux_layers == AUX_LAYERS
    assert (head.config.layer.rope.theta, head.config.layer.rms_eps) == (5000.0, 1e-5)
    assert torch.equal(head.draft_ids, head_tensors()["t2d"].nonzero()[:, 0])
    assert len(head.content_hash()) == 32


@pytest.mark.parametrize("rename", [lambda name: name.replace("midlayer.", "layers.0."), lambda name: f"model.{name}"])
def test_other_names_of_the_same_tensors(tmp_path: Path, rename: Callable[[str], str]) -> None:
    plain, renamed = opened(tmp_path / "a"), {rename(name): value for name, value in head_tensors().items()}
    other = opened(tmp_path / "b", renamed | {"embed_tokens.weight": torch.zeros(1, 1)})
    for name in ("midlayer.self_attn.q_proj.weight", "norm.weight", "fc.weight"):
        assert torch.equal(other.tensor(name), plain.tensor(name))


def test_one_vocabulary_needs_no_map(tmp_path: Path) -> None:
    tensors = head_tensors() | {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
    del tensors["d2t"], tensors["t2d"]
    assert torch.equal(opened(tmp_path, tensors, draft_vocab_size=None).draft_ids, torch.arange(VOCAB))


@pytest.mark.parametrize("name", [name for name in head_tensors() if name != "t2d"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = head_tensors()
    del tensors[name]
    with pytest.raises(ConfigError, match=f"has no tensor {name}$"):
        opened(tmp_path, tensors)


@pytest.mark.parametrize("name", head_tensors())
def test_a_wrong_shape_is_named(tmp_path: Path, name: str) -> None:
    tensors = head_tensors()
    tensors[name] = tensors[name][:-1]
    with pytest.raises(ConfigError, match=rf"tensor {name} is \({len(tensors[name])},.*\); it must be \("):
        opened(tmp_path, tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"midlayer.self_attn.q_proj.bias": torch.zeros(64)}, "no tensor midlayer.self_attn.q_proj.bias"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}, "no tensor layers.1.mlp.up_proj.weight"),
        ({"d2t": torch.zeros(DRAFT_VOCAB)}, "d2t is torch.float32"),
        ({"d2t": torch.full((DRAFT_VOCAB,), VOCAB - 1)}, rf"d2t maps to ids {VOCAB - 1}\.\.{VOCAB + DRAFT_VOCAB - 2}"),
        ({"d2t": -torch.arange(DRAFT_VOCAB)}, "two draft ids to one"),
        ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "t2d marks other ids"),
        ({"t2d": torch.arange(VOCAB) < DRAFT_VOCAB}, "t2d marks other ids"),
    ],
)
def test_tensors_that_contradict(tmp_path: Path, change: Tensors, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, head_tensors() | change)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    head = opened(tmp_path, head_tensors() | {"norm.weight": torch.ones(HIDDEN, dtype=torch.int64)})
    with pytest.raises(ConfigError, match=r"norm\.weight is torch\.int64"):
        head.tensor("norm.weight")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 96}, "hidden_size 96 does not fit tiny, which has 128"),
        ({"vocab_size": 98}, "vocab_size 98 does not fit tiny, which has 97"),
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' is not a supported head"),
        ({"intermediate_size": None}, "missing or wrong field 'intermediate_size'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 512}, "sliding_window"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' is not supported"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 7, 8]}}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, **fields)


def test_layers_of_the_target(tmp_path: Path) -> None:
    """The field in the file counts outputs; ours is what comes before a layer."""
    asked = {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}
    assert opened(tmp_path, eagle_config=asked).config.aux_layers == (1, 3, 7)
    assert [default_aux_layers(n) for n in (3, 6, 7, 30, 32)] == [
        (0, 1, 2),
        (0, 3, 5),
        (2, 3, 4),
        (2, 15, 27),
        (2, 16, 29),
    ]
    with pytest.raises(ConfigError, match="reads 3 layers of its target, which has 2"):
        default_aux_layers(2)


def test_names_of_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_path, "SHIPPED_HEADS", tmp_path)
    with pytest.raises(ConfigError, match="no draft head is shipped for model 'qwen', only for no model"):
        resolve_head("auto", "qwen")
    folder = save_head(tmp_path / "smollm2", {}, {})
    assert resolve_head("auto", "smollm2") == folder == resolve_head(str(folder), "qwen")
    with pytest.raises(ConfigError, match="for model 'qwen', only for smollm2"):
        resolve_head("auto", "qwen")
    with pytest.raises(ConfigError, match="draft head .*nothing: the folder has no config.json"):
        resolve_head(str(tmp_path / "nothing"), "qwen")
