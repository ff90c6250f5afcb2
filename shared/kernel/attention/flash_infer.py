"""Compute attention with the library FlashInfer (extra `gpu`) on our pages: an AttentionBackend.

    begin    our kernels' begin; a plan of the library for the prompt chunks, and one for the decode rows
    attend   our kernels rotate q and k, and write k and v to their pages -> the library attends, part by part

Our pool is the library's layout HND as it is: [page][k, v][kv_head][slot][head_dim] with any stride between pages. The
library divides keys among programs on the host, so it needs exact lengths there. Draft trees run on our own kernels.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared.device.gpu import Gpu
from shared.kernel.attention.attention import AttentionInputs, AttentionShape, WritesPages
from shared.kernel.code.step_layout import HostLengths, Layout

MODULE, PACKAGE = "flashinfer", "flashinfer-python"
WORKSPACE_BYTES = 384 << 20  # for partial results of split keys, which all wrappers share
PLAN_BYTES = 8 << 20  # of a plan on the device, as in the library's own wrappers
DTYPES = (torch.bfloat16,)
HEAD_DIMS = (64, 128)  # sizes that `compare_attention` covers
LEAST_GROUP = 4  # query heads per key head, from which decoding on tensor cores is faster


class RowKind(Enum):
    """Rows of a step that one wrapper computes."""

    CHUNKS = "prompt chunks"
    WINDOWS = "decode rows of several tokens"
    DECODE = "decode rows of one token"


@dataclass(frozen=True, slots=True)
class LibraryAttention:
    """`is_asked`: by name, so that an unsuitable model is an error. `refused`: why `auto` may not take it; "" if it
    may."""

    version: str
    gpu: Gpu
    is_asked: bool = False
    refused: str = ""


def installed_version() -> str:
    """Return "" if the library is missing."""
    if importlib.util.find_spec(MODULE) is None:
        return ""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # a bare copy of its source
        return str(importlib.import_module(MODULE).__version__)


def full_name(version: str) -> str:
    """Return the library's name and version, under which the result of `compare_attention` is remembered."""
    return f"{MODULE} {version}"


def why_unsuitable(shape: AttentionShape, dtype: torch.dtype, kv_dtype: str) -> str:
    """Return why a model needs our own attention; "" if it doesn't. `kv_dtype`: of ModelSpec."""
    reasons = {
        f"FlashInfer has no kernels for {dtype}": dtype not in DTYPES,
        f"FlashInfer's use with heads of {shape.head_dim} was not checked": shape.head_dim not in HEAD_DIMS,
        "FlashInfer would need a plan for every window": any(shape.windows),
        f"FlashInfer does not know our scales of --kv-dtype {kv_dtype}": kv_dtype != "auto",
    }
    return next((why for why, is_so in reasons.items() if is_so), "")


@dataclass(frozen=True, slots=True)
class PlanRows:
    """B rows that a wrapper plans for. `lengths` (B,): numbers of keys, the step's own included. table: (B, P) int32 on
    the device."""

    q_lens: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    table: torch.Tensor


