"""What a decode step of a real model launches on a GPU, and how many bytes that moves, counted on the "meta" device:
nothing runs. Sampling is not in it: it does not grow with the model's layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.kernel.attention import HostLengths
from shared.kernel.block_weights import BlockWeights
from shared.kv.pool import KVPool
from shared.model.config import LlamaConfig, RopeConfig
from shared.model.interface import ModelInputs, ModelSpec
from shared.model.kernels import AS_DTYPE, gpu_kernels
from shared.model.llama import LlamaModel, kv_planes
from shared.model.tensor_shapes import tensor_shapes
from shared.model.weights import load_weights

META = torch.device("meta")
PAGE_SIZE = 16
# No work of the device: views, and memory that is only handed out.
FREE = {"view", "empty", "empty_like", "new_empty", "slice", "select", "t", "as_strided", "_unsafe_view", "detach"}
FREE |= {"unsqueeze", "expand", "reshape", "alias", "permute", "transpose", "split", "unbind", "chunk", "zeros"}
FREE |= {"flatten"}
LOOKED_UP = {
    "kv",
    "scales",
    "cos",
    "sin",
    "page_table",
}  # of these a kernel reads little: what it needs of `kv` is added
WRITTEN_TOO = {"x"}  # read, and written in place


@dataclass(slots=True)
class StepCount:
    """`bytes` are read or written by launches, `ideal` what must be at least: all weights and the rows' KV, once."""

    launches: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    ideal: int = 0


class MetaSource:
    """A TensorSource of a model's shapes and no numbers."""

    def __init__(self, config: LlamaConfig) -> None:
        self.config = config
        self._shapes = tensor_shapes(config)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name], dtype=torch.bfloat16, device=META)

    def blocks(self, name: str) -> BlockWeights | None:
        return None

    def content_hash(self) -> str:
        return "none"


class Operators(TorchDispatchMode):
    """Counts torch's own launches."""

    def __init__(self, count: StepCount) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in FREE:
            self._count.launches[name] += 1
            tensors = [one for one in (*args, result) if isinstance(one, torch.Tensor)]
            if name == "index":  # a row for each index, read and written
                tensors = [result, result]
            self._count.bytes += sum(map(size, tensors))
        return result


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def llama(num_layers: int) -> LlamaConfig:
    """Of the shape of Llama 3.1 8B, with as many layers as asked for."""
    return LlamaConfig(
        "8B shape", "llama", 128256, 4096, 14336, num_layers, 32, 8, 128, 1e-5, RopeConfig(5e5), 131072, False, (0,)
    )


def count_step(config: LlamaConfig, batch: int, context: int) -> StepCount:
    """One token of each of `batch` rows behind `context` others."""
    from shared.gpu_kernel import launcher

    kernels, source = gpu_kernels(config, torch.bfloat16, META, AS_DTYPE), MetaSource(config)
    weights = load_weights(source, torch.bfloat16, META, context + 1, kernels.make_weight, kernels.make_head)
    spec = ModelSpec("8B shape", config.vocab_size, context + 1, "bfloat16", "none", config.eos_ids)
    attention = kernels.make_attention(weights.rope, weights.local_rope)
    model, per_row = LlamaModel(config, spec, weights, attention, kernels.blocks), context // PAGE_SIZE + 1
    pool = KVPool(kv_planes(config, spec, PAGE_SIZE), 1 + batch * per_row, PAGE_SIZE, META)
    count, device_of = StepCount(), launcher.device_of

    def see(kernel: Any, args: tuple[object, ...]) -> torch.device:
        count.launches[kernel.fn.__name__] += 1
        named = [
            (name, one) for name, one in zip(kernel.arg_names, args, strict=False) if isinstance(one, torch.Tensor)
        ]
        count.bytes += sum(size(one) * (1 + (name in WRITTEN_TOO)) for name, one in named if name not in LOOKED_UP)
        return device_of(kernel, args)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), Operators(count):
        patch.setattr(launcher, "device_of", see)
        model.forward(decode_inputs(batch, context, per_row), pool)
    kv_bytes = 2 * config.kv_size * 2 * config.num_layers * batch
    count.bytes += kv_bytes * (context + 2)  # the new ones are written, too
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if name != "embed"}
    count.ideal = sum(2 * torch.Size(shape).numel() for shape in shapes.values()) + kv_bytes * (context + 1)
    return count


def decode_inputs(batch: int, context: int, per_row: int) -> ModelInputs:
    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    return ModelInputs(
        input_ids=empty(batch),
        positions=empty(batch),
        cu_q_lens=empty(batch + 1, dtype=torch.int32),
        page_table=empty(batch, per_row, dtype=torch.int32),
        logits_idx=empty(batch),
        max_q_len=1,
        max_seq_len=context + 1,
        host=HostLengths(torch.arange(batch + 1, dtype=torch.int32).numpy(), None, None, batch),
    )
