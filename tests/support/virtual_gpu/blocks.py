"""Memory of a virtual GPU: blocks of host memory behind tensors that say another device.

    tensor on vgpu:0 --> storage --> DLPack wrapper --> Block --> uint8 tensor on the CPU, where the work is done

The tensors are torch's own, made from a DLPack record that names an extension device; views, shapes and lifetimes are
torch's too. When the last storage on a block is gone the wrapper tells so (freed.py). Freed memory is overwritten
in the order of the stream it was allocated on, and handed out again at once to that stream: as the caching allocator
may.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from tests.support.virtual_gpu.freed import Freed

if TYPE_CHECKING:
    from tests.support.virtual_gpu.graph import GraphMemory

POISON = 0xF5  # far from zero in every format: -6e32 as float32 and bfloat16, far below zero as an integer
GRANULE = 512
EXTENSION_DEVICE = 12  # kDLExtDev, which torch takes for PrivateUse1
INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6
CODES = {
    torch.int8: INT, torch.int16: INT, torch.int32: INT, torch.int64: INT,
    torch.uint8: UINT, torch.uint16: UINT, torch.uint32: UINT, torch.uint64: UINT,
    torch.float16: FLOAT, torch.float32: FLOAT, torch.float64: FLOAT,
    torch.bfloat16: BFLOAT, torch.complex64: COMPLEX, torch.complex128: COMPLEX, torch.bool: BOOL,
}  # fmt: skip
CAPSULE = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_freed = Freed()
_wrapped: dict[int, tuple[Any, ...]] = {}  # by address: the record, what it points to, and its `on_free`


def hear_freed() -> None:
    """Call the `on_free` of every storage that is gone."""
    for address in _freed.take():
        *_, on_free = _wrapped.pop(address)
        on_free()


class Block:
    """Host memory that plays device memory. `owner`: the device. `handle`: of the stream that it was allocated on.
    `lent`: handles of other streams that may still use it when it is freed. `seen`: addresses in it that the race
    detector knows. `life`: how often it was handed out. `memory_of`: graphs that it is kept for."""

    __slots__ = (
        "__weakref__", "handle", "lent", "life", "memory", "memory_of", "num_bytes", "num_users", "owner", "seen",
        "start",
    )  # fmt: skip

    def __init__(self, num_bytes: int, owner: object) -> None:
        self.num_bytes = num_bytes
        self.memory = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        self.start = self.memory.data_ptr()
        self.handle = 0
        self.num_users = 0
        self.life = 0
        self.memory_of: GraphMemory | None = None
        self.owner = owner
        self.lent: set[int] = set()
        self.seen: set[int] = set()


BLOCKS: WeakValueDictionary[int, Block] = WeakValueDictionary()  # by the address of their first byte


def rounded(num_bytes: int) -> int:
    return max(GRANULE, -(-num_bytes // GRANULE) * GRANULE)


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last."""
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def wrap(
    block: Block,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    index: int,
    on_free: Callable[[], None],
) -> torch.Tensor:
    """A tensor on vgpu:index whose storage begins with the block. `on_free` is called once, by a `hear_freed`."""
    code = CODES.get(dtype, UINT)
    assert dtype in CODES or dtype.itemsize == 1, f"no {dtype} on the virtual GPU"
    ndim = len(size)
    shape, strides = (ctypes.c_int64 * ndim)(*size), (ctypes.c_int64 * ndim)(*stride)
    tensor = _Tensor(
        block.start, _Device(EXTENSION_DEVICE, index), ndim, _Type(code, 8 * dtype.itemsize, 1),
        ctypes.addressof(shape), ctypes.addressof(strides), 0,
    )  # fmt: skip
    managed = _Managed(tensor, None, _freed.function)
    address = ctypes.addressof(managed)
    _wrapped[address] = (managed, shape, strides, block, on_free)
    made = torch._C._from_dlpack(_new_capsule(address, CAPSULE, None))
    return made if dtype in CODES else made.view(dtype)


def block_of(tensor: torch.Tensor) -> Block | None:
    """None: it has no elements, so no memory."""
    if not tensor.numel():
        return None
    return BLOCKS[first_byte(tensor) - tensor.storage_offset() * tensor.element_size()]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in the same memory, as a CPU tensor."""
    block = block_of(tensor)
    if block is None:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    flat = block.memory if tensor.dtype is torch.uint8 else block.memory.view(tensor.dtype)
    return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def first_byte(tensor: torch.Tensor) -> int:
    """The address, not counted as a crossing."""
    return torch._C.TensorBase.data_ptr(tensor)