class Workspace:
    """The device memory that a model's wrappers share: they run one after another, and plans lie in the order of steps.

    A step has a plan of its chunks and one of its other rows, so these have separate places."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.floats = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans = {is_chunks: torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device) for is_chunks in (0, 1)}

    def wrapper(self, part: RowKind, group: int, fixed: dict[str, torch.Tensor] | None) -> Any:
        """Make a wrapper. `group`: query heads per key head. `fixed`: buffers that a graph reads, by short names."""
        library = importlib.import_module(MODULE)
        graph: dict[str, object] = {"use_cuda_graph": fixed is not None}
        if part is RowKind.DECODE:
            for name, buffer in (fixed or {}).items():
                graph[f"paged_kv_{name}_buffer"] = buffer
            made = library.BatchDecodeWithPagedKVCacheWrapper(
                self.floats, "HND", use_tensor_cores=group >= LEAST_GROUP, backend="fa2", **graph
            )
        else:
            for name, buffer in (fixed or {}).items():
                graph["qo_indptr_buf" if name == "qo_indptr" else f"paged_kv_{name}_buf"] = buffer
            backend = "auto" if part is RowKind.CHUNKS else "fa2"  # short windows leave large tiles empty
            made = library.BatchPrefillWithPagedKVCacheWrapper(self.floats, "HND", backend=backend, **graph)
        made.reset_workspace_buffer(self.floats, self._plans[part is RowKind.CHUNKS])
        return made


class PlannedRows:
    """One wrapper of the library, and the pinned memory from which its plans copy.

    A plan's copies run when the device comes to them. The library's own pinned memory is of the wrapper, too. So a plan
    first waits until the copies of the last one have run: the step before this one has ended by then, or nearly so."""

    def __init__(self, part: RowKind, shape: AttentionShape, dtype: torch.dtype, gpu: Gpu, wrapper: Any) -> None:
        self._part, self._shape, self._dtype, self._gpu, self._wrapper = part, shape, dtype, gpu, wrapper
        self._staging = gpu.pinned((3, 1), torch.int32)
        self._copied = gpu.new_event()

    def plan_rows(self, rows: PlanRows, page_size: int, *, is_graph: bool = False) -> None:
        self._copied.synchronize()
        num, pages = len(rows.lengths), -(-rows.lengths // page_size)
        if self._staging.shape[1] <= num:
            self._staging = self._gpu.pinned((3, 2 * num), torch.int32)
        last = rows.lengths - np.maximum(pages - 1, 0) * page_size
        bounds, last_lens, q_bounds = self._staged(starts(pages), last, starts(rows.q_lens))
        indices = packed_pages(rows.table, bounds.to(rows.table.device, non_blocking=True), int(bounds[-1]))
        shape = self._shape
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, page_size)
        options = {"q_data_type": self._dtype, "kv_data_type": self._dtype, "sm_scale": shape.score_scale}
        if self._part is RowKind.DECODE:
            self._wrapper.plan(bounds, indices, last_lens, *sizes, **options)
        else:
            uniform = {"uniform_q_len": int(rows.q_lens[0])} if is_graph else {}
            self._wrapper.plan(q_bounds, bounds, indices, last_lens, *sizes, causal=True, **options, **uniform)
        self._copied.record()

    def _staged(self, *arrays: npt.NDArray[np.int64]) -> list[torch.Tensor]:
        found = []
        for place, array in zip(self._staging, arrays, strict=True):
            place[: len(array)].numpy()[:] = array
            found.append(place[: len(array)])
        return found

    def run_rows(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        """q and out: (T, heads, D), contiguous. kv: a layer of the pool, (num_pages, 2, kv_heads, page_size, D)."""
        self._wrapper.run(q, kv, out=out)


@dataclass(frozen=True, slots=True)
class PlannedPart:
    tokens: slice
    rows: PlannedRows


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """`layout`: of the graph's inputs; kept, because it is known by its id."""

    layout: Layout[torch.Tensor]
    part: PlannedPart


