"""Run a network of which each rank has a part: what ranks do before and after a module that is divided.

    x, whole on all ranks -> "colwise": own columns of the output -> ... -> "rowwise": own part of a sum -> sum, whole

A sum has the same bits on all ranks (group.py), and so have whole tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel

from shared.device.group import RankGroup
from shared.model.library.plan import Division, PartStyle, TensorCut

Forward = Callable[..., Any]


def with_parts(kind: type[PreTrainedModel], division: Division) -> type[PreTrainedModel]:
    """Return a class whose networks have parameters of the sizes of the parts, so that the library loads these."""

    def make(network: PreTrainedModel, config: PreTrainedConfig) -> None:
        kind.__init__(network, config)
        made: dict[nn.Parameter, nn.Parameter] = {}  # a head may be the embedding
        for name, parameter in list(network.named_parameters(remove_duplicate=False)):
            if name in division.cuts:
                path, _, own = name.rpartition(".")
                part = division.cuts[name].own(parameter.detach(), division.rank, division.size)
                setattr(network.get_submodule(path), own, made.setdefault(parameter, nn.Parameter(part)))

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})


class NetworkParts:
    """Replaces the forwards of divided modules by forwards in which all ranks take part."""

    def __init__(self, network: PreTrainedModel, division: Division, group: RankGroup) -> None:
        self.group = group
        self._is_whole = False
        self._summed: set[nn.Module] = set()  # whose inputs are parts
        for path, module in network.named_modules():
            own = dict(module.named_parameters(path, recurse=False))
            cuts = {name.rpartition(".")[2]: division.cuts[name] for name in own if name in division.cuts}
            style = division.styles.get(path)
            if style is not None and (cuts or style.output):
                self._install(module, style, cuts)

    def divides_heads(self, attention: nn.Module) -> bool:
        """Return whether queries, keys and values in this module are only those of this rank's heads."""
        return any(module in self._summed for module in attention.modules())

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Let all modules compute whole: each gathers its parameters from all ranks, and then drops them again."""
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False

    def _install(self, module: nn.Module, style: PartStyle, cuts: Mapping[str, TensorCut]) -> None:
        whole, with_parts = module.forward, self._with_parts(module, style)
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # it matters to gradients alone, and must be in the part
        if style.output == "sum" and not style.takes_share and not style.owns_ids:
            self._summed.add(module)

        def forward(*args: Any, **more: Any) -> Any:
            if not self._is_whole:
                return with_parts(*args, **more)
            with self._gathered(module, cuts):
                return whole(*args, **more)

        module.forward = forward

    @contextlib.contextmanager
    def _gathered(self, module: nn.Module, cuts: Mapping[str, TensorCut]) -> Iterator[None]:
        own = {name: module.get_parameter(name) for name in cuts}
        for name, cut in cuts.items():
            whole = cut.whole(self.group.stack(own[name].detach()))
            setattr(module, name, nn.Parameter(whole, requires_grad=False))
        try:
            yield
        finally:
            for name, parameter in own.items():
                setattr(module, name, parameter)

    def _with_parts(self, module: nn.Module, style: PartStyle) -> Forward:
        inner: Forward = module.forward
        if style.owns_ids:
            return lambda ids: self.group.sum(self._own_rows(inner, ids, len(module.get_parameter("weight"))))
        if style.output == "join":
            return lambda x: torch.cat(list(self.group.stack(inner(x))), dim=-1)
        if style.output == "sum" and isinstance(module, nn.Linear):
            return lambda x: self._product(module, self._own_columns(x) if style.takes_share else x)
        if style.output == "sum":
            return lambda *args, **more: self.group.sum(inner(*args, **more))
        return inner

    def _product(self, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """Add the bias once. x: (..., own inputs)."""
        total = self.group.sum(linear(x, module.weight))
        return total if module.bias is None else total + module.bias

    def _own_rows(self, look_up: Forward, ids: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return zeros for ids of other ranks."""
        places = ids - self.group.rank * num_rows
        is_own = (places >= 0) & (places < num_rows)
        rows: torch.Tensor = look_up(places.where(is_own, 0))
        return rows.masked_fill_(~is_own[..., None], 0)

    def _own_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(self.group.size, dim=-1)[self.group.rank]
