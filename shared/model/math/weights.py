"""Load a Llama-family network's weights, fused and laid out for one device's products."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shared.kernel.attention.rope import inverse_frequencies, rope_tables, yarn_frequencies
from shared.kernel.product.block_weights import (
    BlockWeights,
    codes_format,
    concatenate,
    has_codes,
    int8_format,
    quantize_weight,
    recode,
)
from shared.kernel.product.experts import Experts, GroupedExperts
from shared.kernel.product.linear import Head, HeadFactory, Linear, PlainLinear, Weight, WeightFactory
from shared.kernel.product.packed import Packed
from shared.model.math.config import LlamaConfig, RopeConfig
from shared.model.math.progress import with_progress

_log = logging.getLogger(__name__)


class TensorSource(Protocol):
    """A model on disk. Tensor names: embed, norm, head, rope_factors, layers.<n>.<q, k, v, o, gate, up, down, ...>,
    layers.<n>.experts.<e>.<gate, up, down>."""

    config: LlamaConfig

    def has(self, name: str) -> bool: ...
    def tensor(self, name: str) -> torch.Tensor: ...
    def blocks(self, name: str) -> BlockWeights | None: ...  # None for plain numbers
    def content_hash(self) -> str: ...
    def stored(self) -> tuple[str, int]: ...  # the number format in the files, and their size in bytes


class PackedWeights(Protocol):
    embed: torch.Tensor

    def product(self, name: str) -> Packed | None: ...  # None: make the product from the source
    def unpack(self, packed: Packed, is_head: bool) -> Linear: ...


@dataclass(frozen=True, slots=True)
class Product:
    """One product's weight: source tensors, stacked by rows."""

    name: str
    tensors: tuple[str, ...]
    biases: tuple[str, ...] = ()


