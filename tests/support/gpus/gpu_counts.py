"""What a decode step of a real model launches on a GPU, and how many bytes that moves, counted on the "meta" device:
nothing runs. Sampling is not in it: it does not grow with the model's layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.engine.buckets import Buckets, lengths_up_to, next_larger
from shared.model.formats.tensor_shapes import tensor_shapes
from shared.model.math.config import LlamaConfig, RopeConfig
from shared.model.math.kernels import AS_DTYPE, Formats
from tests.support.models.meta_models import PAGE_SIZE, Step, meta_model

PRODUCTS = {"q", "k", "v", "o", "gate", "up", "down"}
# No work of the device: views, and memory that is only handed out.
FREE = {"view", "empty", "empty_like", "new_empty", "slice", "select", "t", "as_strided", "_unsafe_view", "detach"}
FREE |= {"unsqueeze", "expand", "reshape", "alias", "permute", "transpose", "split", "unbind", "chunk", "zeros"}
FREE |= {"flatten"}
# Of these a kernel reads little: what it needs of `kv` is added.
LOOKED_UP = {"kv", "scales", "cos", "sin", "page_table", "sinks"}
WRITTEN_TOO = {"x"}  # read, and written in place


@dataclass(slots=True)
class StepCount:
    """`bytes` are read or written by launches, `ideal` what must be at least: all weights and the rows' KV, once."""

    launches: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    ideal: int = 0


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
    """Return the configuration of Llama 3.1 8B with another number of layers."""
    return LlamaConfig(
        "8B shape", "llama", 128256, 4096, 14336, num_layers, 32, 8, 128, 1e-5, RopeConfig(5e5), 131072, False, (0,)
    )


COUNTED = ((1, 2048), (64, 128), (64, 2048), (256, 512))  # batch, context


def count_layer(batch: int, context: int, formats: Formats = AS_DTYPE) -> StepCount:
    """Return what one more layer adds to a step."""
    two, three = (count_step(llama(layers), batch, context, formats) for layers in (2, 3))
    return StepCount(three.launches - two.launches, three.bytes - two.bytes, three.ideal - two.ideal)


def counted() -> str:
    """Return a row for each kind of step."""
    lines = [
        "| weights | rows | context | launches a layer | attention's programs | without keys | GB | least GB | times |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for weights in ("bfloat16", "fp8"):
        formats = Formats(weights=weights) if weights == "fp8" else AS_DTYPE
        for batch, context in COUNTED:
            count = count_step(llama(32), batch, context, formats)
            launches = count_layer(batch, context, formats).launches.total()
            sizes = f"{count.bytes / 1e9:.2f} | {count.ideal / 1e9:.2f} | {count.bytes / count.ideal:.3f}"
            busy, idle = attention_programs(batch, context)
            lines.append(f"| {weights} | {batch} | {context:,} | {launches} | {busy + idle:,} | {idle:,} | {sizes} |")
    return "\n".join(lines)


def attention_programs(batch: int, context: int) -> tuple[int, int]:
    """Return how many programs of a layer's attention have keys in a step's graph, and how many have none."""
    from shared.gpu_kernel.paged_attention import splits_of
    from shared.gpu_kernel.paged_step import Rows

    config, nothing = llama(1), torch.empty(0, device="meta")
    buckets = Buckets.up_to(batch, (1,), lengths_up_to(config.max_context))
    length = next_larger(buckets.lengths_of(next_larger(buckets.batches, batch), 1), context)
    launched, busy = (
        splits_of(Rows(nothing, nothing, None, 0, batch, 0, batch, 1, most), 0) for most in (length, context)
    )
    return batch * config.num_kv_heads * busy, batch * config.num_kv_heads * (launched - busy)


def count_step(config: LlamaConfig, batch: int, context: int, formats: Formats = AS_DTYPE) -> StepCount:
    """One token of each of `batch` rows behind `context` others."""
    from shared.gpu_kernel.launch import launcher

    config, per_row = replace(config, max_context=context + 1), context // PAGE_SIZE + 1
    model, pool = meta_model(config, 1 + batch * per_row, formats)
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
        model.forward(Step(batch, context=context + 1).inputs(), pool)
    kv_bytes = 2 * config.kv_size * 2 * config.num_layers * batch
    count.bytes += kv_bytes * (context + 2)  # the new ones are written, too
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if name != "embed"}
    count.ideal = sum(weight_bytes(name, formats) * torch.Size(shape).numel() for name, shape in shapes.items())
    count.ideal += kv_bytes * (context + 1)
    return count


def weight_bytes(name: str, formats: Formats) -> int:
    """Return the bytes of one number: layers' products may have fewer than norms and head."""
    return 1 if formats.weights == "fp8" and name.rpartition(".")[2] in PRODUCTS else 2
