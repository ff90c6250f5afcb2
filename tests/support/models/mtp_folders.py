"""Tiny folders with MTP layers under the names that families publish, and what the library's own code says of them.

A target's layers change its residual stream only a little, so its next token depends mostly on the last one. Its MTP
layers pass the embedding on, so they agree with the target about a known share of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from shared.model.library.model import LibraryModel
from tests.support.models.library_families import load, network_of

THIN = {"hidden_size": 32, "intermediate_size": 32}
# The library's patterns for names hold the published number of layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": THIN | {"num_hidden_layers": 61, "first_k_dense_replace": 60},
    "exaone_moe": THIN,
    "glm4_moe": THIN | {"num_hidden_layers": 46, "first_k_dense_replace": 45},
    "glm4_moe_lite": THIN | {"num_hidden_layers": 47, "mlp_layer_types": ["dense"] * 46 + ["sparse"]},
    "mellum": THIN | {"num_nextn_predict_layers": 1},
    "step3p7": THIN
    | {
        "num_nextn_predict_layers": 3,
        "layer_types": ["full_attention", "sliding_attention"] * 2 + ["sliding_attention"] * 3,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "dense", "dense", "dense"],
    },
}
NUM_LAYERS = {family: fields.get("num_nextn_predict_layers", 1) for family, fields in FAMILIES.items()}  # of MTP
LITTLE = 0.1  # how much a layer changes the residual stream
# Families whose MTP layers the library can't run, and a tensor of theirs.
REFUSED = {
    "deepseek_v32": "model.layers.61.enorm.weight",
    "ernie4_5_moe": "model.mtp_linear_proj.0.weight",
    "glm_moe_dsa": "model.layers.78.enorm.weight",
    "hy_v4": "model.mtp_layers.0.enorm.weight",
    "longcat_flash": "model.mtp.layers.0.enorm.m.weight",
    "mimo_v2_flash": "model.mtp.layers.0.pre_mlp_layernorm.weight",
}
ONE_UP = ("exaone_moe", "mellum")  # their MTP layer's own tensors are beside its decoder layer's, under other names
LAST_NORM = {"step3p7": "transformer.shared_head.norm."}
# Published fields that the library's config doesn't know.
TOLD = {name: {"num_nextn_predict_layers": 1} for name in ("exaone_moe", "glm4_moe_lite")}


@dataclass(frozen=True)
class MtpFolder:
    folder: Path
    network: transformers.PreTrainedModel  # the library's
    mtp: MtpModel

    def load(self) -> LibraryModel:
        model = load(self.folder)
        assert isinstance(model, LibraryModel)
        return model

    def from_folder(self, monkeypatch: pytest.MonkeyPatch) -> transformers.PreTrainedModel:
        """Return the network as the library itself loads it, for `generate(use_mtp=True)`.

        The library doesn't know all names that Step 3.7 has for its MTP layers, so it gets `mtp` as it was saved."""
        if self.network.config.model_type == "step3p7":
            monkeypatch.setattr(MtpModel, "from_pretrained", lambda *_, **__: self.mtp)
            return self.network
        config = transformers.AutoConfig.from_pretrained(self.folder)
        prepare(config, 1)
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder, config=config, dtype=torch.float32)


def save_with_mtp(family: str, folder: Path, little: float = LITTLE, **changes: Any) -> MtpFolder:
    """Write a folder as the family publishes it, but for `changes` of its config."""
    fields = FAMILIES[family] | changes
    network, num_layers = network_of(family, **fields), fields.get("num_nextn_predict_layers", 1)
    calm(network, little)
    network.save_pretrained(folder)
    prepare(network.config, num_layers)
    torch.manual_seed(1)
    mtp = MtpModel(network, num_layers).eval()
    calm(mtp.layers, little)
    with torch.no_grad():
        for layer in mtp.layers:
            width = mtp.config.hidden_size
            layer.eh_proj.weight.normal_(0, 0.02)
            layer.eh_proj.weight[:, :width] += torch.eye(width)
            for norm in (layer.enorm, layer.hnorm, layer.post_norm):
                norm.weight.uniform_(0.9, 1.1)
    write_mtp(family, folder, network, mtp)
    return MtpFolder(folder, network, mtp)


