"""Choose a model's kernels at load: our own for this processor, Triton's, or the library's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from shared.core.errors import ConfigError
from shared.device.torch_cuda import TorchCuda
from shared.kernel.attention.attention import AttentionBackend, AttentionShape, RopeTables, TorchAttention, WritesPages
from shared.kernel.attention.flash_infer import FlashInferAttention, LibraryAttention, full_name, why_unsuitable
from shared.kernel.code.quantized import DTYPES
from shared.kernel.product import scaled_product
from shared.kernel.product.block_weights import BlockWeights
from shared.kernel.product.blocks import BlockKernels, TorchBlocks
from shared.kernel.product.experts import has_grouped_product, works_grouped
from shared.kernel.product.libraries import has_triton
from shared.kernel.product.linear import (
    FloatHead,
    Head,
    HeadFactory,
    Linear,
    LinearFactory,
    PlainBlockLinear,
    QuantizedLinear,
    Weight,
    WeightFactory,
    WideHead,
    pick_linear,
)
from shared.kernel.product.packed import Packed
from shared.kernel.product.scaled_product import ScaledLinear
from shared.kernel.team.team import Team
from shared.model.math.config import LlamaConfig
from shared.model.math.weights import IN_BLOCKS


@dataclass(frozen=True, slots=True)
class Formats:
    """Number formats: "int8", "fp8", or "auto" for the model's dtype. Weights may also be "file", "codes" or
    "fp8-dynamic"."""

    kv: str = "auto"
    # format of the layers' products. The head has the same format, but is never fp8; the embedding keeps the dtype
    weights: str = "auto"


@dataclass(frozen=True, slots=True)
class Packing:
    """`pack` packs a weight; `unpack` makes a Linear of it. The bool: whether the weight is the LM head's."""

    pack: Callable[[Weight, torch.Tensor | None, bool], Packed | None]  # None if the library must multiply
    unpack: Callable[[Packed, bool], Linear]
    packs_numbers: bool  # whether this processor's kernels also multiply weights without blocks


@dataclass(frozen=True, slots=True)
class Kernels:
    make_weight: WeightFactory  # makes a layer's matrix products
    make_linear: LinearFactory  # makes an adapter's products
    make_head: HeadFactory
    # takes the rope of layers without a window, then the rope of layers with one (None: all layers use the first)
    make_attention: Callable[[RopeTables, RopeTables | None], AttentionBackend]
    blocks: BlockKernels
    team: Team | None = None  # team and packing: set only for compiled kernels
    packing: Packing | None = None
    groups_experts: bool = False  # whether torch's grouped product multiplies by experts
    attention: str = ""  # the library whose attention it is, and its version; "": Baton's own


AS_DTYPE = Formats()


def pick_kernels(
    config: LlamaConfig,
    dtype: torch.dtype,
    device: torch.device,
    team: Team,
    asked: str = "auto",
    formats: Formats = AS_DTYPE,
    attention: LibraryAttention | None = None,
) -> Kernels:
    """Return numba's kernels on a CPU, Triton's on a GPU, or torch's if Triton is missing or `asked` is "torch".

    `asked` "fixed": Triton's, in tiles of one size. On a CPU, Triton's kernels run in its interpreter, for tests.
    `attention`: a library that may compute attention, if it suits the model. Raises ConfigError.
    """
    if device.type != "cpu" and formats.weights in IN_BLOCKS:
        raise ConfigError(f"--weight-dtype {formats.weights} is for CPUs so far: take auto or fp8 on {device.type}")
    if formats.weights == scaled_product.NAME:
        check_scaled(dtype, device, asked)
    if asked == "fixed":
        return fixed_kernels(config, dtype, device, formats)
    if asked == "triton" or (device.type == "cuda" and asked != "torch" and has_triton()):
        own = gpu_kernels(config, dtype, device, formats)
    elif device.type != "cpu" or asked == "torch":
        own = library_kernels(config, dtype, device, formats)
    else:
        return compiled_kernels(config, dtype, team, formats)
    return with_library(own, config, dtype, device, formats, attention)


def check_scaled(dtype: torch.dtype, device: torch.device, asked: str) -> None:
    """Raise ConfigError if products of fp8 rows can't be computed. On a CPU only tests do."""
    flag = f"--weight-dtype {scaled_product.NAME}"
    if device.type == "cpu" and asked in ("auto", "separate"):
        raise ConfigError(f"{flag} is for GPUs: take auto, int8 or fp8 on a CPU")
    if device.type == "cuda" and dtype != torch.bfloat16:
        raise ConfigError(f"{flag} needs --dtype bfloat16, which the products' sums are rounded to")
    why = scaled_product.why_not_scaled(device, dtype)
    if why:
        raise ConfigError(f"{flag}: this GPU can't multiply fp8 (compute capability 8.9 can): {why}; take auto or fp8")


