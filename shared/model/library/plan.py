"""What each rank has of a network, by the library's own plan for tensor parallelism.

    plan: "model.layers.*.mlp.up_proj" -> "colwise"     every rank keeps some rows of this matrix
                                                         (Megatron-LM, Shoeybi et al. 2019)

A block (one layer's attention, one MLP, one layer's experts, the embedding, the head) is divided if the number of ranks
divides all its sizes. Otherwise every rank has all of the block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from shared.core.errors import ConfigError

STACK, JOIN = "MergeModulelist", "Concatenate"  # how the library makes one tensor of those of all experts


ROWS, COLUMNS = -2, -1  # dimensions of a matrix (out, in)


@dataclass(frozen=True, slots=True)
class TensorCut:
    """Ranks cut a tensor along `dim`, counted from the end. With `pieces`, they cut each of these equal pieces."""

    dim: int
    pieces: int = 1

    def fits(self, shape: Iterable[int], size: int) -> bool:
        found = tuple(shape)
        return len(found) >= -self.dim and found[self.dim] % (self.pieces * size) == 0

    def own(self, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Return a rank's part: a view if there is one piece."""
        parts = [piece.chunk(size, self.dim)[rank] for piece in tensor.chunk(self.pieces, self.dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def whole(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the tensor, given the parts of all ranks (size, ...)."""
        pieces = [part.chunk(self.pieces, self.dim) for part in parts]
        return torch.cat([rank[index] for index in range(self.pieces) for rank in pieces], self.dim)


@dataclass(frozen=True, slots=True)
class PartStyle:
    """How ranks divide a module, and what they do with its inputs and outputs."""

    dim: int = 0  # along which they cut its matrices; 0: nothing is cut
    pieces: int = 1
    kind: type[nn.Module] = nn.Module  # what such a module is
    takes_share: bool = False  # a rank takes its columns of the input, which is whole
    owns_ids: bool = False  # a rank knows some of the ids
    output: str = ""  # "sum" or "join" (columns) of all ranks' outputs; "": each goes on with its own

    def cut(self, parameter: str, num_dims: int) -> TensorCut | None:
        """`parameter`: its name in the module."""
        if not self.dim or (self.dim == COLUMNS and (num_dims == 1 or parameter == "bias")):
            return None  # a bias is added once, to the sum
        return TensorCut(-1) if num_dims == 1 else TensorCut(self.dim, self.pieces)


STYLES: Mapping[str, PartStyle] = {
    "colwise": PartStyle(ROWS, kind=nn.Linear),
    "colwise_gather_output": PartStyle(ROWS, kind=nn.Linear, output="join"),
    "rowwise": PartStyle(COLUMNS, kind=nn.Linear, output="sum"),
    "rowwise_split_input": PartStyle(COLUMNS, kind=nn.Linear, takes_share=True, output="sum"),
    "embedding_rowwise": PartStyle(ROWS, kind=nn.Embedding, owns_ids=True, output="sum"),
    "packed_colwise": PartStyle(ROWS, pieces=2),
    "moe_tp_experts": PartStyle(output="sum"),
    "mla_kv_a_proj": PartStyle(),
    "replicated_with_grad_allreduce": PartStyle(),
}


@dataclass(frozen=True, slots=True)
class PlannedModule:
    """A module that the plan names, or whose parameters it names."""

    path: str
    module: nn.Module
    style: PartStyle
    cuts: Mapping[str, TensorCut]  # by the whole names of its parameters


@dataclass(frozen=True, slots=True)
class Division:
    """What one rank of `size` has of a network, and which modules then compute with parts (by their paths)."""

    rank: int
    size: int
    cuts: Mapping[str, TensorCut]  # by names of parameters
    styles: Mapping[str, PartStyle]
    file_cuts: Mapping[str, TensorCut]  # by names of tensors in the files

    def num_numbers(self, outline: PreTrainedModel) -> int:
        """Return how many of the outline's numbers the rank has."""
        return sum(
            parameter.numel() // (self.size if name in self.cuts else 1)
            for name, parameter in outline.named_parameters()
        )

    def own(self, name: str, tensor: torch.Tensor, *, copied: bool) -> torch.Tensor:
        """Return the rank's part of a tensor of the files, contiguous; `copied`: so that the rest can be freed."""
        if name not in self.file_cuts:
            return tensor
        part = self.file_cuts[name].own(tensor, self.rank, self.size)
        return part.clone(memory_format=torch.contiguous_format) if copied else part.contiguous()


def divide(outline: PreTrainedModel, file_names: Iterable[str], rank: int, size: int) -> Division:
    """`outline`: the whole network, whose tensors may be on the meta device.

    Raises ConfigError for a family without a plan, and for a plan that is not known here."""
    family, plan = outline.config.model_type, outline.tp_plan
    if not plan:
        raise ConfigError(f"--tp {size}: the library has no plan that divides {family} among ranks")
    unknown = sorted(set(plan.values()) - STYLES.keys())
    if unknown:
        raise ConfigError(f"--tp {size}: the library divides {family} in a way that Baton doesn't know: {unknown[0]}")
    modules = dict(outline.named_modules())
    blocks: dict[str, list[PlannedModule]] = {}
    for path, module in modules.items():
        found = planned(path, module, plan)
        if found is not None:
            above = path if found.style.kind is nn.Module else path.rpartition(".")[0]
            blocks.setdefault(above, []).append(found)
    cuts: dict[str, TensorCut] = {}
    styles: dict[str, PartStyle] = {}
    for above, block in blocks.items():
        if is_divided(block, modules[above], outline, size):
            for one in block:
                cuts |= one.cuts
                styles[one.path] = one.style
    return Division(rank, size, cuts, styles, cuts_of_files(outline, file_names, cuts))


def planned(path: str, module: nn.Module, plan: Mapping[str, str]) -> PlannedModule | None:
    """Raise ConfigError for a style that is meant for another kind of module."""
    given = plan.get(pattern_of(path))
    style = STYLES[given] if given else PartStyle()
    cuts, is_named = {}, given is not None
    for name, parameter in module.named_parameters(path, recurse=False):
        own = plan.get(pattern_of(name))
        is_named |= own is not None
        cut = (STYLES[own] if own else style).cut(name.rpartition(".")[2], parameter.dim())
        if cut is not None:
            cuts[name] = cut
    if not is_named:
        return None
    if not isinstance(module, style.kind) or (style.dim == COLUMNS and type(module).forward is not nn.Linear.forward):
        raise ConfigError(f"--tp: the library divides {path}, which is {type(module).__name__}, by {given}")
    return PlannedModule(path, module, style, cuts)


def pattern_of(name: str) -> str:
    """Return the name as plans have it: "*" for the number of a layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def is_divided(block: Sequence[PlannedModule], module: nn.Module, outline: PreTrainedModel, size: int) -> bool:
    """`module`: that has all of the block's modules."""
    shapes = {
        name: value.shape for one in block for name, value in one.module.named_parameters(one.path, recurse=False)
    }
    if not all(cut.fits(shapes[name], size) for one in block for name, cut in one.cuts.items()):
        return False
    if not hasattr(module, "layer_idx"):  # it is not attention
        return True
    text = outline.config.get_text_config()
    layers = getattr(text, "per_layer_config", None)  # of families whose layers differ in their heads
    own = text if layers is None else layers[module.layer_idx]
    counts = [getattr(own, name, None) or size for name in ("num_attention_heads", "num_key_value_heads")]
    return all(count % size == 0 for count in counts)


def cuts_of_files(
    outline: PreTrainedModel, names: Iterable[str], cuts: Mapping[str, TensorCut]
) -> dict[str, TensorCut]:
    """Return the cuts of the files' tensors (by their names there) of which the library makes cut parameters.

    It renames tensors, stacks those of all experts (some files have them stacked), and joins two of these. Raises
    ConfigError if it does more."""
    changes = get_model_conversion_mapping(outline, None, None)
    renamings = [one for one in changes if isinstance(one, WeightRenaming)]
    mergers = [one for one in changes if isinstance(one, WeightConverter)]
    by_source = {source: one for one in mergers for source in one.source_patterns}
    state, prefix = outline.state_dict(), outline.base_model_prefix
    found = {}
    for name in names:
        target, source = rename_source_key(name, renamings, mergers, prefix, state)
        if target not in state and name in state:
            target, source = rename_source_key(name, [], [], prefix, state)
        if target in cuts:
            merger = by_source[source] if source is not None else None
            found[name] = cut_before(merger, cuts[target], target)
    return found


def cut_before(merger: WeightConverter | None, cut: TensorCut, target: str) -> TensorCut:
    """Return how to cut each tensor of which the merger makes one that is cut by `cut`."""
    steps = [type(step).__name__ for step in merger.operations] if merger is not None else []
    if steps in ([], [STACK]):
        return cut
    if merger is not None and steps in ([STACK, JOIN], [JOIN]) and cut.pieces == len(merger.source_patterns):
        return TensorCut(cut.dim)
    raise ConfigError(f"--tp: the library makes {target} by {', '.join(steps)}, which can't be cut before")
