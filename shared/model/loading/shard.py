"""Run a Llama-family model on a node's ranks, each with a share of every product and of the heads.

    normed (T, H)  -> q k v of own heads -> attend: own heads of the pages  -> own columns of (T, heads * D)
    collect        -> out: own columns of (T, H)                            -> collect -> residual
    normed (T, H)  -> gate, up: own columns, silu *                         -> own columns of (T, I)
    collect        -> down: own columns of (T, H)                           -> collect -> residual
    normed (E, H)  -> head: own columns of (E, vocab)                       -> collect -> logits

Products are cut by outputs, so ranks collect columns and add nothing. Our compiled products sum in one order for any
number of columns, so bits don't depend on the number of ranks. Megatron-LM (Shoeybi et al. 2019) cuts `out` and `down`
by inputs. That halves the collectives, but bits then depend on the number of ranks.

A page has all KV heads, and each rank works on its slice of them. So nodes with different numbers of ranks can hand
pages over. With more ranks than KV heads, neighbouring ranks write the same KV to a shared head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from shared.config.settings.frozen import ENCODER
from shared.core.errors import ConfigError
from shared.device.group import RankGroup
from shared.kernel.attention.attention import AttentionBackend, AttentionInputs
from shared.kernel.product.block_weights import BlockWeights
from shared.kernel.product.linear import Head, Weight
from shared.model.formats.lora_file import LoraPair
from shared.model.formats.opened import EncoderFolder, LibraryFolder, LoadOptions, OpenedModel, open_named
from shared.model.llama.llama import LlamaModel
from shared.model.llama.lora import load_adapter
from shared.model.loading.load import NOT_DIVIDED, refuse_attention, warm_up
from shared.model.math.config import LlamaConfig
from shared.model.math.interface import Model
from shared.model.math.weights import TensorSource, load_weights

NORMS = {"norm", "attn_norm", "mlp_norm", "q_norm", "k_norm", "attn_post_norm", "mlp_post_norm"}
WHOLE = frozenset({"embed", "head", "rope_factors", "router"} | NORMS)
CUT_BY = {
    "q": "num_heads", "q_bias": "num_heads",
    "k": "num_kv_heads", "k_bias": "num_kv_heads", "v": "num_kv_heads", "v_bias": "num_kv_heads",
    "o": "hidden_size", "o_bias": "hidden_size", "down": "hidden_size",
    "gate": "intermediate_size", "up": "intermediate_size",
}  # fmt: skip


def load_shard(name: str, options: LoadOptions, group: RankGroup, device: str = "cpu") -> Model:
    """Load this rank's part of load_model(name, options). All ranks call it together.

    Each rank's forward takes all inputs and returns all outputs. Raises ConfigError if ranks can't share the model.
    """
    opened = open_named(name, options)
    if isinstance(opened, EncoderFolder):
        raise ENCODER.refusal(["--tp"], of=name)
    if device != "cpu" and not isinstance(opened, LibraryFolder):
        raise ConfigError(f"--tp {group.size} --device {device}: {NOT_DIVIDED}")
    model: Model
    if isinstance(opened, LibraryFolder):
        from shared.model.library.loading import load_library_model  # imports the library

        refuse_attention(opened, options)
        model = load_library_model(opened.path, options, group, device)
    elif opened is None:
        from shared.model.hashlm.shard import HashLMShard  # imports numba, which a node on GPUs does without

        model = HashLMShard(group, options.max_context, options.path_adapters())
    else:
        model = build_shard(opened, group)
    if device == "cpu":
        warm_up(model)
    return model


def build_shard(opened: OpenedModel, group: RankGroup) -> LlamaModel:
    source = ShardSource(opened.source, group.rank, group.size)
    opened.check_memory(source.config)
    device, dtype = torch.device("cpu"), opened.dtype
    picked = opened.pick_kernels(source.config, device)

    def make_head(weight: Weight) -> Head:
        num_rows = len(weight) if isinstance(weight, torch.Tensor) else weight.shape[0]
        own = share(torch.arange(num_rows), group.rank, group.size)
        return OwnColumns(
            picked.make_head(weight[own] if isinstance(weight, torch.Tensor) else weight.take_rows(own)), group
        )

    form = opened.options.formats.weights
    weights = load_weights(source, dtype, device, opened.num_positions, picked.make_weight, make_head, form)
    deltas = [
        load_adapter(source.own_pairs(folder.pairs), source.config, dtype, device, picked.make_linear)
        for folder in opened.folders.values()
    ]
    attention = OwnHeads(
        picked.make_attention(weights.rope, weights.local_rope), source.first_kv_head, source.config.num_kv_heads
    )
    whole = opened.source.config
    return LlamaModel(whole, opened.spec(), weights, attention, picked.blocks, deltas, group.side_by_side)


class OwnColumns:
    """A Head: x (M, in) -> all ranks' logits (M, vocab)."""

    def __init__(self, head: Head, group: RankGroup) -> None:
        self._head, self._group = head, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.side_by_side(self._head(x))