def with_library(
    kernels: Kernels,
    config: LlamaConfig,
    dtype: torch.dtype,
    device: torch.device,
    formats: Formats,
    wanted: LibraryAttention | None,
) -> Kernels:
    """Let FlashInfer compute attention, if it is wanted and suits the model. Raises ConfigError if it was asked for by
    name and does not suit."""
    if wanted is None:
        return kernels
    shape, make_own = attention_shape(config), kernels.make_attention
    why = why_unsuitable(shape, dtype, formats.kv)
    if why and wanted.is_asked:
        raise ConfigError(f"--attention flashinfer: {why}; use auto or baton")
    if why or wanted.refused:
        logging.getLogger(__name__).info("attention is Baton's own: %s", why or wanted.refused)
        return kernels
    gpu, name = wanted.gpu, full_name(wanted.version)

    def make_attention(rope: RopeTables, local: RopeTables | None) -> AttentionBackend:
        own = make_own(rope, local)
        assert isinstance(own, WritesPages)
        return FlashInferAttention(shape, dtype, own, gpu, device)

    logging.getLogger(__name__).info("attention is the library's: %s", name)
    return replace(kernels, make_attention=make_attention, attention=name)


def library_kernels(config: LlamaConfig, dtype: torch.dtype, device: torch.device, formats: Formats) -> Kernels:
    make_float, make_linear = pick_linear(device, torch.float32), pick_linear(device, dtype)

    def make_weight(weight: Weight, bias: torch.Tensor | None) -> Linear:
        if isinstance(weight, BlockWeights):
            return PlainBlockLinear(weight, bias)
        if formats.weights == "fp8":
            return QuantizedLinear(weight, bias, DTYPES["fp8"])
        if formats.weights == scaled_product.NAME:
            return ScaledLinear(weight, bias)
        return make_linear(weight, bias)

    def make_head(weight: Weight) -> Head:
        if isinstance(weight, BlockWeights):
            return PlainBlockLinear(weight, out_dtype=torch.float32)
        return FloatHead(make_float(weight.float(), None))

    return Kernels(
        make_weight=make_weight,
        make_linear=make_linear,
        make_head=make_head,
        make_attention=lambda rope, local: TorchAttention(attention_shape(config), rope, local),
        blocks=TorchBlocks(config.rms_eps, dtype, is_gelu(config)),
        groups_experts=groups_experts(config, dtype, device, formats),
    )


def groups_experts(config: LlamaConfig, dtype: torch.dtype, device: torch.device, formats: Formats) -> bool:
    if config.experts is None or formats.weights != "auto" or not groups_on(dtype, device):
        return False
    works = works_grouped(config.hidden_size, config.experts.intermediate_size, dtype, device)
    if not works:
        logging.getLogger(__name__).info("experts are multiplied one by one: torch's grouped product fails on this GPU")
    return works


