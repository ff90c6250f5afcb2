"""The Model whose layers are the library's.

input ids (1, T) -> the library's network -> logits of the wanted tokens
                      each layer calls PagedAttention, which reads and writes pages
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shared.config.settings.frozen import LIBRARY_RANKS
from shared.core.errors import ConfigError
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.library.attend.attention import PagedAttention
from shared.model.library.attend.latents import OWN
from shared.model.library.captures import HiddenStates
from shared.model.library.long_factors import LongFactors
from shared.model.llama.llama import check_layers
from shared.model.math.interface import ModelInputs, ModelOutput, ModelSpec


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """What a draft head's folder is compared with."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedFrom:
    """`limit`: the number of positions that the network knows, at least the context."""

    folder: Path
    options: LoadOptions
    limit: int
    factors: LongFactors


class LibraryModel:
    """Runs one forward at a time."""

    def __init__(
        self,
        network: PreTrainedModel,
        spec: ModelSpec,
        attention: PagedAttention,
        modules: Sequence[torch.nn.Module],
        source: LoadedFrom,
    ) -> None:
        """`modules`: the layers' attentions, in the order of their calls."""
        self.spec = spec
        self.source = source
        self.layers = attention.layers
        self.report = ""  # what the check found
        self.network = network
        self._attention = attention
        width = network.config.get_text_config().hidden_size
        attentions = tuple(dict.fromkeys(modules))
        self.config = HeadTarget(spec.name, spec.vocab_size, width, len(attentions), spec.max_context, spec.eos_ids)
        self._hidden_states = HiddenStates(network, attentions, width)
        self.attach()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.network.device
        return device

    @property
    def gathers(self) -> bool:
        """Return whether a step reads as many keys of every row as the longest may have."""
        return self._attention.gathers

    def attach(self) -> None:
        """Make the network's layers call our attention, as from the start."""
        use_attention(self.network, self._attention)

    @property
    def embed(self) -> torch.Tensor:
        """(vocab, H). Raise ConfigError if the embedding has another width than the layers, or is divided."""
        LIBRARY_RANKS.refuse({"--spec": self._attention.is_divided}, given="--tp with", of=self.spec.name)
        embedding: Any = self.network.get_input_embeddings()
        weight: torch.Tensor = embedding.weight.detach()
        if weight.shape[1] != self.config.hidden_size:
            raise ConfigError(
                f"{self.spec.name}: its embedding has {weight.shape[1]} features and its layers "
                f"{self.config.hidden_size}, which no draft head can read"
            )
        return weight

    def capture_aux(self, layers: tuple[int, ...]) -> None:
        LIBRARY_RANKS.refuse({"--spec": self._attention.is_divided}, given="--tp with", of=self.spec.name)
        check_layers(layers, self.config.num_layers)
        self._hidden_states.watch(layers)

    def capture_final(self) -> None:
        """Make later steps store the final hidden states (T, H), behind the last norm, in ModelOutput.aux."""
        LIBRARY_RANKS.refuse({"--spec": self._attention.is_divided}, given="--tp with", of=self.spec.name)
        self._hidden_states.watch_final()

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return self._attention.places.specs(page_size, self.spec.kv_dtype)

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        aux = self._hidden_states.begin_capture(len(inputs.input_ids), self.network.dtype, inputs.input_ids.device)
        if len(inputs.input_ids):
            self._attention.begin(inputs.for_attention(), kv, inputs.layers)
            # Steps in flight may run past a sequence's end, where a table of positions ends. Their tokens are dropped.
            positions = inputs.positions.clamp(max=self.source.limit - 1)
            is_long, mask = None if inputs.adapters is None else inputs.adapters > 0, self._attention.mask
            with self.source.factors.by_row(is_long):
                logits = run(self.network, inputs.input_ids[None], positions[None], inputs.logits_idx, mask=mask)[0]
        else:
            logits = torch.empty(0, self.spec.vocab_size, device=inputs.input_ids.device)
        return ModelOutput(logits, hidden=logits[:, :0], aux=aux)


def keep_positions(network: torch.nn.Module) -> None:
    """Let layers that count a text's tokens by the library's cache (Llama 4) get their positions from ours."""
    for module in network.modules():
        if getattr(module, "attn_temperature_tuning", False):
            own: Any = module
            own.forward = functools.partial(_positioned, own, own.forward)


def _positioned(attention: Any, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    name = attention.config._attn_implementation
    if name.startswith(OWN):
        named["cache"] = _Positions(ALL_ATTENTION_FUNCTIONS[name].offsets)
    return forward(*args, **named)


@dataclass(frozen=True, slots=True)
class _Positions:
    """Stands for the library's cache. `offsets`: what its layers add to a token's place in the step."""

    offsets: torch.Tensor | int

    def get_seq_length(self, layer: int) -> torch.Tensor | int:
        return self.offsets

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


def use_attention(
    network: PreTrainedModel, attention: Callable[..., Any], mask: Callable[..., torch.Tensor | None] | None = None
) -> None:
    """Make the network's layers call `attention`, and its masks come from `mask`, or be None.

    The library finds both by a name, so each attention has a name of its own."""
    name = f"{OWN}{id(attention)}"
    AttentionInterface.register(name, attention)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    network.set_attn_implementation(name)


def run(
    network: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    wanted: torch.Tensor,
    cache: Cache | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return logits (B, E, vocab) float32 of the tokens `wanted` (E,) of each row. input_ids, positions: (B, T).

    `cache`: the library's own, of earlier tokens; it gets these too. `mask`: what layers get instead of masks that the
    library makes, (B, heads, Q, num)."""
    more: dict[str, Any] = {} if cache is None else {"cache": cache}
    if mask is not None:
        more["attention_mask"] = mask
    logits: torch.Tensor = network(
        input_ids=input_ids, position_ids=positions, use_cache=cache is not None, logits_to_keep=wanted, **more
    ).logits
    if logits.shape[1] != len(wanted):  # some networks know no `logits_to_keep`
        logits = logits[:, wanted]
    return logits.float()
