"""The second net: a TorchDispatchMode that sees every operator of a thread. It finds tensors that go around the
accessors of registered buffers, and races on all the tensors nobody declared, by whole storage.

Blind to numpy and raw pointers, except that `.numpy()` and `.tolist()` themselves are seen (as reads); the lint test
of the sources bans both where a device tensor could be meant.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.hazards.clocks import Clock
from tests.support.hazards.detector import Detector

RAW = ("aten::resolve_neg",)  # what `.numpy()` and `.tolist()` call; a read beyond the operators
SWEEP_EVERY = 4096


@dataclass(slots=True)
class StorageState:
    """A weak reference keeps the address from being given to another storage while this is known."""

    ref: StorageWeakRef
    write: tuple[int, int, int] | None = None  # actor, clock, place
    reads: dict[int, tuple[int, int]] = field(default_factory=dict)  # actor -> clock, place


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of a registered buffer. `may_read`: handed out by reference, so reads of the closure are its own."""

    name: str
    begin: int
    end: int


class StorageWatch:
    """State of all storages that were seen; shared by the modes of all threads."""

    def __init__(self, detector: Detector) -> None:
        self.detector = detector
        self.num_ops = 0
        self._regions: list[Region] = []
        self._states: dict[int, StorageState] = {}
        self._marks: dict[object, Marks] = {}
        self._lock = threading.Lock()

    def protect(self, name: str, address: int, num_bytes: int) -> None:
        self._regions.append(Region(name, address, address + num_bytes))

    def marks_of(self, func: Any) -> Marks:
        marks = self._marks.get(func)
        if marks is None:
            marks = self._marks[func] = Marks.of(func)
        return marks

    def region_of(self, tensor: torch.Tensor) -> Region | None:
        address = tensor.data_ptr()
        return next((r for r in self._regions if r.begin <= address < r.end), None)

    def op(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
        """One operator of the running actor: what it read, what it wrote, and what it made."""
        actor = self.detector.actor()
        if actor is None:
            return
        with self._lock:
            self._op(actor, reads, writes, outs, name)

    def _op(
        self,
        actor: int,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        outs: list[torch.Tensor],
        name: str,
    ) -> None:
        detector = self.detector
        self.num_ops += 1
        if self.num_ops % SWEEP_EVERY == 0:
            self._states = {key: state for key, state in self._states.items() if not state.ref.expired()}
        given = {_key(tensor) for tensor in [*reads, *writes]}
        fresh = [tensor for tensor in outs if _key(tensor) not in given]
        clock, place = detector.clocks.of(actor), detector.place_id()
        for tensor in reads:
            if not self._is_registered(tensor, name, False):
                self._read(tensor, actor, clock, place)
        for tensor in writes:
            if not self._is_registered(tensor, name, True):
                self._write(tensor, actor, clock, place)
        for tensor in fresh:
            self._write(tensor, actor, clock, place)

    def _is_registered(self, tensor: torch.Tensor, op: str, write: bool) -> bool:
        region = self.region_of(tensor)
        if region is None:
            return False
        detector = self.detector
        launch = detector.launch
        handed_out = launch is not None and region.name in launch.allowed and not write
        if region.name not in detector.scopes and not handed_out:
            verb = "written" if write else "read"
            detector.report(f"{region.name} is {verb} around its accessors by {op}\n  {detector.here()}")
        return True

    def _state(self, tensor: torch.Tensor) -> StorageState:
        key = _key(tensor)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = StorageState(StorageWeakRef(tensor.untyped_storage()))
        return state

    def _read(self, tensor: torch.Tensor, actor: int, clock: Clock, place: int) -> None:
        state = self._state(tensor)
        if state.write is not None and state.write[1] > clock[state.write[0]]:
            self._race("read not ordered behind a write", tensor, place, state.write[2])
        state.reads[actor] = (clock[actor], place)

    def _write(self, tensor: torch.Tensor, actor: int, clock: Clock, place: int) -> None:
        state = self._state(tensor)
        if state.write is not None and state.write[1] > clock[state.write[0]]:
            self._race("write not ordered behind a write", tensor, place, state.write[2])
        for other, (at, other_place) in state.reads.items():
            if at > clock[other]:
                self._race("write not ordered behind a read", tensor, place, other_place)
        state.write = (actor, clock[actor], place)

    def _race(self, kind: str, tensor: torch.Tensor, place: int, other: int) -> None:
        what = f"{tensor.dtype} tensor {tuple(tensor.shape)}".replace("torch.", "")
        self.detector.report(f"{what}: {kind}\n  {self.detector.place(place)}\n  {self.detector.place(other)}")


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _tensors(values: Iterable[object]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(_tensors(value))
    return found


class StorageMode(TorchDispatchMode):
    """Thread-local: the host's is entered by the fixture, a worker thread's around each of its closures."""

    def __init__(self, watch: StorageWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        watch = self._watch
        if watch.detector.muted:
            return out
        marks = watch.marks_of(func)
        if marks.is_view and isinstance(out, torch.Tensor) and _key(out) == _key(args[0]):
            return out
        reads, writes = marks.split(args, kwargs or {})
        watch.op(marks.name, reads, writes, _tensors(out if isinstance(out, list | tuple) else (out,)))
        return out


@dataclass(frozen=True, slots=True)
class Marks:
    """Of one operator, from its schema: which arguments it writes."""

    name: str
    is_view: bool
    writes: tuple[bool, ...]
    by_name: dict[str, bool]

    @classmethod
    def of(cls, func: Any) -> Marks:
        schema = func._schema
        written = [arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments]
        by_name = {arg.name: flag for arg, flag in zip(schema.arguments, written, strict=True)}
        return cls(schema.name, bool(func.is_view) and schema.name not in RAW, tuple(written), by_name)

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Tensors that are only read, tensors that are written."""
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for value, flag in zip(args, self.writes, strict=False):
            (writes if flag else reads).extend(_tensors((value,)))
        for name, value in kwargs.items():
            (writes if self.by_name.get(name) else reads).extend(_tensors((value,)))
        return reads, writes
