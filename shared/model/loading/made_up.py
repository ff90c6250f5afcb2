"""Make a network without files, to try a device."""

from __future__ import annotations

import torch

from shared.model.formats.opened import DTYPES, LoadOptions, OpenedModel
from shared.model.llama.lora import LlamaLike
from shared.model.loading.load import build_spans
from shared.model.math.config import LlamaConfig

SCALE = 0.02  # standard deviation of weights, as in untrained networks


class MadeUpWeights:
    """A TensorSource. Norms are 1; other weights are drawn on `device` in `dtype`.

    Equal seed, device and order of reading give equal weights.
    """

    def __init__(self, config: LlamaConfig, device: torch.device, dtype: torch.dtype, seed: int | None) -> None:
        """Without a `seed`, draw from torch's own generator of the device."""
        self.config = config
        self._device, self._dtype = device, dtype
        self._draw = None if seed is None else torch.Generator(device).manual_seed(seed)
        self._shapes = shapes_of(config)

    def has(self, name: str) -> bool:
        return name.rpartition(".")[2] in self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        shape = self._shapes[name.rpartition(".")[2]]
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        return made.fill_(1.0) if len(shape) == 1 else made.normal_(0.0, SCALE, generator=self._draw)

    def blocks(self, name: str) -> None:
        """Return None: all weights are plain numbers."""

    def stored(self) -> tuple[str, int]:
        return "made up", 0

    def content_hash(self) -> str:
        return f"made up {self.config.name}"


def shapes_of(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
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
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    return shapes


def made_up(
    config: LlamaConfig, dtype: str, device: torch.device, *, seed: int | None = None, kernels: str = "torch"
) -> LlamaLike:
    """Build a model. `dtype`: a name in DTYPES. `kernels`: as in LoadOptions.

    With a seed the host draws the weights, so they are equal on any device.
    """
    drawn_on = device if seed is None else torch.device("cpu")
    source = MadeUpWeights(config, drawn_on, DTYPES[dtype], seed)
    opened = OpenedModel(source, LoadOptions(dtype, kernels=kernels), config.max_context, {})
    (model,) = build_spans(opened, device, [None])
    return model
