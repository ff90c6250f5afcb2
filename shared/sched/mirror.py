"""Committed lengths of a batch, twice: on the device for the forward, on the host for planning.

Both change together and neither changes in place: a plan in flight holds the old tensor (rules S7, S8; #26020).
Device work goes through the schedule stream; the result tensor exists at once and is filled in stream order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from shared.device.stream import Stream
from shared.engine.plan import Int64s


class LengthMirror:
    """`device`: (B,) int64, faithful to `lo` whenever a plan is frozen. Host bounds: lo <= true length <= hi; plain
    decoding keeps lo == hi. With speculation `lo` is the last processed result, `hi` adds what is in flight."""

    def __init__(self, schedule: Stream, lengths: Int64s, device: str) -> None:
        self._schedule = schedule
        self._device_name = device
        self.lo = lengths.copy()
        self.hi = lengths.copy()
        self.device = torch.from_numpy(self.lo.copy()).to(device, non_blocking=True)

    def __len__(self) -> int:
        return len(self.lo)

    def advance(self, by: Int64s) -> None:
        """The rows moved by known amounts: a new tensor, `seq_lens + 1`, never `+=`."""
        if not by.any():
            return
        delta, old = torch.from_numpy(by.copy()).to(self._device_name), self.device
        self.device = self._make(len(by), lambda out: torch.add(old, delta, out=out))
        self.lo, self.hi = self.lo + by, self.hi + by

    def widen(self, rows: Int64s, width: int) -> None:
        """A step that may commit up to `width` tokens of these rows was launched."""
        self.hi = self.hi.copy()
        self.hi[rows] += width

    def narrow(self, index: int, committed: int, in_flight: int) -> None:
        """A result says that row `index` had `committed` tokens after its step; later steps add up to in_flight."""
        self.lo[index] = max(self.lo[index], committed)
        self.hi[index] = max(self.lo[index], min(self.hi[index], committed + in_flight))

    def refresh(self) -> None:
        """Rebind the device tensor to the host's lower bounds (after results moved them)."""
        self.device = torch.from_numpy(self.lo.copy()).to(self._device_name, non_blocking=True)

    def set_exact(self, lengths: torch.Tensor) -> None:
        """`resolve_seq_lens_cpu`'s lengths: device and host together."""
        self.device = lengths
        self.lo = lengths.cpu().numpy().copy()
        self.hi = self.lo.copy()

    def filter(self, keep: Int64s) -> None:
        """Keep these rows, in their order."""
        self.device = self.take(keep)
        self.lo, self.hi = self.lo[keep], self.hi[keep]

    def merge(self, other: LengthMirror) -> None:
        first, second = self.device, other.device
        self.device = self._make(len(self) + len(other), lambda out: torch.cat([first, second], out=out))
        self.lo, self.hi = np.concatenate([self.lo, other.lo]), np.concatenate([self.hi, other.hi])

    def take(self, rows: Int64s) -> torch.Tensor:
        """Device lengths of some rows; all rows: the tensor itself, by reference."""
        if len(rows) == len(self):
            return self.device
        old, index = self.device, torch.from_numpy(rows.copy()).to(self._device_name)
        return self._make(len(rows), lambda out: torch.index_select(old, 0, index, out=out))

    def _make(self, size: int, fill: Callable[[torch.Tensor], object]) -> torch.Tensor:
        return launch_fill(self._schedule, self._device_name, size, fill)


def launch_fill(schedule: Stream, device: str, size: int, fill: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """A new (size,) int64 tensor that `fill` writes on the schedule stream."""
    out = torch.empty(size, dtype=torch.int64, device=device)

    def run() -> None:
        fill(out)

    schedule.launch(run, label="seq_lens")
    return out


def concat_lengths(schedule: Stream, chunks: torch.Tensor, decodes: torch.Tensor) -> torch.Tensor:
    """Lengths of a mixed step: chunk rows first."""
    size = len(chunks) + len(decodes)
    return launch_fill(schedule, str(chunks.device), size, lambda out: torch.cat([chunks, decodes], out=out))