class OwnHeads:
    """An AttentionBackend on this rank's KV heads."""

    def __init__(self, attention: AttentionBackend, first: int, count: int) -> None:
        self._attention = attention
        self._heads = slice(first, first + count)
        self.gathers = attention.gathers

    def begin(self, inputs: AttentionInputs, kv: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        own = None if scales is None else scales[:, :, :, self._heads]
        self._attention.begin(inputs, kv[:, :, :, self._heads], own)

    def attend(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        return self._attention.attend(layer, qkv, q_norm, k_norm)


class ShardSource:
    """A TensorSource of one rank's part.

    `config` has this rank's numbers of heads and inner columns, but the whole sizes of residual and vocabulary.
    """

    def __init__(self, source: TensorSource, rank: int, size: int) -> None:
        check_shares(source.config, size)
        self._source, self._rank, self._size = source, rank, size
        self._num_kv_heads = source.config.num_kv_heads
        experts = source.config.experts
        own_kv_heads = max(1, self._num_kv_heads // size)
        self.first_kv_head = rank * self._num_kv_heads // size
        self.config = replace(
            source.config,
            num_heads=source.config.num_heads // size,
            num_kv_heads=own_kv_heads,
            intermediate_size=source.config.intermediate_size // size,
            experts=experts and replace(experts, intermediate_size=experts.intermediate_size // size),
        )

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def tensor(self, name: str) -> torch.Tensor:
        kind = name.rsplit(".", 1)[-1]
        tensor = self._source.tensor(name)
        if kind in WHOLE:
            return tensor
        if kind not in CUT_BY:
            raise ConfigError(f"--tp {self._size}: it is not known how ranks share {name}")
        return self._own_rows(kind, tensor)

    def blocks(self, name: str) -> BlockWeights | None:
        kind, blocks = name.rsplit(".", 1)[-1], self._source.blocks(name)
        if blocks is None or kind in WHOLE:
            return blocks
        return blocks.take_rows(self._own_rows(kind, torch.arange(blocks.shape[0])))

    def own_pairs(self, pairs: Sequence[LoraPair]) -> list[LoraPair]:
        """Cut an adapter: A stays whole, B keeps this rank's rows."""
        return [replace(pair, up=self._own_rows(pair.target, pair.up)) for pair in pairs]

    def _own_rows(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        if CUT_BY[kind] == "num_kv_heads":
            first = self.first_kv_head * self.config.head_dim
            return tensor[first : first + self.config.kv_size].contiguous()
        return share(tensor, self._rank, self._size)

    def stored(self) -> tuple[str, int]:
        return self._source.stored()

    def content_hash(self) -> str:
        """Return the whole model's hash, which must not depend on the number of ranks."""
        return self._source.content_hash()


def share(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return one of `size` equal groups of rows, copied so that the rest can be freed."""
    return tensor.chunk(size)[rank].clone()


def check_shares(config: LlamaConfig, size: int) -> None:
    """Raise ConfigError for a number that `size` ranks can't share evenly."""
    experts = config.experts
    if experts is not None and (experts.count % size or experts.intermediate_size % size):
        sizes = f"{experts.count} experts of {experts.intermediate_size}"
        raise ConfigError(f"--tp {size}: {config.name} has {sizes}, and --tp must divide both numbers")
    for name in ("num_heads", "hidden_size", "intermediate_size", "vocab_size"):
        if getattr(config, name) % size:
            raise ConfigError(
                f"--tp {size}: {config.name} has {name} {getattr(config, name)}, which {size} does not divide"
            )
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise ConfigError(f"--tp {size}: {config.name} has {config.num_kv_heads} KV heads; neither divides the other")
