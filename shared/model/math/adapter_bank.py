"""Define how a running model gets other adapters. Which adapter is in which slot is AdapterTable's matter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shared.model.math.interface import Model


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    digest: str
    weights: Any  # in the form that the bank's model computes with


class AdapterBank(Protocol):
    num_spare: int  # slots behind those of the adapters loaded at the start

    def read(self, folder: Path) -> ReadAdapter:
        """Read and check an adapter. Any thread may call this beside a step. Raise ConfigError."""
        ...

    def put(self, slot: int, adapter: ReadAdapter) -> None:
        """Fill a slot, which no request uses. A step in flight may still use it for a request that has ended."""
        ...

    def clear(self, slot: int) -> None:
        """Drop a slot's weights, like `put`."""
        ...


def bank_of(model: Model) -> AdapterBank | None:
    """Return None for a model whose adapters are those of the start."""
    bank: AdapterBank | None = getattr(model, "bank", None)
    return bank if bank is not None and bank.num_spare else None