HEAD = "head"
OF_FILES = ("file", "codes")  # formats that need a GGUF file's blocks
IN_FP8 = ("fp8", "fp8-dynamic")  # a byte per number of the layers' products, and the head as the dtype says
IN_BLOCKS = (*OF_FILES, "int8")  # formats that our kernels multiply on every processor
FUSED = {"qkv": ("q", "k", "v"), "out": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
ATTENTION = ("qkv", "out")  # products that may have a bias


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights; norms are float32, (H,) unless noted. A layer has either gate_up and down, or experts.

    qkv and gate_up are fused for fewer, larger calls.
    """

    attn_norm: torch.Tensor
    qkv: Linear  # H -> heads * D + 2 * kv_heads * D
    q_norm: torch.Tensor | None  # (D,)
    k_norm: torch.Tensor | None  # (D,)
    out: Linear  # heads * D -> H
    mlp_norm: torch.Tensor
    gate_up: Linear | None  # H -> 2 * I
    down: Linear | None  # I -> H
    experts: Experts | GroupedExperts | None = None
    attn_post_norm: torch.Tensor | None = None  # norm of the attention's output
    mlp_post_norm: torch.Tensor | None = None  # norm of the second half's output


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    embed: torch.Tensor  # (vocab, H) in the dtype
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # (H,) float32
    head: Head  # (M, H) in the dtype -> (M, vocab) float32
    rope: tuple[torch.Tensor, torch.Tensor]  # cos, sin (max_context, D // 2) float32
    local_rope: tuple[torch.Tensor, torch.Tensor] | None = None  # rope of layers with a window, if different


def load_weights(
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int,
    make: WeightFactory,
    make_head: HeadFactory,
    form: str = "auto",
    packed: PackedWeights | None = None,
    groups_experts: bool = False,
) -> LlamaWeights:
    """Read each tensor once, except a tied head in blocks (twice) and packed matrices (never). `form`: Formats.weights.
    `groups_experts`: of Kernels.

    Source tensors are dropped once converted.
    """
    config = source.config
    embed = source.tensor("embed").to(device, dtype) if packed is None else packed.embed

    def make_one(product: Product) -> Linear:
        kept = None if packed is None else packed.product(product.name)
        if packed is not None and kept is not None:
            return packed.unpack(kept, False)
        return make(*read_product(source, product, dtype, device, form))

    def head() -> Head:
        kept = None if packed is None else packed.product(HEAD)
        if packed is not None and kept is not None:
            return packed.unpack(kept, True)
        if config.tie_embeddings and form in ("auto", *IN_FP8):
            return make_head(embed)
        return make_head(read_product(source, head_of(config), dtype, device, form)[0])

    local = config.local_rope
    return LlamaWeights(
        embed=embed,
        layers=tuple(
            _load_layer(source, n, dtype, device, make_one, make_head, groups_experts)
            for n in with_progress(range(config.num_layers), _log, "loading weights")
        ),
        norm=source.tensor("norm").to(device, torch.float32) + config.style.norm_offset,
        head=head(),
        rope=_on(device, rope_of(source, max_context)),
        local_rope=None if local is None else _on(device, rope_tables_of(config.head_dim, local, max_context)),
    )


def products_of(config: LlamaConfig) -> Iterator[Product]:
    """Yield every product that can be packed, the head last."""
    for n in range(config.num_layers):
        names = [*FUSED] if not config.has_experts(n) else [*ATTENTION, *expert_products(config)]
        for name in names:
            yield product_of(n, name)
    yield head_of(config)


def expert_products(config: LlamaConfig) -> list[str]:
    count = 0 if config.experts is None else config.experts.count
    return [f"experts.{e}.{name}" for e in range(count) for name in ("gate_up", "down")]


def head_of(config: LlamaConfig) -> Product:
    return Product(HEAD, ("embed" if config.tie_embeddings else "head",))


def product_of(n: int, name: str) -> Product:
    """Describe layer `n`'s product `name`: a key of FUSED, or experts.<e>.<key>."""
    group, _, kind = name.rpartition(".")
    prefix = f"layers.{n}.{group}." if group else f"layers.{n}."
    tensors = tuple(prefix + part for part in FUSED[kind])
    biases = tuple(f"{tensor}_bias" for tensor in tensors) if name in ATTENTION else ()
    return Product(prefix + kind, tensors, biases)


def read_product(
    source: TensorSource, product: Product, dtype: torch.dtype, device: torch.device, form: str
) -> tuple[Weight, torch.Tensor | None]:
    weight = read_weight(source, product.tensors, dtype, device, form)
    if not product.biases or not source.has(product.biases[0]):
        return weight, None
    return weight, torch.cat([source.tensor(name).to(device, dtype) for name in product.biases])


def read_weight(
    source: TensorSource, names: Sequence[str], dtype: torch.dtype, device: torch.device, form: str
) -> Weight:
    """Return one product's weight: the tensors `names`, stacked by rows.

    `form`: Formats.weights. If rows can't be divided into whole blocks, the weight keeps the dtype's numbers.
    """
    blocks = _in_codes(source, names) if form == "codes" else [_in_blocks(source, name, form) for name in names]
    found = [part for part in blocks if part is not None]
    if len(found) == len(names):
        return concatenate(found).to(device)
    parts = [source.tensor(name).to(device, dtype) for name in names]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _in_blocks(source: TensorSource, name: str, form: str) -> BlockWeights | None:
    if form == "file":
        return source.blocks(name)
    if form != "int8":
        return None
    tensor = source.tensor(name)
    wanted = int8_format(tensor.shape[1])
    return None if wanted is None else quantize_weight(tensor, wanted)


def _in_codes(source: TensorSource, names: Sequence[str]) -> list[BlockWeights | None]:
    """Return codes if all tensors have 4-bit blocks, else bytes."""
    blocks = [part for part in map(source.blocks, names) if part is not None]
    in_codes = len(blocks) == len(names) and all(has_codes(part.format) for part in blocks)
    if in_codes:
        form = codes_format(blocks[0].shape[1], in_codes)
        return [None if form is None else recode(part, form) for part in blocks]
    tensors = [source.tensor(name) for name in names]
    form = codes_format(tensors[0].shape[1], in_codes)
    return [None if form is None else quantize_weight(tensor, form) for tensor in tensors]


def _on(device: torch.device, tables: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = tables
    return cos.to(device), sin.to(device)


def _load_layer(
    source: TensorSource,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    make: Callable[[Product], Linear],
    make_head: HeadFactory,
    groups_experts: bool,
) -> LayerWeights:
    config = source.config

    def get(name: str, as_dtype: torch.dtype = dtype) -> torch.Tensor:
        return source.tensor(f"layers.{n}.{name}").to(device, as_dtype)

    def product(name: str) -> Linear:
        return make(product_of(n, name))

    def norm(name: str) -> torch.Tensor | None:
        if not source.has(f"layers.{n}.{name}"):
            return None
        return get(name, torch.float32) + config.style.norm_offset

    dense = not config.has_experts(n)
    return LayerWeights(
        attn_norm=get("attn_norm", torch.float32) + config.style.norm_offset,
        qkv=product("qkv"),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        out=product("out"),
        mlp_norm=get("mlp_norm", torch.float32) + config.style.norm_offset,
        gate_up=product("gate_up") if dense else None,
        down=product("down") if dense else None,
        experts=None if dense else _load_experts(config, get, product, make_head, groups_experts),
        attn_post_norm=norm("attn_post_norm") if config.style.post_norms else None,
        mlp_post_norm=norm("mlp_post_norm") if config.style.post_norms else None,
    )


def _load_experts(
    config: LlamaConfig,
    get: Callable[[str], torch.Tensor],
    product: Callable[[str], Linear],
    make_head: HeadFactory,
    is_grouped: bool,
) -> Experts | GroupedExperts:
    choice = config.experts
    assert choice is not None
    router, how = make_head(get("router")), (choice.top_k, choice.normalise)

    def each(name: str) -> list[Linear]:
        return [product(f"experts.{e}.{name}") for e in range(choice.count)]

    if is_grouped:  # one after the other: stacking holds its weights twice
        return GroupedExperts(router, stacked(each("gate_up")), stacked(each("down")), *how)
    return Experts(router, each("gate_up"), each("down"), *how)


def stacked(linears: Sequence[Linear]) -> torch.Tensor:
    """Return (experts, out, in)."""
    plain = [one.weight for one in linears if isinstance(one, PlainLinear)]
    assert len(plain) == len(linears), "only plain weights are grouped"
    return torch.stack(plain)


def rope_of(source: TensorSource, max_context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, (max_context, D // 2) float32 each."""
    config = source.config
    if not source.has("rope_factors"):
        return rope_tables_of(config.head_dim, config.rope, max_context)
    # GGUF files of Llama 3 and Phi 3 store the stretch as one divisor per frequency.
    frequencies = frequencies_of(config.head_dim, config.rope) / source.tensor("rope_factors").float()
    return rope_tables(frequencies, max_context, config.rope.length)


def rope_tables_of(head_dim: int, rope: RopeConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables of `rope_of`, from the configuration only."""
    return rope_tables(frequencies_of(head_dim, rope), num_positions, rope.length)


def frequencies_of(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """Return (D // 2,) float32."""
    if rope.kind == "yarn":
        bounds = (rope.original_context, rope.beta_fast, rope.beta_slow, rope.truncate)
        return yarn_frequencies(head_dim, rope.theta, rope.factor, *bounds)
    stretch = (rope.kind, rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_context)
    return inverse_frequencies(head_dim, rope.theta, *stretch)


def weights_bytes(
    config: LlamaConfig,
    dtype: torch.dtype,
    max_context: int,
    layer_item: float | None = None,
    head_item: float = 4,
) -> int:
    """Return a bound on the bytes that load_weights keeps: parameters, a float32 head (tied or not), rotary tables.

    `layer_item` (None: the dtype's) and `head_item`: bytes per weight in layers and head.
    """
    head = config.vocab_size * config.hidden_size
    in_dtype = config.num_parameters() - (0 if config.tie_embeddings else head)
    layers = in_dtype - head
    tables = max_context * config.head_dim * 4 * (1 if config.local_rope is None else 2)
    return int(head * dtype.itemsize + layers * (layer_item or dtype.itemsize) + head * head_item) + tables
