"""A random network of one layer as a GGUF file, written by the gguf package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

HIDDEN, HEADS, KV_HEADS, VOCAB, INNER = 256, 4, 2, 11, 256


def values(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def network(arch: str) -> dict[str, tuple[np.ndarray, Kind]]:
    """All tensors of one layer."""
    rows = {"attn_q": HIDDEN, "attn_k": HIDDEN // 2, "attn_v": HIDDEN // 2, "attn_output": HIDDEN}
    rows |= {"ffn_gate": INNER, "ffn_up": INNER, "ffn_down": HIDDEN}
    vectors = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    vectors |= {"attn_q_norm": HIDDEN // HEADS, "attn_k_norm": HIDDEN // HEADS} if arch == "qwen3" else {}
    tensors = {f"blk.0.{name}.weight": values(count, HIDDEN) for name, count in rows.items()}
    tensors |= {f"blk.0.{name}.weight": values(1, count)[0] for name, count in vectors.items()}
    tensors |= {"token_embd.weight": values(VOCAB, HIDDEN), "output_norm.weight": values(1, HIDDEN)[0]}
    return {name: (value, Kind.F32) for name, value in tensors.items()}


def write(
    path: Path,
    tensors: dict[str, tuple[np.ndarray, Kind]],
    arch: str = "llama",
    without: tuple[str, ...] = (),
    more: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    tensors_per_part: int = 0,
    **fields: int | str | list[str],
) -> Path:
    """A network of one layer; `tensors` hold raw blocks (uint8) or plain values with their type, for its own.
    `more` writes further keys. Returns the file, or the first of several parts."""
    tensors = {name: value for name, value in (network(arch) | tensors).items() if name not in without}
    writer = gguf.GGUFWriter(str(path), arch, split_max_tensors=tensors_per_part)
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(2)
    for key, value in fields.items():
        add = {int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[type(value)]
        add(f"{arch}.{key.replace('__', '.')}", value)  # type: ignore[arg-type]
    more(writer)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=None if data.dtype == np.float32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*")) if tensors_per_part else path
