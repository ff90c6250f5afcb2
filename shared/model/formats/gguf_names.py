"""Say where a tensor lies in a GGUF file: in which of the file's tensors, and in which of its rows.

    embed        token_embd.weight
    layers.3.q   blk.3.attn_q.weight, or in Phi 3 the first rows of blk.3.attn_qkv.weight

Only names and shapes; gguf_file.py reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.model.formats.tensor_shapes import tensor_shapes
from shared.model.math.config import LlamaConfig

LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o_bias": "attn_output.bias",
    "o": "attn_output.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
MODEL_NAMES = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = (
    f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")
)
# In Phi 3, one tensor of the file holds several of ours, one after the other.
FUSED = {"attn_qkv.weight": ("q", "k", "v"), "ffn_up.weight": ("gate", "up")}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor of the file, or its rows from `first` up to, but without, `end`."""

    tensor: str
    first: int | None = None
    end: int | None = None


def file_name(name: str) -> str:
    """Return the file's name of a tensor that is not fused: token_embd.weight for embed."""
    if not name.startswith("layers."):
        return MODEL_NAMES[name]
    _, layer, kind = name.split(".")
    return f"blk.{layer}.{LAYER_NAMES[kind]}"


def places_of(config: LlamaConfig) -> tuple[dict[str, TensorPlace], dict[str, tuple[int, ...]]]:
    """Return where each tensor of the network lies, and the shapes of the file's tensors, rows first."""
    shapes = tensor_shapes(config)
    places = {name: TensorPlace(file_name(name)) for name in shapes}
    found = {place.tensor: shapes[name] for name, place in places.items()}
    if config.family == "phi3":
        for layer in range(config.num_layers):
            for tensor, parts in FUSED.items():
                _fuse(f"blk.{layer}.{tensor}", [f"layers.{layer}.{part}" for part in parts], places, found)
    return places, found


def _fuse(tensor: str, parts: list[str], places: dict[str, TensorPlace], shapes: dict[str, tuple[int, ...]]) -> None:
    own = [shapes.pop(places[part].tensor) for part in parts]
    end = 0
    for part, (size, _) in zip(parts, own, strict=True):
        places[part] = TensorPlace(tensor, end, end + size)
        end += size
    shapes[tensor] = (end, own[0][1])
