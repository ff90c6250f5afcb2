"""Run LoRA adapters beside one model's weights. Each token uses its request's adapter, or none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shared.config.machine.host_memory import host_memory
from shared.core.errors import ConfigError
from shared.device.gpu import gib
from shared.kernel.product.linear import Linear, LinearFactory
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.formats.lora_file import LoraFolder, LoraPair, digest_of
from shared.model.math.adapter_bank import ReadAdapter
from shared.model.math.config import LlamaConfig
from shared.model.math.interface import Carried, Model, ModelInputs, ModelOutput

COPIES = 3  # a file's 16-bit numbers, and at most 32 bits for each in the model
QKV, OUT, GATE_UP, DOWN = "qkv", "out", "gate_up", "down"
FUSED = {"q": QKV, "k": QKV, "v": QKV, "o": OUT, "gate": GATE_UP, "up": GATE_UP, "down": DOWN}


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """What an adapter adds to columns [start, start + up.out_features) of a fused product."""

    down: Linear  # in -> r
    up: Linear  # r -> out, with the adapter's scale multiplied in
    start: int


Adapter = dict[tuple[int, str], tuple[LoraDelta, ...]]  # key: layer number, fused product


def load_adapter(
    pairs: Sequence[LoraPair], config: LlamaConfig, dtype: torch.dtype, device: torch.device, make: LinearFactory
) -> Adapter:
    """`make`: Kernels.make_linear."""
    starts = {"k": config.q_size, "v": config.q_size + config.kv_size, "up": config.intermediate_size}
    adapter: Adapter = {}
    for pair in pairs:
        down = make(pair.down.to(device, dtype, copy=True), None)  # a view would change with the file
        up = make((pair.up.to(device, torch.float32) * pair.scale).to(dtype), None)
        key = (pair.layer, FUSED[pair.target])
        adapter[key] = (*adapter.get(key, ()), LoraDelta(down, up, starts.get(pair.target, 0)))
    return adapter


class LoraBank:
    """Neither kernels nor pages depend on how many adapters there are, or on their ranks: a slot reserves no memory."""

    def __init__(
        self,
        folders: Iterable[LoraFolder],
        num_spare: int,
        config: LlamaConfig,
        dtype: torch.dtype,
        device: torch.device,
        make: LinearFactory,
    ) -> None:
        """`make`: Kernels.make_linear."""
        # A GPU's memory is divided at the start, and steps in flight would read freed memory.
        self.num_spare = num_spare if device.type == "cpu" else 0
        self._config, self._dtype, self._device, self._make = config, dtype, device, make
        self.adapters: list[Adapter] = [*map(self._load, folders), *({} for _ in range(self.num_spare))]

    def _load(self, folder: LoraFolder) -> Adapter:
        return load_adapter(folder.pairs, self._config, self._dtype, self._device, self._make)

    def read(self, folder: Path) -> ReadAdapter:
        check_memory(folder)
        read = LoraFolder(folder, self._config)
        weights = self._load(read)
        if digest_of(folder) != read.digest:  # else other weights would be served under this digest
            raise ConfigError(f"{folder} changed while it was read: load it again")
        return ReadAdapter(read.digest, weights)

    def put(self, slot: int, adapter: ReadAdapter) -> None:
        self.adapters[slot - 1] = adapter.weights

    def clear(self, slot: int) -> None:
        self.adapters[slot - 1] = {}


def check_memory(folder: Path) -> None:
    """Raise ConfigError if the host lacks room for the files' tensors, and for these in the model's dtype."""
    need = COPIES * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    _, free = host_memory()
    if need > free:
        raise ConfigError(f"{folder} may need {gib(need)}, and {gib(free)} are free: remove another adapter first")


class AdapterRows:
    def __init__(self, adapters: Sequence[Adapter], slots: torch.Tensor) -> None:
        """`slots` (M,) int64: 0 means no adapter, n means the n-th adapter."""
        self._adapters, self._slots = adapters, slots
        self._is_host = slots.device.type == "cpu"
        if self._is_host:
            used = [slot for slot in slots.unique().tolist() if slot]
            self._rows = [(adapters[slot - 1], (slots == slot).nonzero()[:, 0]) for slot in used]
        else:  # choosing tokens would make the host wait, so every adapter runs on all tokens
            self._rows = [(adapter, slots == slot) for slot, adapter in enumerate(adapters, 1)]

    def take_tokens(self, tokens: torch.Tensor) -> AdapterRows:
        return AdapterRows(self._adapters, self._slots[tokens])

    def add(self, layer: int, product: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the adapters' parts for x (M, in) to the product y (M, out), in place. Return y."""
        for adapter, rows in self._rows:
            for delta in adapter.get((layer, product), ()):
                columns = slice(delta.start, delta.start + delta.up.out_features)
                if self._is_host:
                    y[rows, columns] += delta.up(delta.down(x[rows]))
                else:
                    y[:, columns] += torch.where(rows.unsqueeze(1), delta.up(delta.down(x)), 0)
        return y


class LlamaLike(Model, Protocol):
    config: LlamaConfig
    embed: torch.Tensor

    def capture_aux(self, layers: tuple[int, ...]) -> None: ...
    def run(self, inputs: ModelInputs, carried: Carried | None, kv: KVPool) -> Carried | ModelOutput: ...


class AdaptedModel:
    """Runs a step on `plain` if no token has an adapter, else on `adapted`.

    Both share weights and kernels, so a token without an adapter gets the same bits from either.
    """

    def __init__(self, plain: LlamaLike, adapted: LlamaLike, bank: LoraBank) -> None:
        self._plain, self._adapted, self.bank = plain, adapted, bank
        self.spec, self.config, self.embed = plain.spec, plain.config, plain.embed

    def capture_aux(self, layers: tuple[int, ...]) -> None:
        for model in (self._plain, self._adapted):
            model.capture_aux(layers)

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return self._plain.kv_planes(page_size)

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        return self._for(inputs).forward(inputs, kv)

    def run(self, inputs: ModelInputs, carried: Carried | None, kv: KVPool) -> Carried | ModelOutput:
        return self._for(inputs).run(inputs, carried, kv)

    def _for(self, inputs: ModelInputs) -> LlamaLike:
        return self._plain if inputs.adapters is None else self._adapted
