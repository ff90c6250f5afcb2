"""Take one step's arrays to the device and bring its results back.

On a GPU, each direction is one copy through a pinned slot:

    host      pinned |rows|lengths|page table|...|              |tokens|lengths|...|   read when the lease is closed
                      ----- upload ----->                        <---- download ----
    device    block  |rows|lengths|page table|...|   the step   |tokens|lengths|...|

Both copies are asynchronous, so the step's lease holds each slot until the step is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

HostArray = npt.NDArray[np.generic] | torch.Tensor
Pinned = Callable[[int], torch.Tensor]  # takes a size in bytes; returns page-locked host memory, (bytes,) uint8
ALIGNED = 16  # bytes; an array that begins at a multiple of this can be viewed in its dtype
SMALLEST_SLOT = 1 << 16  # bytes

S = TypeVar("S")


class SlotHolder(Protocol):
    """A step's lease."""

    def hold(self, give_back: Callable[[], None]) -> None:
        """Call `give_back` once the step is done."""
        ...


class HostCopy(Protocol):
    def read(self) -> dict[str, torch.Tensor]:
        """Return tensors that the host owns. Call this after the copy's event has fired and before the lease ends."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    begin: int  # bytes
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, block: torch.Tensor) -> torch.Tensor:
        return block[self.begin : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """One step's results in one device block, (n,) uint8."""

    block: torch.Tensor
    places: Mapping[str, Place]


Packed = Mapping[str, torch.Tensor] | SideBySide  # a step's results: unchanged on a CPU, packed on a device


class Boundary(Protocol):
    """Moves arrays between host and device, inside closures. `is_device`: false on a CPU, where nothing is copied."""

    is_device: bool

    @property
    def num_taken(self) -> int:
        """Return the number of slots that leases hold."""
        ...

    def upload(self, arrays: Mapping[str, HostArray], holder: SlotHolder) -> dict[str, torch.Tensor]:
        """Return the arrays as tensors, with names, shapes and dtypes unchanged. Runs on the forward stream.

        The tensors are read-only, because on a CPU they share the arrays' memory.
        """
        ...

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> Packed:
        """Pack the tensors, on the stream that made them."""
        ...

    def download(self, packed: Packed, holder: SlotHolder) -> HostCopy:
        """Begin the copy, on a stream that waits for the packing."""
        ...


class SameMemory:
    """Converts an array that several steps share only once."""

    is_device = False
    num_taken = 0

    def __init__(self) -> None:
        self._newest: dict[str, tuple[HostArray, torch.Tensor]] = {}

    def upload(self, arrays: Mapping[str, HostArray], holder: SlotHolder) -> dict[str, torch.Tensor]:
        return {name: self._tensor(name, array) for name, array in arrays.items()}

    def _tensor(self, name: str, array: HostArray) -> torch.Tensor:
        newest = self._newest.get(name)
        if newest is None or newest[0] is not array:
            newest = self._newest[name] = array, as_tensor(array)
        return newest[1]

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> Packed:
        return tensors

    def download(self, packed: Packed, holder: SlotHolder) -> HostCopy:
        assert not isinstance(packed, SideBySide)
        return OnHost(packed)


@dataclass(frozen=True, slots=True)
class OnHost:
    tensors: Mapping[str, torch.Tensor]

    def read(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)


class PinnedCopies:
    """Copies through pinned slots. Slots are made on demand and reused: about two per open lease."""

    is_device = True

    def __init__(self, device: torch.device, pinned: Pinned) -> None:
        self._device = device
        self._into = Slots(lambda size: (pinned(size), torch.empty(size, dtype=torch.uint8, device=device)))
        self._out = Slots(pinned)

    @property
    def num_taken(self) -> int:
        return self._into.num_taken + self._out.num_taken

    def upload(self, arrays: Mapping[str, HostArray], holder: SlotHolder) -> dict[str, torch.Tensor]:
        tensors = {name: as_tensor(array) for name, array in arrays.items()}
        places = lay_side_by_side(tensors)
        size = size_of(places)
        host, device = self._into.take(size, holder)
        for place, tensor in zip(places, tensors.values(), strict=True):
            place.of(host).copy_(tensor)
        block = device[:size]
        block.copy_(host[:size], non_blocking=True)
        return {name: place.of(block) for name, place in zip(tensors, places, strict=True)}

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> Packed:
        places = lay_side_by_side(tensors)
        block = torch.empty(size_of(places), dtype=torch.uint8, device=self._device)
        for place, tensor in zip(places, tensors.values(), strict=True):
            place.of(block).copy_(tensor)
        return SideBySide(block, dict(zip(tensors, places, strict=True)))

    def download(self, packed: Packed, holder: SlotHolder) -> HostCopy:
        assert isinstance(packed, SideBySide)
        size = len(packed.block)
        copy = self._out.take(size, holder)[:size]
        copy.copy_(packed.block, non_blocking=True)
        return InSlot(copy, packed.places)


@dataclass(frozen=True, slots=True)
class InSlot:
    """A step's results in a pinned slot. `read` copies the results, because later steps reuse the slot."""

    slot: torch.Tensor
    places: Mapping[str, Place]

    def read(self) -> dict[str, torch.Tensor]:
        own = self.slot.clone()
        return {name: place.of(own) for name, place in self.places.items()}


class Slots(Generic[S]):
    """Keeps the free slots. A slot is pinned memory, or pinned memory and equally much device memory."""

    def __init__(self, make: Callable[[int], S]) -> None:
        self._make = make
        self._free: list[tuple[int, S]] = []
        self.num_taken = 0

    def take(self, num_bytes: int, holder: SlotHolder) -> S:
        """Return a slot of at least `num_bytes` bytes. `holder` gives the slot back."""
        found = min((slot for slot in self._free if slot[0] >= num_bytes), key=lambda slot: slot[0], default=None)
        if found is None:
            size = max(SMALLEST_SLOT, 1 << num_bytes.bit_length())
            with torch.inference_mode(False):  # slots are used after this closure has left inference mode
                found = size, self._make(size)
        else:
            self._free.remove(found)
        taken = found
        self.num_taken += 1
        holder.hold(lambda: self.give_back(taken))
        return taken[1]

    def give_back(self, slot: tuple[int, S]) -> None:
        """Take back a slot that nothing reads any more."""
        self._free.append(slot)
        self.num_taken -= 1


def lay_side_by_side(tensors: Mapping[str, torch.Tensor]) -> tuple[Place, ...]:
    places: list[Place] = []
    for tensor in tensors.values():
        begin = -(-size_of(places) // ALIGNED) * ALIGNED
        end = begin + tensor.numel() * tensor.element_size()
        places.append(Place(begin, end, tuple(tensor.shape), tensor.dtype))
    return tuple(places)


def size_of(places: tuple[Place, ...] | list[Place]) -> int:
    """Return the size in bytes."""
    return places[-1].end if places else 0


def as_tensor(array: HostArray) -> torch.Tensor:
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
