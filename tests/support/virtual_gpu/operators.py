"""What a virtual GPU knows of torch's operators: what they write, which are views, which stop the host, and which
shapes come out. Knows nothing of streams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
KIND = "vgpu"  # of the device

# The results' shapes depend on the data, or the result is the host's: a real device makes the host wait.
STOPPING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal", "aten::bincount",
    "aten::is_nonzero",
}  # fmt: skip
GROUPED = {torch.bfloat16}  # for which CUDA has a grouped product; for others it loops on the host
MASKS = (torch.bool, torch.uint8)
# Their `indices` may be on the CPU: the device fetches them. The first has fetched them already when it comes here.
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl", "aten::_index_put_impl_"}
# These take a CPU tensor of no dimension for a number; pointwise operators all do.
SCALARS = {
    "aten::floor_divide",
    "aten::floor_divide_",
    "aten::masked_fill",
    "aten::masked_fill_",
    "aten::where",
    "aten::fill",
    "aten::fill_",
} | INDEXED


# CUDA divides floats by a number of the CPU's as it multiplies: by the reciprocal, in float32 or float64.
DIVIDE, MULTIPLY = torch.ops.aten.div.out, torch.ops.aten.mul.out  # what all kinds of division come as


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one overload. `writes`: names of the arguments that it writes, in order."""

    name: str
    arguments: tuple[str, ...]
    writes: tuple[str, ...]
    is_view: bool
    takes_scalars: bool
    num_returns: int
    takes_tensors: frozenset[str]  # names of arguments that are single tensors
    num_fresh: int  # results that are no argument

    def given(self, args: Args, kwargs: Kwargs) -> list[tuple[str, Any]]:
        return [*zip(self.arguments, args, strict=False), *kwargs.items()]

    def tensors(self, args: Args, kwargs: Kwargs) -> list[tuple[str, torch.Tensor]]:
        found = []
        for name, value in self.given(args, kwargs):
            if isinstance(value, torch.Tensor):
                found.append((name, value))
            elif isinstance(value, list | tuple):
                found += [(name, one) for one in value if isinstance(one, torch.Tensor)]
        return found

    def with_tensors(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Numbers come as numbers even where the operator takes tensors: make them such."""

        def tensor(name: str, value: Any) -> Any:
            if not isinstance(value, int | float) or name not in self.takes_tensors:
                return value
            # A result that is there has its type; else a number must not widen it.
            return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) and not self.num_fresh else None)

        changed = [tensor(name, value) for name, value in self.given(args, kwargs)]
        return tuple(changed[: len(args)]), dict(zip(kwargs, changed[len(args) :], strict=True))

    def written(self, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
        if not self.writes:
            return []
        return [tensor for name, tensor in self.tensors(args, kwargs) if name in self.writes]

    def stops_host(self, args: Args, kwargs: Kwargs) -> bool:
        if self.name == "aten::repeat_interleave":
            return dict(self.given(args, kwargs)).get("output_size") is None
        if "index_put" in self.name:  # by a mask: torch asks where it is true
            return self.has_mask(args, kwargs) and not self.puts_number(args, kwargs)
        if self.name == "aten::_grouped_mm":
            return any(one.dtype not in GROUPED for name, one in self.tensors(args, kwargs) if name != "offs")
        return self.name in STOPPING

    def has_mask(self, args: Args, kwargs: Kwargs) -> bool:
        return any(name == "indices" and one.dtype in MASKS for name, one in self.tensors(args, kwargs))

    def puts_number(self, args: Args, kwargs: Kwargs) -> bool:
        return any(name == "values" and is_number_on_cpu(one) for name, one in self.tensors(args, kwargs))


@cache
def facts_of(op: torch._ops.OpOverload) -> Facts:
    schema = op._schema
    written = [arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments]
    aliases = [out.alias_info for out in schema.returns]
    return Facts(
        name=schema.name,
        arguments=tuple(arg.name for arg in schema.arguments),
        writes=tuple(arg.name for arg, is_written in zip(schema.arguments, written, strict=True) if is_written),
        is_view=schema.name == "aten::set_" or any(alias is not None and not alias.is_write for alias in aliases),
        takes_scalars=torch.Tag.pointwise in op.tags or schema.name in SCALARS,
        num_returns=len(aliases),
        takes_tensors=frozenset(arg.name for arg in schema.arguments if "Tensor" in str(arg.type)),
        num_fresh=sum(alias is None for alias in aliases),
    )


def as_cuda_computes(op: torch._ops.OpOverload, args: Args) -> tuple[torch._ops.OpOverload, Args]:
    """Return the operator and arguments whose result on a CPU has the bits of CUDA's."""
    if op is not DIVIDE:
        return op, args
    left, right = args
    if not (isinstance(right, int | float) or is_number_on_cpu(right)):
        return op, args
    wide = torch.float64 if left.dtype == torch.float64 else torch.float32
    return MULTIPLY, (left, (1 / torch.tensor(float(right), dtype=wide)).item())


def is_number_on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.dim()


def is_ours(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == KIND


def replaced(value: Any, tensor: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Any:
    """`value` with every tensor in it changed by `tensor`, and our device by another."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if value is None or isinstance(value, int | float | torch.dtype):
        return value
    if isinstance(value, torch.device):
        return device if value.type == KIND else value
    if isinstance(value, list | tuple):
        return type(value)([replaced(one, tensor, device) for one in value])
    return value


def require_one_device(facts: Facts, args: Args, kwargs: Kwargs) -> int:
    """RuntimeError, as on a real device, for tensors on two. The number of tensors that the device has to fetch from
    the CPU: indices, and a number that goes where indices say. Where a mask says it, a number is the kernel's
    argument."""
    tensors = facts.tensors(args, kwargs)
    device = next(tensor.device for _, tensor in tensors if is_ours(tensor))
    fetched = 0
    if "index_put" in facts.name and facts.puts_number(args, kwargs):
        fetched += not facts.has_mask(args, kwargs)
    for name, tensor in tensors:
        if tensor.device == device or (facts.takes_scalars and is_number_on_cpu(tensor)):
            continue
        if facts.name in INDEXED and name == "indices" and tensor.device.type == "cpu" and is_ours(args[0]):
            fetched += "index_put" in facts.name
            continue
        where = f"method wrapper_CUDA_{facts.name.removeprefix('aten::')}"
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but got {name} is on {tensor.device}, different from "
            f"other tensors on {device} (when checking argument in {where})"
        )
    return fetched


def shapes(op: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> tuple[list[torch.Tensor], Any]:
    """Run op without data: (its written arguments, its results), of device meta. Raises where op can't be run so."""
    meta = torch.device("meta")
    is_grouped = op is torch.ops.aten._grouped_mm.default  # of which meta knows the strides in bfloat16 alone

    def without_data(tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.bfloat16 if is_grouped and tensor.is_floating_point() else tensor.dtype
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=meta)

    bare_args = tuple(replaced(value, without_data, meta) for value in args)
    bare_kwargs = {name: replaced(value, without_data, meta) for name, value in kwargs.items()}
    results = op(*bare_args, **bare_kwargs)
    if is_grouped:
        results = results.to(args[0].dtype)
    return facts_of(op).written(bare_args, bare_kwargs), results
