"""FlashInfer's wrappers on the virtual GPU, with the signatures of version 0.7.4. No code is theirs.

    with library_on(gpu):
        core = make_core(kind, gpu, attention=LibraryAttention("fake", gpu, is_asked=True))

`plan` takes what the library takes, from memory where the library takes it, and writes a schedule into its own pinned
memory, from which a copy goes to the device later. `run` launches a kernel that reads the schedule and the page numbers
when the device comes to it, and computes as our reference does. What the library would read wrongly, and what it would
refuse, fails here, or is in `wrong`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from shared.kernel.attention import flash_infer
from tests.support.virtual_gpu.blocks import first_byte, on_host
from tests.support.virtual_gpu.device import VirtualGpu

VERSION = "0.7.4"
INT_BYTES = 1 << 16  # the library's have 8 MiB
HEADER = 2  # of a schedule: rows, and whether there are bounds of queries
EMPTY = torch.empty(0, dtype=torch.int32)


class Wrapper:
    """What both kinds have in common."""

    def __init__(
        self, gpu: VirtualGpu, floats: torch.Tensor, kv_layout: str, use_cuda_graph: bool, backend: str, buffers: Any
    ) -> None:
        assert kv_layout == "HND" and backend in ("auto", "fa2", "fa3")
        assert floats.dtype is torch.uint8 and first_byte(floats) % 16 == 0
        self.gpu, self.device = gpu, floats.device
        self.is_graph, self.buffers = use_cuda_graph, buffers
        self.num_plans = 0
        self.reset_workspace_buffer(floats, torch.empty(INT_BYTES, dtype=torch.uint8, device=self.device))
        for buffer in buffers.values():
            assert not use_cuda_graph or (buffer.dtype is torch.int32 and buffer.device == self.device), buffers

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert int_workspace_buffer.device == float_workspace_buffer.device == self.device
        self.floats, self.ints = float_workspace_buffer, int_workspace_buffer
        self.pinned = self.gpu.pinned((int_workspace_buffer.numel(),), torch.uint8)

    def take(
        self, qo: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, page_size: int
    ) -> None:
        """Check a plan's arrays, and copy them and the schedule to the device."""
        assert self.gpu.captures.current is None, "a plan can't be captured"
        num = len(last)
        for array in (qo, indptr, last)[0 if len(qo) else 1 :]:
            assert array.dtype is torch.int32 and array.device.type == "cpu", array
            assert self.gpu.is_pinned(array), "a copy out of pageable memory"
        assert len(indptr) == num + 1 and indptr[0] == 0 and (indptr.diff() >= 0).all(), indptr
        assert indices.dtype is torch.int32 and indices.device == self.device and indices.is_contiguous()
        assert len(indices) == int(indptr[-1]), (len(indices), indptr)
        assert ((last >= 1) & (last <= page_size)).all(), last
        lens = (indptr.diff() - 1) * page_size + last
        if len(qo):
            assert len(qo) == num + 1 and qo[0] == 0, qo
            assert (qo.diff() <= lens).all(), "more queries than keys"
        if self.is_graph:
            assert num == len(self.buffers["last"]) == len(self.buffers["indptr"]) - 1, "another batch than the graph's"
            assert len(indices) <= len(self.buffers["indices"]), "too few page numbers for the graph"
            self.buffers["indptr"].copy_(indptr, non_blocking=True)
            self.buffers["last"].copy_(last, non_blocking=True)
            self.buffers["indices"][: len(indices)].copy_(indices, non_blocking=True)
            if len(qo):
                self.buffers["qo"].copy_(qo, non_blocking=True)
        else:
            arrays = {"qo": qo, "indptr": indptr, "last": last, "indices": indices}
            self.buffers = {name: one.to(self.device, non_blocking=True) for name, one in arrays.items() if len(one)}
        schedule = np.concatenate(([num, len(qo)], qo.numpy(), lens.numpy())).astype(np.int32)
        words = self.pinned.view(torch.int32)[: len(schedule)]
        words.numpy()[:] = schedule
        self.ints.view(torch.int32)[: len(schedule)].copy_(words, non_blocking=True)
        self.num_tokens, self.page_size = int(qo[-1]) if len(qo) else num, page_size
        self.num_plans += 1

    def attend(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, dim = self.sizes
        assert q.shape == out.shape == (self.num_tokens, heads, dim), (q.shape, out.shape, self.num_tokens)
        assert q.is_contiguous() and out.is_contiguous() and q.dtype is out.dtype is kv.dtype is self.dtype
        assert kv.shape[1:] == (2, kv_heads, self.page_size, dim), kv.shape
        inner = (kv_heads * self.page_size * dim, self.page_size * dim, dim, 1)
        assert kv.stride()[1:] == inner and kv.stride(0) >= 2 * inner[0], kv.stride()
        fixed = {name: on_host(one) for name, one in self.buffers.items()}
        hosts = [on_host(one) for one in (self.ints, q, kv, out)]
        scale, wrong = self.scale, sys.modules["flashinfer"].wrong
        reads = [*self.buffers.values(), self.ints, q, kv]
        self.gpu.launch("flashinfer", lambda: wrong.extend(attend_rows(fixed, *hosts, scale)), reads, [out])
        return out


def attend_rows(
    fixed: dict[str, torch.Tensor],
    ints: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> list[str]:
    """Return what is wrong with the schedule. A schedule of another plan gives no numbers."""
    words = ints.view(torch.int32)
    num, num_bounds = words[:HEADER].tolist()
    qo = words[HEADER : HEADER + num_bounds].tolist() or list(range(num + 1))
    bounds, last, page_size = fixed["indptr"].tolist(), fixed["last"].tolist(), kv.shape[3]
    lens = [(end - begin - 1) * page_size + left for begin, end, left in zip(bounds, bounds[1:], last, strict=False)]
    planned = words[HEADER + num_bounds :][:num].tolist()
    if planned != lens or (num_bounds and fixed["qo"].tolist() != qo):
        out.fill_(float("nan"))
        return [f"rows of {lens} keys, and a schedule for {planned}"]
    for row in range(num):
        pages = fixed["indices"][bounds[row] : bounds[row + 1]].long()
        num_keys = lens[row]
        keys, values = (
            half.transpose(0, 1).flatten(1, 2)[:, :num_keys] for half in kv[pages].transpose(0, 1).unbind(0)
        )
        tokens = slice(qo[row], qo[row + 1])
        out[tokens] = causal(q[tokens].transpose(0, 1), keys, values, scale).transpose(0, 1).to(out.dtype)
    return []


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q: (heads, Q, D), the last of S tokens. k, v: (kv_heads, S, D). Computes as TorchAttention does."""
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = torch.matmul(q.float(), k.transpose(1, 2).float()) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
    return torch.matmul(scores.masked_fill(hidden, float("-inf")).softmax(dim=-1), v.float())


def decode_wrapper(gpu: VirtualGpu, library: Any) -> type[Wrapper]:
    class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
        def __init__(
            self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
            use_tensor_cores: bool = False, paged_kv_indptr_buffer: torch.Tensor | None = None,
            paged_kv_indices_buffer: torch.Tensor | None = None,
            paged_kv_last_page_len_buffer: torch.Tensor | None = None, backend: str = "auto",
            jit_args: Any = None, jit_kwargs: Any = None,
        ) -> None:  # fmt: skip
            given = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            buffers = dict(zip(("indptr", "indices", "last"), given, strict=True)) if use_cuda_graph else {}
            super().__init__(gpu, float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)
            self.use_tensor_cores = use_tensor_cores
            library.made.append(self)

        def plan(
            self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
            num_kv_heads: int, head_dim: int, page_size: int, *, pos_encoding_mode: str = "NONE", window_left: int = -1,
            window_right: int = 0, logits_soft_cap: float | None = None, q_data_type: Any = "float16",
            kv_data_type: Any = None, o_data_type: Any = None, data_type: Any = None, sm_scale: float | None = None,
            rope_scale: float | None = None, rope_theta: float | None = None, non_blocking: bool = True,
            block_tables: Any = None, seq_lens: Any = None, fixed_split_size: int | None = None,
            disable_split_kv: bool = False, q_len_per_req: int = 1, is_causal: bool | None = None,
            use_token_head_sf: bool = False,
        ) -> None:  # fmt: skip
            group = num_qo_heads // num_kv_heads
            assert self.use_tensor_cores or group in (1, 2, 3, 4, 8), "no kernel for this group"
            assert q_data_type is kv_data_type and q_len_per_req == 1
            self.sizes, self.dtype = (num_qo_heads, num_kv_heads, head_dim), q_data_type
            self.scale = head_dim**-0.5 if sm_scale is None else sm_scale
            self.take(EMPTY, indptr, indices, last_page_len, page_size)

        def run(
            self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *args: Any, q_scale: Any = None, k_scale: Any = None,
            v_scale: Any = None, out: torch.Tensor | None = None, lse: Any = None, return_lse: bool = False,
            enable_pdl: bool | None = None, window_left: int | None = None, sinks: Any = None,
            q_len_per_req: int | None = None, skip_softmax_threshold_scale_factor: float | None = None,
            kv_cache_sf: Any = None,
        ) -> torch.Tensor:  # fmt: skip
            return self.attend(q, paged_kv_cache, torch.empty_like(q) if out is None else out)

    return BatchDecodeWithPagedKVCacheWrapper


def prefill_wrapper(gpu: VirtualGpu, library: Any) -> type[Wrapper]:
    class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
        def __init__(
            self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
            qo_indptr_buf: torch.Tensor | None = None, paged_kv_indptr_buf: torch.Tensor | None = None,
            paged_kv_indices_buf: torch.Tensor | None = None, paged_kv_last_page_len_buf: torch.Tensor | None = None,
            custom_mask_buf: Any = None, mask_indptr_buf: Any = None, backend: str = "auto", jit_args: Any = None,
            jit_kwargs: Any = None, variant_owns_mask: bool = False, max_total_num_rows: int | None = None,
        ) -> None:  # fmt: skip
            given = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
            buffers = dict(zip(("qo", "indptr", "indices", "last"), given, strict=True)) if use_cuda_graph else {}
            super().__init__(gpu, float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)
            self.most_tokens = max_total_num_rows
            library.made.append(self)

        def plan(
            self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
            paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
            page_size: int, head_dim_vo: int | None = None, custom_mask: Any = None, packed_custom_mask: Any = None,
            causal: bool = False, pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
            sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
            rope_scale: float | None = None, rope_theta: float | None = None, q_data_type: Any = "float16",
            kv_data_type: Any = None, o_data_type: Any = None, non_blocking: bool = True, prefix_len_ptr: Any = None,
            token_pos_in_items_ptr: Any = None, token_pos_in_items_len: int = 0, max_item_len_ptr: Any = None,
            seq_lens: Any = None, seq_lens_q: Any = None, block_tables: Any = None,
            max_token_per_sequence: int | None = None, max_sequence_kv: int | None = None,
            fixed_split_size: int | None = None, disable_split_kv: bool = False, uniform_q_len: int | None = None,
            use_token_head_sf: bool = False,
        ) -> None:  # fmt: skip
            assert causal, "a token would read later ones"
            assert q_data_type is kv_data_type
            self.sizes, self.dtype = (num_qo_heads, num_kv_heads, head_dim_qk), q_data_type
            self.scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
            assert uniform_q_len is None or (qo_indptr.diff() == uniform_q_len).all()
            if self.is_graph:
                self.most_tokens = self.most_tokens or int(qo_indptr[-1])
                assert int(qo_indptr[-1]) <= self.most_tokens, "more queries than the graph's first plan had"
            self.take(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)

        def run(
            self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *args: Any, q_scale: Any = None, k_scale: Any = None,
            v_scale: Any = None, out: torch.Tensor | None = None, lse: Any = None, return_lse: bool = False,
            lse_base: str = "log2", lse_layout: str = "NH", enable_pdl: bool | None = None,
            window_left: int | None = None, sinks: Any = None, kv_cache_sf: Any = None,
            skip_softmax_threshold_scale_factor: float | None = None, use_fp16_softmax: bool | None = None,
            uses_spcompress: bool | None = None,
        ) -> torch.Tensor:  # fmt: skip
            return self.attend(q, paged_kv_cache, torch.empty_like(q) if out is None else out)

    return BatchPrefillWithPagedKVCacheWrapper


def make_library(gpu: VirtualGpu) -> ModuleType:
    """The module, with `made`: all wrappers, in the order in which they were made, and `wrong`: what kernels told."""
    library: Any = ModuleType("flashinfer")
    library.wrong = []
    library.__spec__, library.__version__, library.made = ModuleSpec("flashinfer", None), VERSION, []
    library.BatchDecodeWithPagedKVCacheWrapper = decode_wrapper(gpu, library)
    library.BatchPrefillWithPagedKVCacheWrapper = prefill_wrapper(gpu, library)
    return library


@contextmanager
def library_on(gpu: VirtualGpu) -> Iterator[Any]:
    """Let `import flashinfer` find the fake. It takes float32 and the heads of tiny networks, too."""
    library = make_library(gpu)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", library)
        patch.setattr(flash_infer, "WORKSPACE_BYTES", 1 << 12)
        patch.setattr(flash_infer, "PLAN_BYTES", INT_BYTES)
        patch.setattr(flash_infer, "DTYPES", (torch.bfloat16, torch.float32))
        patch.setattr(flash_infer, "HEAD_DIMS", (8, 16, 32, 64, 128))
        yield library
