"""Read tensors of a Hugging Face folder (config.json and *.safetensors) under our own names."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.config.models.model_folder import read_folder
from shared.core.errors import ConfigError
from shared.kernel.product.block_weights import BlockWeights, codes_format, has_codes
from shared.model.formats.gguf_file import AMX_INPUTS
from shared.model.formats.hf_config import config_from_hf
from shared.model.formats.quantized_folder import QuantizedFiles, open_tensors
from shared.model.formats.tensor_files import UNREAD
from shared.model.formats.tensor_shapes import check_tensors, tensor_shapes
from shared.model.math.config import LlamaConfig

LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
}
# Gemma 3 also normalizes each half's output, and renames the norm before the second half.
GEMMA_NAMES = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
# tables of positions in older files, and scales of inputs, keys and values
NOT_WEIGHTS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", *UNREAD)
MODEL_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "rope_factors": "rope_factors",
}


class SafetensorsFolder:
    """A TensorSource over one folder. Raises ConfigError for an unknown tensor."""

    def __init__(self, folder: Path) -> None:
        self.config: LlamaConfig = config_from_hf(read_folder(folder))
        self._files = open_tensors(folder)
        self.quantised = self._files if isinstance(self._files, QuantizedFiles) else None
        self._check_tensors()

    def has(self, name: str) -> bool:
        return hf_name(name, self.config.family) in self._files.names()

    def tensor(self, name: str) -> torch.Tensor:
        return self._files.tensor(hf_name(name, self.config.family))

    def blocks(self, name: str) -> BlockWeights | None:
        return self._files.blocks(hf_name(name, self.config.family))

    @property
    def has_blocks(self) -> bool:
        return self.quantised is not None and self.quantised.block_format is not None

    @property
    def has_codes(self) -> bool:
        """Return whether AMX can multiply codes for the blocks."""
        form = None if self.quantised is None else self.quantised.block_format
        return has_codes(form) and self.config.hidden_size % AMX_INPUTS == 0

    def bytes_per_weight(self, plain_bytes: int, in_codes: bool = False) -> float:
        """Return the matrices' mean bytes per weight in blocks or codes."""
        if self.quantised is None or self.quantised.block_format is None:
            return plain_bytes
        own = self.quantised.block_format
        form = codes_format(self.config.hidden_size, has_codes(own)) if in_codes else own
        return plain_bytes if form is None else self.quantised.bytes_per_weight(form, plain_bytes)

    def content_hash(self) -> str:
        return self._files.content_hash()

    def stored(self) -> tuple[str, int]:
        return self._files.described(), self._files.num_bytes

    def _check_tensors(self) -> None:
        family = self.config.family
        wanted = {hf_name(name, family): shape for name, shape in tensor_shapes(self.config).items()}
        there = {name for name in self._files.names() if not name.endswith(NOT_WEIGHTS)}
        if self.config.tie_embeddings:
            self._check_tied()
            there.discard(MODEL_NAMES["head"])
        there -= {name for name in there - wanted.keys() if self._is_zero_bias(name)}
        check_tensors(self._files.path, family, wanted, {name: self._files.shape(name) for name in there})
        self._files.check_floats(there)

    def _is_zero_bias(self, name: str) -> bool:
        """Some GPTQ programs write a bias for each matrix. If it is 0, answers don't depend on it."""
        return name.endswith("_proj.bias") and not self._files.tensor(name).any()

    def _check_tied(self) -> None:
        if MODEL_NAMES["head"] not in self._files.names():
            return
        head, embed = (self._files.tensor(MODEL_NAMES[name]) for name in ("head", "embed"))
        if not torch.equal(head, embed):
            raise ConfigError(f"{self._files.path}: tie_word_embeddings, but lm_head.weight is not the embedding")


def hf_name(name: str, family: str = "llama") -> str:
    """Return a tensor's name in the folder.

    embed                 model.embed_tokens.weight
    layers.3.q            model.layers.3.self_attn.q_proj.weight
    layers.3.experts.5.up model.layers.3.mlp.experts.5.up_proj.weight
    """
    if not name.startswith("layers."):
        return MODEL_NAMES[name]
    _, layer, *rest = name.split(".")
    if rest[0] == "experts":
        return f"model.layers.{layer}.mlp.experts.{rest[1]}.{rest[2]}_proj.weight"
    names = LAYER_NAMES | GEMMA_NAMES if family == "gemma3" else LAYER_NAMES
    return f"model.layers.{layer}.{names[rest[0]]}"
