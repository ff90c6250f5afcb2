"""GGUF files written here by the gguf package, read back through our source."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from shared.core.errors import ConfigError
from shared.kernel.attention.rope import inverse_frequencies, rope_tables
from shared.model.formats.gguf_file import GgufFile, is_readable
from shared.model.formats.opened import open_model
from shared.model.math.weights import rope_of
from tests.support.models.tiny_gguf import HEADS, HIDDEN, VOCAB, values, write


def embedding() -> dict[str, tuple[np.ndarray, Kind]]:
    return {"token_embd.weight": (values(VOCAB, HIDDEN), Kind.F32)}


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


def test_llama3_rope_comes_as_one_divisor_per_frequency(tmp_path: Path) -> None:
    divisors = np.linspace(1.0, 8.0, HIDDEN // HEADS // 2, dtype=np.float32)
    plain = open_model(write(tmp_path / "a.gguf", embedding()))
    stretched = open_model(write(tmp_path / "b.gguf", embedding() | {"rope_freqs.weight": (divisors, Kind.F32)}))
    want = inverse_frequencies(64, 10000.0) / torch.from_numpy(divisors)
    for got, table in zip(rope_of(stretched, 64), rope_tables(want, 64), strict=True):
        assert torch.equal(got, table)
    assert not torch.equal(rope_of(plain, 64)[0], rope_of(stretched, 64)[0])


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