def prepare(whole: transformers.PreTrainedConfig, num_layers: int) -> None:
    """Set the fields that MtpModel reads."""
    config: Any = whole.get_text_config()
    config.num_mtp_layers = num_layers
    if config.model_type == "exaone_moe":
        config.mtp_layer_types, config.mtp_mlp_layer_types = ["full_attention"], ["dense"]
    if getattr(config, "mlp_layer_types", None) and not getattr(config, "mtp_mlp_layer_types", None):
        config.mtp_mlp_layer_types = ["sparse"] * num_layers


def calm(network: torch.nn.Module, little: float) -> None:
    with torch.no_grad():
        for name, value in network.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                value.normal_(0, little * 0.15)
            elif "lm_head" in name or "embed_tokens" in name:
                value.normal_(0, 1.0)
            elif value.dim() > 1:
                value.normal_(0, 0.15)


def write_mtp(family: str, folder: Path, network: transformers.PreTrainedModel, mtp: MtpModel) -> None:
    tensors = {}
    first = network.config.get_text_config().num_hidden_layers
    for name, value in mtp.state_dict().items():
        for published, tensor in published_tensors(family, first, name, value.detach()):
            tensors[published] = tensor.clone().contiguous()
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | TOLD.get(family, {})))


def published_tensors(family: str, first: int, name: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the names and parts of one of MtpModel's tensors, as they are published. `first`: MTP layer's number."""
    if not name.startswith("layers."):  # embedding and output rows; DeepSeek-V3's folder repeats them
        own = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.weight": "shared_head.head.weight"}[name]
        return [] if family in (*ONE_UP, "step3p7") else [(f"model.layers.{first}.{own}", value)]
    _, number, own = name.split(".", 2)
    if family in ONE_UP:
        tops = {
            "enorm.weight": "pre_fc_norm_embedding.weight",
            "hnorm.weight": "pre_fc_norm_hidden.weight",
            "eh_proj.weight": "fc.weight",
            "post_norm.weight": "norm.weight",
        }
        prefix = "mtp." if own in tops else f"mtp.layers.{number}."
        own = tops.get(own, own)
    else:
        prefix, own = (
            f"model.layers.{first + int(number)}.",
            own.replace("post_norm.", LAST_NORM.get(family, "shared_head.norm.")),
        )
    own = own.removeprefix("mtp_block.")
    if ".experts." not in own:
        return [(prefix + own, value)]
    stem, _, kind = own.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    found = []
    for expert, both in enumerate(value):
        for part, tensor in zip(parts, both.chunk(len(parts)), strict=True):
            found.append((f"{prefix}{stem}.{expert}.{part}.weight", tensor))
    return found


def candidates(folder: MtpFolder, ids: Sequence[int], num_drafts: int) -> list[int]:
    """Return greedy drafts after `ids`, of which the target has read all but the last: the library's MtpModel, whole.

    A model with one MTP layer applies it again."""
    tokens, num_read = torch.tensor([ids[1:]]), len(ids) - 1
    with torch.inference_mode():
        target = folder.network.get_decoder()(torch.tensor([ids[:-1]])).last_hidden_state
        features = target
        for _ in range(num_drafts):
            positions = torch.arange(1, 1 + tokens.shape[1])[None]
            hidden = folder.mtp.forward_layer(0, features, positions, None, input_ids=tokens)
            draft = folder.mtp._project_to_logits(hidden[:, -1:]).argmax(dim=-1)
            tokens = torch.cat([tokens, draft], dim=1)
            features = torch.cat([target, hidden[:, num_read - 1 :]], dim=1)
    drafts: list[int] = tokens[0, num_read:].tolist()
    return drafts