def groups_on(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a GPU multiplies by experts without a wait of the host. Tests replace it."""
    if device.type != "cuda":
        return False
    return has_grouped_product(str(dtype).removeprefix("torch."), TorchCuda().describe(device).capability[0])


def gpu_kernels(config: LlamaConfig, dtype: torch.dtype, device: torch.device, formats: Formats) -> Kernels:
    from shared.gpu_kernel.add_norm import MAX_COLUMNS
    from shared.gpu_kernel.attention import MOST_DIM, TritonAttention
    from shared.gpu_kernel.blocks import TritonBlocks
    from shared.gpu_kernel.product import ByteLinear

    if device.type == "cpu" and dtype != torch.float32:
        raise ConfigError("Triton's interpreter multiplies the bits of bfloat16 as whole numbers: take float32 there")
    kernels, shape = library_kernels(config, dtype, device, formats), attention_shape(config)
    if device.type != "cpu" and dtype.itemsize == 2:
        kernels = replace(kernels, make_head=make_wide_head)
    if formats.weights == "fp8":
        kernels = replace(
            kernels, make_weight=lambda weight, bias: ByteLinear(plain_numbers(weight), bias, DTYPES["fp8"])
        )
    if config.hidden_size <= MAX_COLUMNS:
        kernels = replace(kernels, blocks=TritonBlocks(config.rms_eps, dtype, is_gelu(config)))
    if shape.head_dim <= MOST_DIM:
        return replace(kernels, make_attention=lambda rope, local: TritonAttention(shape, rope, local))
    logging.getLogger(__name__).info("attention runs on plain torch: no kernel for heads of %d", shape.head_dim)
    return kernels


def fixed_kernels(config: LlamaConfig, dtype: torch.dtype, device: torch.device, formats: Formats) -> Kernels:
    """Return Triton's kernels in tiles of one size. Raises ConfigError if any kernel would be the library's."""
    if not has_triton():
        raise ConfigError("--deterministic: Triton is missing; it comes with torch's CUDA build")
    from shared.gpu_kernel.add_norm import MAX_COLUMNS
    from shared.gpu_kernel.attention import MOST_DIM, TritonAttention
    from shared.gpu_kernel.product import ByteLinear, FixedLinear

    by_library = {
        "products of experts": config.experts is not None,
        f"products of {formats.weights} weights": formats.weights not in ("auto", "fp8"),
        f"attention of heads of {config.head_dim}": config.head_dim > MOST_DIM,
        f"norms of rows of {config.hidden_size}": config.hidden_size > MAX_COLUMNS,
    }
    for what, is_so in by_library.items():
        if is_so:
            raise ConfigError(f"--deterministic: {what} use the library, whose results depend on the batch")

    def make_product(weight: Weight, bias: torch.Tensor | None) -> Linear:
        return FixedLinear(plain_numbers(weight), bias)

    def make_weight(weight: Weight, bias: torch.Tensor | None) -> Linear:
        if formats.weights == "fp8":
            return ByteLinear(plain_numbers(weight), bias, DTYPES["fp8"], is_fixed=True)
        return make_product(weight, bias)

    shape = attention_shape(config)
    return replace(
        gpu_kernels(config, dtype, device, formats),
        make_weight=make_weight,
        make_linear=make_product,
        make_head=lambda weight: FixedLinear(plain_numbers(weight), out_dtype=torch.float32),
        make_attention=lambda rope, local: TritonAttention(shape, rope, local, is_fixed=True),
    )


def plain_numbers(weight: Weight) -> torch.Tensor:
    """Return the weight. Raises ConfigError for blocks, which a draft head may have: `pick_kernels` checks only
    the model's format."""
    if isinstance(weight, BlockWeights):
        raise ConfigError("Triton's products take no weights in blocks: use a file with plain numbers")
    return weight


def make_wide_head(weight: Weight) -> Head:
    return PlainBlockLinear(weight, out_dtype=torch.float32) if isinstance(weight, BlockWeights) else WideHead(weight)


def compiled_kernels(config: LlamaConfig, dtype: torch.dtype, team: Team, formats: Formats) -> Kernels:
    """Return our kernels, or the library's for unsupported sizes and older processors."""
    from shared.kernel.attention.attention_numba import NumbaAttention, supports
    from shared.kernel.product import product
    from shared.kernel.product.blocks_numba import NumbaBlocks

    library = library_kernels(config, dtype, torch.device("cpu"), formats)
    packing = compiled_packing(dtype, team, formats)
    shape = attention_shape(config)

    def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        ours = product.supports(weight.shape[1], dtype)
        return product.TileLinear(product.pack(weight, bias), team) if ours else library.make_linear(weight, bias)

    def make_weight(weight: Weight, bias: torch.Tensor | None) -> Linear:
        packed = packing.pack(weight, bias, False)
        return library.make_weight(weight, bias) if packed is None else packing.unpack(packed, False)

    def make_head(weight: Weight) -> Head:
        packed = packing.pack(weight, None, True)
        return library.make_head(weight) if packed is None else packing.unpack(packed, True)

    def make_attention(rope: RopeTables, local: RopeTables | None) -> AttentionBackend:
        if supports(shape):
            return NumbaAttention(shape, dtype, rope, team, local, DTYPES.get(formats.kv))
        logging.getLogger(__name__).info("attention runs on plain torch: no kernel for heads of %d", shape.head_dim)
        return library.make_attention(rope, local)

    inner = [config.intermediate_size] + ([] if config.experts is None else [config.experts.intermediate_size])
    blocks = NumbaBlocks(config.hidden_size, tuple(inner), config.rms_eps, dtype, team, is_gelu(config))
    return Kernels(make_weight, make_linear, make_head, make_attention, blocks, team, packing)


def compiled_packing(dtype: torch.dtype, team: Team, formats: Formats) -> Packing:
    from shared.kernel.product import block_product, product, quantized_product

    def pack(weight: Weight, bias: torch.Tensor | None, is_head: bool) -> Packed | None:
        if isinstance(weight, BlockWeights):
            return block_product.pack(weight, bias, dtype)
        num_inputs = weight.shape[1]
        if is_head or formats.weights != "fp8":
            return product.pack(weight, bias) if product.supports(num_inputs, dtype) else None
        return quantized_product.pack(weight, bias) if product.supports(num_inputs, torch.float32) else None

    def unpack(packed: Packed, is_head: bool) -> Linear:
        out_dtype = torch.float32 if is_head else None
        if packed.form is not None:
            return block_product.BlockTileLinear(packed, team, out_dtype)
        if packed.scale is not None:
            return quantized_product.QuantizedTileLinear(packed, team)
        return product.TileLinear(packed, team, out_dtype)

    return Packing(pack, unpack, product.supports(2, torch.float32 if formats.weights == "fp8" else dtype))


def attention_shape(config: LlamaConfig) -> AttentionShape:
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    places = tuple((place.group, place.slot) for place in config.groups.layers)
    return AttentionShape(*heads, config.rms_eps, config.windows, config.score_scale, places)


def is_gelu(config: LlamaConfig) -> bool:
    return config.style.gate == "gelu_tanh"
