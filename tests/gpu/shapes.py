"""Networks of real sizes with random weights, drawn on the device when a model asks for them: no file, no download."""

from __future__ import annotations

import torch
import transformers

from shared.model.config import LlamaConfig, RopeConfig
from shared.model.interface import Model
from shared.model.load import build_spans
from shared.model.opened import LoadOptions, OpenedModel

SCALE = 0.02  # of weights, as networks begin
CONTEXT = 8192


def shape(
    name: str, family: str, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], vocab: int, tied: bool
) -> LlamaConfig:
    num_heads, num_kv_heads, head_dim = heads
    return LlamaConfig(
        name, family, vocab, hidden, inner, layers, num_heads, num_kv_heads, head_dim,
        1e-5, RopeConfig(500_000.0), CONTEXT, tied, eos_ids=(),
    )  # fmt: skip


SHAPES = {
    "0.6B": shape("0.6B", "qwen3", 1024, 3072, 28, (16, 8, 128), 151_936, tied=True),  # Qwen3-0.6B's
    "8B": shape("8B", "llama", 4096, 14_336, 32, (32, 8, 128), 128_256, tied=False),  # Llama-3.1-8B's
    "tiny": shape("tiny", "qwen3", 32, 48, 2, (4, 2, 8), 40_064, tied=True),
}


class RandomWeights:
    """A TensorSource of a shape alone."""

    def __init__(self, config: LlamaConfig, device: torch.device) -> None:
        self.config = config
        self._device = device
        self._sizes = sizes_of(config)

    def has(self, name: str) -> bool:
        return name.rpartition(".")[2] in self._sizes

    def tensor(self, name: str) -> torch.Tensor:
        """bfloat16 on the device; norms are 1."""
        size = self._sizes[name.rpartition(".")[2]]
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16, device=self._device)
        return torch.empty(size, dtype=torch.bfloat16, device=self._device).normal_(0.0, SCALE)

    def content_hash(self) -> str:
        return f"random {self.config.name}"


def sizes_of(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """By the last part of a tensor's name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, hidden),
        "head": (config.vocab_size, hidden),
        "norm": (hidden,),
        "attn_norm": (hidden,),
        "mlp_norm": (hidden,),
        "q": (config.q_size, hidden),
        "k": (config.kv_size, hidden),
        "v": (config.kv_size, hidden),
        "o": (hidden, config.q_size),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.qk_norm:
        sizes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    return sizes


def random_model(config: LlamaConfig, device: torch.device) -> Model:
    """As load_model makes it, in bfloat16 on the plain kernels."""
    options = LoadOptions("bfloat16", kernels="torch")
    opened = OpenedModel(RandomWeights(config, device), options, CONTEXT, {})
    (model,) = build_spans(opened, device, [None])
    return model


def random_network(config: LlamaConfig, device: torch.device, attention: str) -> transformers.PreTrainedModel:
    """transformers' network of the same shape, in bfloat16 on the device, with weights of its own."""
    make = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[config.family]
    given = make(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_context,
        tie_word_embeddings=config.tie_embeddings,
        attn_implementation=attention,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return transformers.AutoModelForCausalLM.from_config(given).eval()
    finally:
        torch.set_default_dtype(before)
