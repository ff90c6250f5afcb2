"""Between the host and the device of one step: its arrays in, its results out. Knows nothing of what they mean.

On a CPU both sides are the same memory. A device gets all of a step's arrays by one copy, out of a pinned slot, and
gives all of its results by one copy, into another:

    host      pinned |rows|lengths|page table|...|              |tokens|lengths|...|   read when the lease is closed
                      ----- upload ----->                        <---- download ----
    device    block  |rows|lengths|page table|...|   the step   |tokens|lengths|...|

Both copies are only enqueued. A slot belongs to the step's lease, which gives it back once the step is done, so nobody
writes it while a copy may still read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

HostArray = npt.NDArray[np.generic] | torch.Tensor
Pinned = Callable[[int], torch.Tensor]  # bytes -> (bytes,) uint8, page-locked host memory for asynchronous copies
ALIGNED = 16  # bytes: each array of a block begins at a multiple, so that it may be seen in its own dtype
SMALLEST_SLOT = 1 << 16  # bytes

S = TypeVar("S")


class SlotHolder(Protocol):
    """A lease: keeps slots until its step is done."""

    def hold(self, give_back: Callable[[], None]) -> None:
        """Call `give_back` when nothing of the step is under way any more."""
        ...


class HostCopy(Protocol):
    """Results on their way to the host."""

    def read(self) -> dict[str, torch.Tensor]:
        """The host's own, under the names they were packed with. Call it once the copy's event has fired, and before
        the lease ends."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where one array lies in a block."""

    begin: int  # bytes
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, block: torch.Tensor) -> torch.Tensor:
        return block[self.begin : self.end].view(self.dtype).view(self.shape)

    def first(self, num: int) -> Place:
        """Of the array's first `num` rows."""
        shape = (num, *self.shape[1:])
        return Place(self.begin, self.begin + math.prod(shape) * self.dtype.itemsize, shape, self.dtype)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Results of a step in one block of the device, (n,) uint8."""

    block: torch.Tensor
    places: Mapping[str, Place]


Packed = Mapping[str, torch.Tensor] | SideBySide  # results as they are, on a CPU, or packed on a device


class Boundary(Protocol):
    """`is_device`: whether anything is copied at all. Called inside closures, on the streams named."""

    is_device: bool

    @property
    def num_taken(self) -> int:
        """How many slots leases hold."""
        ...

    def upload(self, arrays: Mapping[str, HostArray], holder: SlotHolder) -> dict[str, torch.Tensor]:
        """Tensors of the same names, shapes and dtypes, on the forward stream. On a CPU they are the arrays' memory:
        nobody may write them."""
        ...

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> Packed:
        """Called on the stream that made the tensors."""
        ...

    def download(self, packed: Packed, holder: SlotHolder) -> HostCopy:
        """Begin the copy, on a stream that waits for the one which packed."""
        ...


class SameMemory:
    """A CPU's."""

    is_device = False
    num_taken = 0

    def upload(self, arrays: Mapping[str, HostArray], holder: SlotHolder) -> dict[str, torch.Tensor]:
        return {name: as_tensor(array) for name, array in arrays.items()}

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> Packed:
        return tensors

    def download(self, packed: Packed, holder: SlotHolder) -> HostCopy:
        assert not isinstance(packed, SideBySide)
        return OnHost(packed)


@dataclass(frozen=True, slots=True)
class OnHost:
    """Results that need no copy."""

    tensors: Mapping[str, torch.Tensor]

    def read(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)


class PinnedCopies:
    """A device's. Slots are made as they are needed and used for ever: about as many as leases are open, twice."""

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

    def refill(
        self, block: torch.Tensor, places: Mapping[str, Place], arrays: Mapping[str, HostArray], holder: SlotHolder
    ) -> None:
        """Each array at the beginning of its place, zeros behind it: by one copy into `block`, on the current stream.
        What lies behind the last place stays as it is."""
        size = size_of(list(places.values()))
        host = self._out.take(size, holder)[:size]
        host.zero_()
        for name, place in places.items():
            array = as_tensor(arrays[name])
            place.of(host)[tuple(map(slice, array.shape))].copy_(array)
        block[:size].copy_(host, non_blocking=True)

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
    """Results in a pinned slot that others get after this step."""

    slot: torch.Tensor
    places: Mapping[str, Place]

    def read(self) -> dict[str, torch.Tensor]:
        own = self.slot.clone()
        return {name: place.of(own) for name, place in self.places.items()}


class Slots(Generic[S]):
    """Owner of the slots of one kind that no lease holds."""

    def __init__(self, make: Callable[[int], S]) -> None:
        self._make = make
        self._free: list[tuple[int, S]] = []
        self.num_taken = 0

    def take(self, num_bytes: int, holder: SlotHolder) -> S:
        """One of at least so many bytes, which comes back when `holder` gives it back."""
        found = min((slot for slot in self._free if slot[0] >= num_bytes), key=lambda slot: slot[0], default=None)
        if found is None:
            size = max(SMALLEST_SLOT, 1 << num_bytes.bit_length())
            with torch.inference_mode(False):  # a slot outlives the closure that asks for it
                found = size, self._make(size)
        else:
            self._free.remove(found)
        taken = found
        self.num_taken += 1
        holder.hold(lambda: self.give_back(taken))
        return taken[1]

    def give_back(self, slot: tuple[int, S]) -> None:
        """Nothing reads the slot any more, neither a copy under way nor the step that it was for."""
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
    """Bytes of a block with these places."""
    return places[-1].end if places else 0


def as_tensor(array: HostArray) -> torch.Tensor:
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
