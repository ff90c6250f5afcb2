"""GGUF files written here by the gguf package, read back through our source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from shared.core.errors import ConfigError
from shared.kernel.attention.rope import inverse_frequencies, rope_tables
from shared.model.formats.gguf_file import GgufFile, dequantize, is_readable
from shared.model.formats.opened import open_model
from shared.model.math.weights import rope_of
from tests.support.models.tiny_gguf import HEADS, HIDDEN, KV_HEADS, VOCAB, values, write

ByHand = Callable[[np.ndarray], list[float]]


def embedding() -> dict[str, tuple[np.ndarray, Kind]]:
    return {"token_embd.weight": (values(VOCAB, HIDDEN), Kind.F32)}


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_values_equal_the_gguf_packages(kind: Kind, tmp_path: Path) -> None:
    plain = values(VOCAB, HIDDEN)
    packed = gguf.quants.quantize(plain, kind)
    read = GgufFile(write(tmp_path / "m.gguf", {"token_embd.weight": (packed, kind)})).tensor("embed")
    assert read.dtype == torch.float32
    np.testing.assert_array_equal(read.numpy(), gguf.quants.dequantize(packed, kind))
    assert np.abs(read.numpy() - plain).max() < (0.3 if "Q4" in kind.name else 0.02)


_KINDS = (
    "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K TQ1_0 TQ2_0 MXFP4 NVFP4 "
    "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS"
)
ALL_KINDS = _KINDS.split()


@pytest.mark.parametrize("name", ALL_KINDS)
def test_every_type_that_the_package_decodes_is_read(name: str, tmp_path: Path) -> None:
    """Any bytes that are no infinite scale, in rows that are decoded together."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[Kind[name]]
    raw = np.random.default_rng(5).integers(0, 256, (24, HIDDEN // block * num_bytes), dtype=np.uint8) & 0xBF
    raw = raw.view(np.float32) if name == "F32" else raw  # the package writes no other numbers of this type
    source = GgufFile(write(tmp_path / "m.gguf", {"token_embd.weight": (raw, Kind[name])}))
    np.testing.assert_array_equal(source.tensor("embed").numpy(), gguf.quants.dequantize(raw, Kind[name]))


def test_no_type_of_the_package_is_left_out() -> None:
    assert {kind.name for kind in Kind if is_readable(kind)} == {*ALL_KINDS}


@pytest.mark.parametrize("rows", [1, 11, 48, 128])
def test_rows_taken_together_stay_in_order(rows: int) -> None:
    packed = gguf.quants.quantize(values(rows, 96), Kind.Q4_1)
    np.testing.assert_array_equal(dequantize(packed, Kind.Q4_1), gguf.quants.dequantize(packed, Kind.Q4_1))


def random_blocks(rows: int, num_bytes: int, scale_at: tuple[int, ...]) -> np.ndarray:
    """Random block bytes with sane float16 scales at the given offsets."""
    blocks = np.random.default_rng(3).integers(0, 256, (rows, num_bytes), dtype=np.uint8)
    for offset in scale_at:
        scales = np.linspace(0.01, 0.1, rows).astype(np.float16)
        blocks[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return blocks


def half(block: np.ndarray, offset: int) -> float:
    return float(block[offset : offset + 2].view(np.float16)[0])


def q4_k_by_hand(block: np.ndarray) -> list[float]:
    """256 values: 8 groups of 32, each with a 6-bit scale and minimum packed in 12 bytes."""
    d, dmin, packed, quants = half(block, 0), half(block, 2), block[4:16].astype(int), block[16:]
    out = []
    for group in range(8):
        if group < 4:
            scale, low = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            low = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        nibbles = quants[group // 2 * 32 : group // 2 * 32 + 32] >> (4 * (group % 2)) & 15
        out += [d * scale * int(q) - dmin * low for q in nibbles]
    return out


def q6_k_by_hand(block: np.ndarray) -> list[float]:
    """256 values: low 4 bits, high 2 bits, 16 signed scales, one float16."""
    low, high, scales, d = block[:128], block[128:192], block[192:208].view(np.int8), half(block, 208)
    out = []
    for n in range(256):
        half_block, within = divmod(n, 128)
        quarter, at = divmod(within, 32)
        nibble = low[half_block * 64 + quarter % 2 * 32 + at] >> (4 * (quarter // 2)) & 15
        top = high[half_block * 32 + at] >> (2 * quarter) & 3
        out.append(d * int(scales[n // 16]) * ((int(nibble) | int(top) << 4) - 32))
    return out


@pytest.mark.parametrize(
    ("kind", "num_bytes", "scale_at", "by_hand"),
    [(Kind.Q4_K, 144, (0, 2), q4_k_by_hand), (Kind.Q6_K, 210, (208,), q6_k_by_hand)],
)
def test_k_quants_equal_the_format(
    kind: Kind, num_bytes: int, scale_at: tuple[int, ...], by_hand: ByHand, tmp_path: Path
) -> None:
    blocks = random_blocks(VOCAB, num_bytes, scale_at)
    read = GgufFile(write(tmp_path / "m.gguf", {"token_embd.weight": (blocks, kind)})).tensor("embed").numpy()
    np.testing.assert_array_equal(read, gguf.quants.dequantize(blocks, kind))
    np.testing.assert_allclose(read, [by_hand(block) for block in blocks], rtol=1e-5, atol=1e-6)


def stored_pairwise(plain: np.ndarray, heads: int) -> np.ndarray:
    """What a converter to the llama architecture writes: rotated pairs side by side."""
    rows = plain.shape[0] // heads
    order = [h * rows + half_ * rows // 2 + n for h in range(heads) for n in range(rows // 2) for half_ in (0, 1)]
    return plain[order]


@pytest.mark.parametrize(("arch", "pairwise"), [("llama", True), ("qwen2", False), ("qwen3", False)])
def test_rotary_layout(arch: str, pairwise: bool, tmp_path: Path) -> None:
    q, k, v = values(HIDDEN, HIDDEN, 1), values(HIDDEN // 2, HIDDEN, 2), values(HIDDEN // 2, HIDDEN, 3)
    tensors = embedding() | {
        "blk.0.attn_q.weight": (stored_pairwise(q, HEADS) if pairwise else q, Kind.F32),
        "blk.0.attn_k.weight": (stored_pairwise(k, KV_HEADS) if pairwise else k, Kind.F32),
        "blk.0.attn_v.weight": (v, Kind.F32),
    }
    source = open_model(write(tmp_path / "m.gguf", tensors, arch))
    for name, want in (("q", q), ("k", k), ("v", v)):
        np.testing.assert_array_equal(source.tensor(f"layers.0.{name}").numpy(), want)


def test_llama3_rope_comes_as_one_divisor_per_frequency(tmp_path: Path) -> None:
    divisors = np.linspace(1.0, 8.0, HIDDEN // HEADS // 2, dtype=np.float32)
    plain = open_model(write(tmp_path / "a.gguf", embedding()))
    stretched = open_model(write(tmp_path / "b.gguf", embedding() | {"rope_freqs.weight": (divisors, Kind.F32)}))
    want = inverse_frequencies(64, 10000.0) / torch.from_numpy(divisors)
    for got, table in zip(rope_of(stretched, 64), rope_tables(want, 64), strict=True):
        assert torch.equal(got, table)
    assert not torch.equal(rope_of(plain, 64)[0], rope_of(stretched, 64)[0])


def test_header(tmp_path: Path) -> None:
    config = GgufFile(write(tmp_path / "m.gguf", embedding())).config
    assert (config.hidden_size, config.num_layers) == (HIDDEN, 1)
    assert (config.num_heads, config.num_kv_heads) == (HEADS, KV_HEADS)
    assert (config.head_dim, config.vocab_size, config.max_context, config.eos_ids) == (64, VOCAB, 64, (2,))
    assert config.tie_embeddings and not config.qk_norm


def test_a_window_does_not_cut_the_context(tmp_path: Path) -> None:
    config = GgufFile(write(tmp_path / "m.gguf", embedding(), attention__sliding_window=16)).config
    assert (config.windows, config.max_context) == ((16,), 64)


def test_what_we_cannot_read_is_named(tmp_path: Path) -> None:
    sums = np.zeros((VOCAB, gguf.GGML_QUANT_SIZES[Kind.Q8_K][1]), np.uint8)
    with pytest.raises(ConfigError, match="token_embd.weight is Q8_K, which the gguf package"):
        GgufFile(write(tmp_path / "a.gguf", {"token_embd.weight": (sums, Kind.Q8_K)}))
    with pytest.raises(ConfigError, match="'gemma' is not supported"):
        GgufFile(write(tmp_path / "b.gguf", embedding(), "gemma"))
    with pytest.raises(ConfigError, match="only a part of each head"):
        GgufFile(write(tmp_path / "r.gguf", embedding(), rope__dimension_count=32))
    with pytest.raises(ConfigError, match=r"no token_embd\.weight"):
        GgufFile(write(tmp_path / "c.gguf", {}, without=("token_embd.weight",)))
    with pytest.raises(ConfigError, match=r"no tensor blk\.0\.attn_q\.weight"):
        GgufFile(write(tmp_path / "d.gguf", {}, without=("blk.0.attn_q.weight",)))
    (tmp_path / "e.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ConfigError, match="as GGUF"):
        GgufFile(tmp_path / "e.gguf")


BIAS = values(1, HIDDEN)[0], Kind.F32


@pytest.mark.parametrize(
    ("tensors", "fields", "named"),
    [
        ({"blk.0.attn_q.weight": (values(128, HIDDEN), Kind.F32)}, {}, "attn_q.weight is .128, 256."),
        ({"blk.0.ffn_down.weight": (values(HIDDEN, 128), Kind.F32)}, {}, "ffn_down.weight is .256, 128."),
        ({"rope_freqs.weight": (values(1, 16)[0], Kind.F32)}, {}, "rope_freqs.weight is .16,., and .* .32,."),
        ({"blk.0.attn_q.bias": BIAS}, {}, ""),
        ({"blk.0.attn_q.bias": (BIAS[0][:64], Kind.F32)}, {}, "attn_q.bias is .64,."),
        ({"blk.0.ffn_gate.bias": BIAS}, {}, "llama has no tensor blk.0.ffn_gate.bias"),
        ({"blk.1.attn_q.weight": (values(HIDDEN, HIDDEN), Kind.F32)}, {}, "llama has no tensor blk.1"),
        ({}, {"attention__head_count_kv": 3}, "4 heads can't share 3 KV heads"),
        ({}, {"attention__head_count": 0}, "num_heads is 0|by zero"),
        ({}, {"attention__head_count": "many"}, "wrong field"),
        ({}, {"attention__value_length": 32}, "another length than keys"),
        ({}, {"expert_count": 4}, "llama.expert_count 4"),
        ({}, {"rope__scale_linear": 2}, "llama.rope.scale_linear 2"),
    ],
)
def test_what_is_in_the_file_is_the_network_of_the_header(
    tensors: dict[str, tuple[np.ndarray, Kind]], fields: dict[str, int | str], named: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", tensors, **fields)  # type: ignore[arg-type]
    if not named:
        GgufFile(path)
        return
    with pytest.raises(ConfigError, match=named):
        GgufFile(path)


def test_hash_sees_every_value(tmp_path: Path) -> None:
    first = GgufFile(write(tmp_path / "a.gguf", embedding())).content_hash()
    assert first == GgufFile(write(tmp_path / "b.gguf", embedding())).content_hash()
    changed = values(VOCAB, HIDDEN)
    changed[-1, -1] += 1
    other = GgufFile(write(tmp_path / "c.gguf", {"token_embd.weight": (changed, Kind.F32)})).content_hash()
    assert first != other and len(first) == 32
