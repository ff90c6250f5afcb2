"""Know a node's LoRA adapters: clients' names, digests of the weights, and slots.

    add            a name for a digest, which gets a free slot unless it has one
    remove_name    a digest without a name keeps its slot while requests use it
    free           the digest's slots are free

A model with a `short_context` takes no adapters: there LONG (`shared.core.page_identity`) has a slot, but no name.
Holds no weights.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.core.errors import ConfigError
from shared.core.page_identity import LONG

MAX_ADAPTERS = 256  # names and slots; a node's Hello lists the names


class AdapterTable:
    """Owned by the node's loop thread. Slot 0 means no adapter."""

    def __init__(self, named: Iterable[tuple[str, str]] = (), num_spare: int = 0, short_context: int = 0) -> None:
        """`named`: name and digest of each adapter loaded at the start, in the model's order. `short_context`: as in
        ModelSpec. Raise ConfigError."""
        own = list(named)
        if len(own) + num_spare > MAX_ADAPTERS:
            raise ConfigError(f"{len(own)} adapters and {num_spare} slots for more: at most {MAX_ADAPTERS} together")
        self._names = dict(own)
        self._slots = ["", *(digest for _, digest in own), *[""] * num_spare, *[LONG] * (short_context > 0)]
        self.short_context = short_context

    @property
    def named(self) -> dict[str, str]:
        """Return the digests of adapters that take new requests, by name."""
        return dict(self._names)

    @property
    def digests(self) -> list[str]:
        return list(filter(None, self._slots))

    @property
    def leaving(self) -> list[str]:
        """Return the digests that have a slot but no name."""
        served = {LONG, *self._names.values()}  # the loop asks at each turn
        return [digest for digest in dict.fromkeys(self.digests) if digest not in served]

    def serves(self, digest: str) -> bool:
        """Return whether new requests may use these weights. "" is the model without an adapter."""
        return not digest or digest in self._names.values()

    def holds(self, digest: str) -> bool:
        """Return whether a slot has these weights, if only for requests under way."""
        return digest in self._slots

    def slot(self, digest: str) -> int:
        """Raise ValueError for an unknown adapter."""
        return self._slots.index(digest)

    def add(self, name: str, digest: str) -> int:
        """Return the slot that needs these weights, or 0 if they are there. Raise ConfigError, and change nothing."""
        if self._names.get(name, digest) != digest:
            raise ConfigError(f"{name} has other weights here ({self._names[name]}): remove it first")
        if len(self._names) >= MAX_ADAPTERS and name not in self._names:
            raise ConfigError(f"there are {MAX_ADAPTERS} adapters here already: remove one first")
        slot = 0
        if not self.holds(digest):
            if "" not in self._slots[1:]:
                raise ConfigError(f"all {len(self._slots) - 1} slots (--lora-slots) are taken: remove an adapter first")
            slot = self._slots.index("", 1)
            self._slots[slot] = digest
        self._names[name] = digest
        return slot

    def remove_name(self, name: str) -> str:
        """Return the digest that had the name, or "" if none had."""
        return self._names.pop(name, "")

    def free(self, digest: str) -> list[int]:
        """Free the digest's slots, and return them."""
        slots = [slot for slot, own in enumerate(self._slots) if slot and own == digest]
        for slot in slots:
            self._slots[slot] = ""
        return slots
