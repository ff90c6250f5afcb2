"""Models of real sizes on the "meta" device: a forward launches nothing, and the launcher records what it would."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from shared.engine.buckets import PromptShape
from shared.engine.graphs import FixedInputs
from shared.kernel.code.step_layout import HostLengths, Layout
from shared.kernel.product.block_weights import BlockWeights
from shared.kv.pool import KVPool
from shared.model.formats.tensor_shapes import tensor_shapes
from shared.model.llama.llama import LlamaModel, kv_planes
from shared.model.math.config import LlamaConfig
from shared.model.math.interface import ModelInputs, ModelSpec
from shared.model.math.kernels import AS_DTYPE, Formats, fixed_kernels, gpu_kernels
from shared.model.math.weights import load_weights

META = torch.device("meta")
PAGE_SIZE = 16


class MetaSource:
    """A TensorSource of a model's shapes and no numbers."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        self.config = config
        self._shapes, self._dtype = tensor_shapes(config), dtype

    def has(self, name: str) -> bool:
        return name in self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name], dtype=self._dtype, device=META)

    def blocks(self, name: str) -> BlockWeights | None:
        return None

    def stored(self) -> tuple[str, int]:
        return "none", 0

    def content_hash(self) -> str:
        return "none"


def meta_model(
    config: LlamaConfig,
    num_pages: int,
    formats: Formats = AS_DTYPE,
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_fixed: bool = False,
) -> tuple[LlamaModel, KVPool]:
    """The model on a GPU's kernels, and its pool. `is_fixed`: with --deterministic."""
    pick = fixed_kernels if is_fixed else gpu_kernels
    kernels, source = pick(config, dtype, META, formats), MetaSource(config, dtype)
    context = config.max_context
    weights = load_weights(source, dtype, META, context, kernels.make_weight, kernels.make_head)
    name = str(dtype).removeprefix("torch.")
    spec = ModelSpec(config.name, config.vocab_size, context, name, "none", config.eos_ids)
    spec = replace(spec, kv_dtype=formats.kv, weight_dtype=formats.weights)
    attention = kernels.make_attention(weights.rope, weights.local_rope)
    model = LlamaModel(config, spec, weights, attention, kernels.blocks)
    return model, KVPool(kv_planes(config, spec, PAGE_SIZE), num_pages, PAGE_SIZE, META)


@dataclass(frozen=True, slots=True)
class PromptGraph:
    """What a graph of prompts reads, whatever its rows have. `context`: the most tokens of a row."""

    num_tokens: int
    context: int

    def inputs(self, num_groups: int = 1) -> ModelInputs:
        shape = PromptShape(self.num_tokens, self.context)
        fixed = FixedInputs([shape], -(-self.context // PAGE_SIZE), ("input_ids", "positions"), META, num_groups)
        return fixed.of(shape)


@dataclass(frozen=True, slots=True)
class Step:
    """`decoding` rows of `width` tokens behind rows that have chunks; `context`: tokens of the longest row."""

    decoding: int
    width: int = 1
    chunks: tuple[int, ...] = ()
    context: int = 2048
    is_tree: bool = False

    def inputs(self, num_groups: int = 1) -> ModelInputs:
        """`num_groups`: page groups of the model."""
        q_lens = [*self.chunks, *[self.width] * self.decoding]
        starts = np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32)
        tokens, rows = int(starts[-1]), len(q_lens)

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=META)

        return ModelInputs(
            input_ids=empty(tokens),
            positions=empty(tokens),
            layout=Layout(
                cu_q_lens=empty(rows + 1, dtype=torch.int32),
                page_tables=(empty(rows, -(-self.context // PAGE_SIZE), dtype=torch.int32),) * num_groups,
                max_q_len=max(q_lens),
                max_seq_len=self.context,
                host=HostLengths(starts, None, self.decoding),
            ),
            logits_idx=empty(self.decoding * self.width + len(self.chunks)),
            slots=empty(tokens) if self.is_tree else None,
            visible=empty(tokens) if self.is_tree else None,
        )