class FlashInferAttention:
    """`own`: writes pages, and attends in steps with draft trees."""

    gathers = False

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, own: WritesPages, gpu: Gpu, device: torch.device
    ) -> None:
        self._shape, self._dtype, self._own, self._gpu = shape, dtype, own, gpu
        self._workspace = Workspace(device)
        self._eager: dict[RowKind, PlannedRows] = {}
        self._graphs: dict[int, PlannedGraph] = {}
        self._indices = torch.empty(0, dtype=torch.int32, device=device)  # of all graphs: each plan writes them anew

    def begin(self, inputs: AttentionInputs, kv: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Raise ValueError without exact lengths on the host."""
        self._own.begin(inputs, kv, scales)
        self._kv, self._is_own = kv, inputs.visible is not None
        if self._is_own:
            return
        graph = self._graphs.get(id(inputs.layout))
        self._parts = [graph.part] if graph is not None else self._plan_step(inputs, kv.shape[4])

    def attend(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        if self._is_own:
            return self._own.attend(layer, qkv, q_norm, k_norm)
        q = self._own.write(layer, qkv, q_norm, k_norm)
        out = torch.empty_like(q)
        for part in self._parts:
            part.rows.run_rows(q[part.tokens], self._kv[:, layer], out[part.tokens])
        return out.flatten(1)

    def _plan_step(self, inputs: AttentionInputs, page_size: int) -> list[PlannedPart]:
        host = inputs.layout.host
        if host is None or host.seq_lens is None:
            raise ValueError("FlashInfer plans with exact lengths, and the host has none")
        q_lens = np.diff(host.cu_q_lens).astype(np.int64)
        num_rows = len(q_lens)
        num_chunks = num_rows - host.num_running
        is_decode = num_chunks < num_rows and q_lens[num_chunks] == 1
        parts = []
        for part, rows in (
            (RowKind.CHUNKS, slice(0, num_chunks)),
            (RowKind.DECODE if is_decode else RowKind.WINDOWS, slice(num_chunks, num_rows)),
        ):
            tokens = slice(int(host.cu_q_lens[rows.start]), int(host.cu_q_lens[rows.stop]))
            if tokens.start == tokens.stop:
                continue
            planned = self._eager.get(part) or self._eager.setdefault(part, self._planned_rows(part))
            lengths = host.seq_lens[rows] + q_lens[rows]
            planned.plan_rows(PlanRows(q_lens[rows], lengths, inputs.layout.page_table[rows]), page_size)
            parts.append(PlannedPart(tokens, planned))
        return parts

    def _planned_rows(self, part: RowKind, fixed: dict[str, torch.Tensor] | None = None) -> PlannedRows:
        group = self._shape.num_heads // self._shape.num_kv_heads
        wrapper = self._workspace.wrapper(part, group, fixed)
        return PlannedRows(part, self._shape, self._dtype, self._gpu, wrapper)

    def plan_graph(self, fixed: AttentionInputs, host: HostLengths | None, page_size: int) -> None:
        """A padding row reads page 0. Raise ValueError for a graph whose rows do not all decode."""
        if fixed.visible is not None:
            return
        if fixed.layout.host is None or fixed.layout.host.num_running < len(fixed.layout.page_table):
            raise ValueError("FlashInfer's plans are made for graphs of decode rows only")
        table, width = fixed.layout.page_table, fixed.layout.max_q_len
        found = self._graphs.get(id(fixed.layout))
        if found is None:
            part = PlannedPart(slice(None), self._graph_rows(table, width))
            found = self._graphs[id(fixed.layout)] = PlannedGraph(fixed.layout, part)
        q_lens = np.full(len(table), width, np.int64)
        lengths = q_lens.copy()
        if host is not None:
            if host.seq_lens is None:
                raise ValueError("FlashInfer plans with exact lengths, and the host has none")
            lengths[: len(host.seq_lens)] += host.seq_lens
        found.part.rows.plan_rows(PlanRows(q_lens, lengths, table), page_size, is_graph=True)

    def _graph_rows(self, table: torch.Tensor, width: int) -> PlannedRows:
        num, device = len(table), table.device
        if len(self._indices) < table.numel():
            self._indices = torch.empty(table.numel(), dtype=torch.int32, device=device)
        fixed = {
            "indptr": torch.zeros(num + 1, dtype=torch.int32, device=device),
            "indices": self._indices,
            "last_page_len": torch.zeros(num, dtype=torch.int32, device=device),
        }
        if width == 1:
            return self._planned_rows(RowKind.DECODE, fixed)
        fixed["qo_indptr"] = torch.zeros(num + 1, dtype=torch.int32, device=device)
        return self._planned_rows(RowKind.WINDOWS, fixed)


def starts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return (B + 1,): where each row begins, and where the last one ends."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))


def packed_pages(table: torch.Tensor, bounds: torch.Tensor, num: int) -> torch.Tensor:
    """Return (num,) int32: each row's first pages, row after row. bounds (B + 1,) int32, on the table's device."""
    nth = torch.arange(num, dtype=torch.int32, device=table.device)
    row = torch.searchsorted(bounds[1:].contiguous(), nth, right=True)
    return table[row, (nth - bounds[row]).long()]
