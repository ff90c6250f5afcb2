"""Weights in blocks: every kernel has the bits of the definition, on every processor, for any number of rows."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from shared.core.errors import ConfigError
from shared.kernel.code.jit import processor_features
from shared.kernel.product import amx
from shared.kernel.product.amx_product import SUMS_AT, SUMS_BYTES
from shared.kernel.product.block_product import BlockTileLinear, pack
from shared.kernel.product.block_weights import (
    CODE_BLOCK,
    MOST_CODE,
    SIGN_BIT,
    BlockFormat,
    BlockWeights,
    Codes,
    codes_format,
    concatenate,
    fma,
    hadamard,
    int8_format,
    product,
    quantize_weight,
    recode,
)
from shared.kernel.product.dot import Dot, best_dot
from shared.kernel.product.linear import PlainBlockLinear
from shared.kernel.team.team import Team
from shared.model.formats.gguf_blocks import LAYOUTS, Q4_0, Q4_1, Q4_K, Q5_1, Q5_K, Q6_K, Q8_0, blocks_of
from shared.model.formats.gguf_file import GgufFile
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.kernels import Formats
from shared.model.math.weights import read_weight
from tests.support.machine.processors import run_python
from tests.support.models import tiny_gguf
from tests.support.models.tiny_gguf import HIDDEN, VOCAB, values, write
from tests.support.models.tiny_models import Rows, prompt

MIXED = BlockFormat("mixed", 8, 0, has_low=True, half_scales=False, block=16)  # of a product whose parts differ
INT8, *OTHER_INT8 = (form for inputs in (192, 64, 96, 256) if (form := int8_format(inputs)))
IN_BYTES, *OTHER_BYTES = (form for inputs in (192, 96, 256) if (form := codes_format(inputs, in_codes=False)))
CODES, *OTHER_CODES = (form for inputs in (192, 96, 640) if (form := codes_format(inputs, in_codes=True)))
FILES = (Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, Q5_1, Q5_K)
FORMATS = (*FILES, INT8, *OTHER_INT8, IN_BYTES, *OTHER_BYTES, CODES, *OTHER_CODES, MIXED)
EACH_KIND = (Q4_1, Q6_K, INT8, IN_BYTES, CODES)  # a slower processor's instructions differ between these alone
PRODUCTS = [*((form, None) for form in FORMATS), *((form, dot) for form in EACH_KIND for dot in Dot)]
WITH_AMX = {"avx512vnni": True, "amx-tile": True, "amx-int8": True}
AMX_CASES = [(True, WITH_AMX, True), (False, WITH_AMX, False), (True, WITH_AMX | {"amx-int8": False}, False)]
SCALES_AT = {  # of float16, in a block
    **{"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q5_0": [0], "Q5_1": [0, 2], "IQ4_NL": [0], "IQ4_XS": [0]},
    **{"Q4_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108], "Q5_K": [0, 2]},
}
MOST_NUMBER = {"Q2_K": 3, "Q3_K": 7, "Q4_0": 15, "Q4_1": 15, "Q4_K": 15, "Q5_0": 31, "Q5_1": 31, "Q5_K": 31, "Q6_K": 63}


def random_weight(form: BlockFormat, columns: int, inputs: int, seed: int = 0) -> BlockWeights:
    if form.in_codes:
        return recode(random_weight(Q4_1, columns, inputs, seed), form)
    draw = torch.Generator().manual_seed(seed)
    shape = columns, inputs // form.block
    numbers = torch.randint(0, 1 << form.bits, (columns, inputs), dtype=torch.uint8, generator=draw)
    scales, lows = torch.randn(shape, generator=draw) * 0.01, torch.randn(shape, generator=draw) * 0.05
    if form.half_scales:
        scales, lows = scales.half().float(), lows.half().float()
    return BlockWeights(form, numbers, scales, lows if form.has_low else None)


def dense(weight: BlockWeights) -> torch.Tensor:
    """The weights as (N, K) float32."""
    block = weight.format.block
    numbers = (weight.numbers.float() - weight.format.zero) * weight.scales.repeat_interleave(block, dim=1)
    numbers = numbers if weight.lows is None else numbers + weight.lows.repeat_interleave(block, dim=1)
    return hadamard(numbers, weight.format.hadamard)


def random_rows(count: int, inputs: int, dtype: torch.dtype, block: int = 32) -> torch.Tensor:
    """With a block of zeros, one of numbers too small to divide by, and magnitudes far apart."""
    draw = torch.Generator().manual_seed(count)
    x = torch.randn(count, inputs, generator=draw) * torch.logspace(-4, 4, count)[:, None]
    x[0, :block] = 0
    x[0, block : 2 * block] *= 1e-34
    return x.to(dtype)


def inputs_of(form: BlockFormat, count: int) -> int:
    """Return a number of inputs: `count` times 32, or `count` longer blocks."""
    return count * max(form.block, 32)


def name_of(form: BlockFormat) -> str:
    return f"{form.name}-{form.block}" if form.in_codes or form.name != "codes" else f"bytes-{form.block}"


def nearest_float32(exact: Fraction) -> np.float32:
    """By definition: the nearest one, and of two the even one."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    gap = min(abs(Fraction(float(one)) - exact) for one in around)
    best = [one for one in around if abs(Fraction(float(one)) - exact) == gap]
    return next((one for one in best if one.view(np.uint32) % 2 == 0), best[0])


def test_fma_is_rounded_once() -> None:
    """Half of the triples are made so that rounding to float64 first goes wrong: exact halves, plus a little."""
    draw = np.random.default_rng(1)
    a, b = draw.standard_normal((2, 4000)).astype(np.float32)
    c = (draw.standard_normal(4000) * 2.0 ** draw.integers(-30, 30, 4000)).astype(np.float32)
    a[:2000] = 1 + draw.integers(1, 1 << 12, 2000) * np.float32(2**-12)
    b[:2000] = np.float32(2**-24)
    c[:2000] = 1 + draw.integers(0, 1 << 23, 2000) * np.float32(2**-23)
    a[:1000], c[:1000] = np.float32(1), c[:1000] + np.float32(0)
    b[500:1000] = np.float32(2**-24 + 2**-47)
    got = fma(*map(torch.from_numpy, (a, b, c))).numpy()
    triples = zip(a, b, c, strict=True)
    want = [nearest_float32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in triples]
    assert np.array_equal(got, np.array(want, np.float32))


def is_there(dot: Dot) -> bool:
    """This processor can run it."""
    needed = {Dot.WHOLE: "avx512vnni", Dot.HALVES: "avxvnni", Dot.PAIRS: "avx2"}
    return dot is Dot.PLAIN or processor_features().get(needed[dot], False)


def told(one: BlockFormat | Dot | None) -> str:
    if isinstance(one, BlockFormat):
        return name_of(one)
    return "fastest" if one is None else one.name


@pytest.mark.parametrize(("form", "dot"), PRODUCTS, ids=told)
def test_the_kernel_has_the_bits_of_the_definition(form: BlockFormat, dot: Dot | None) -> None:
    """The fastest kernel is AMX's on a processor that has it."""
    if dot is not None and not is_there(dot):
        pytest.skip(f"this processor has no products of the kind {dot.name}")
    dtypes = [(torch.bfloat16, torch.float32)]
    if form in (Q4_1, INT8, CODES) and dot is None:
        dtypes += [(torch.bfloat16, None), (torch.float32, None)]  # the formats differ in none of it
    counts = (1, 2, 3, 4, 5, 6, 11, 16, 33) if dot is not None else (1, 2, 3, 4, 5, 6, 11, 16, 17, 35, 70)
    for columns, blocks, threads in ((64, 1, 1), (100, 2, 1), (320, 3, 3)):
        inputs = inputs_of(form, blocks)
        weight, bias = random_weight(form, columns, inputs), torch.randn(columns)
        for dtype, out_dtype in dtypes:
            linear = BlockTileLinear(pack(weight, bias, dtype), Team(threads), out_dtype, dot)
            for count in counts:
                x = random_rows(count, inputs, dtype, form.block)
                want = product(x, weight, bias).to(out_dtype or dtype)
                assert torch.equal(linear(x), want), (columns, count, dtype)


@pytest.mark.parametrize(("form", "apart"), [(OTHER_INT8[-1], 64), (OTHER_BYTES[-1], 1)], ids=str)
@pytest.mark.parametrize("count", [1, 20])
def test_the_largest_sums_fit_into_words(form: BlockFormat, apart: int, count: int) -> None:
    """All integers of a row are the largest ones. A Hadamard matrix makes them so if one input in 64 is large."""
    x = torch.zeros(count, 512)
    x[:, ::apart] = torch.tensor([3.0, -3.0]).repeat(10)[:count, None]
    for number in (0, 255):
        weight = BlockWeights(form, torch.full((64, 512), number, dtype=torch.uint8), torch.ones(64, 2))
        linear = BlockTileLinear(pack(weight, None, torch.float32), Team(1))
        assert torch.equal(linear(x), product(x, weight, torch.zeros(64)))


@pytest.mark.parametrize("dot", [None, Dot.PAIRS, Dot.PLAIN])
@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize(("most", "others"), [(3, 3), (-3, -3), (32639, 32384)])  # the last: low bytes of -128
def test_the_largest_sums_of_codes_are_exact(count: int, dot: Dot | None, most: int, others: int) -> None:
    """A block's sum doesn't fit into a word."""
    if dot is not None and not is_there(dot):
        pytest.skip(f"this processor has no products of the kind {dot.name}")
    form, x = OTHER_CODES[-1], torch.full((count, 1280), float(others))
    x[:, ::640] = most
    for code, rest in ((0, 0), (MOST_CODE, 255)):  # numbers of 0 and 255
        parts = (torch.full((64, 40), number, dtype=torch.uint8) for number in (rest, rest, rest // 255))
        codes = Codes(torch.full((64, 1280), code, dtype=torch.uint8), *parts)
        weight = BlockWeights(form, codes.numbers(), torch.ones(64, 2), codes=codes)
        linear = BlockTileLinear(pack(weight, None, torch.float32), Team(1), None, dot)
        assert torch.equal(linear(x), product(x, weight, torch.zeros(64)))


@pytest.mark.parametrize("form", [INT8, OTHER_INT8[-1], IN_BYTES, CODES, OTHER_CODES[-1]], ids=name_of)
def test_the_scratch_has_room_for_the_rows_that_amx_reads(form: BlockFormat) -> None:
    linear = BlockTileLinear(pack(random_weight(form, 64, 2 * form.block), None, torch.float32), Team(1))
    for count in (1, 4, 15, 16, 17, 100):
        rows = min(count, linear.work.most_rows)
        read = -(-rows // amx.ROWS) * amx.ROWS * linear.work.row_bytes
        unpacked = 32 * form.block if form.in_codes else 0
        assert SUMS_AT + rows * SUMS_BYTES + unpacked + read <= linear.scratch_bytes(count)


@pytest.mark.parametrize(("is_permitted", "features", "has"), AMX_CASES)
def test_amx_needs_the_processor_and_the_system(
    is_permitted: bool, features: dict[str, bool], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the system's permission its instructions would end the process."""
    monkeypatch.setattr(amx, "is_permitted", lambda: is_permitted)
    assert amx.has_amx(features) is has


def test_the_definition_is_near_the_exact_product() -> None:
    for form in FORMATS:
        weight = random_weight(form, 70, inputs_of(form, 3))
        x = torch.randn(9, weight.shape[1])
        exact = x.double() @ dense(weight).double().T
        got = PlainBlockLinear(weight)(x)
        assert (got - exact).norm() < (0.01 if form.input_bytes == 1 else 1e-4) * exact.norm(), form


def digests() -> str:
    """By what products are made here, and their results in each format."""
    found = [best_dot(processor_features()).name]
    for form in FORMATS:
        inputs = inputs_of(form, 3)
        linear = BlockTileLinear(pack(random_weight(form, 130, inputs), None, torch.float32), Team(1))
        x = random_rows(7, inputs, torch.float32, form.block)
        found.append(hashlib.sha256(linear(x).numpy().tobytes()).hexdigest())
    return " ".join(found)


def test_a_processor_with_narrow_vectors_has_the_same_bits(tmp_path: Path) -> None:
    """Compiled as for a Haswell of 2013: no AVX-512."""
    there = run_python(
        "haswell", tmp_path, "-c", "from tests.unit.shared.kernel.test_block_product import digests; print(digests())"
    )
    assert there.stdout.split() == ["PAIRS", *digests().split()[1:]], there.stderr


@pytest.mark.parametrize("kind", LAYOUTS)
def test_blocks_of_a_file_are_what_the_gguf_package_reads(kind: str) -> None:
    """Any bytes at all; only the common scales are numbers."""
    draw, (form, num_bytes, _) = np.random.default_rng(4), LAYOUTS[kind]
    raw = draw.integers(0, 256, (24, 3, num_bytes), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        raw[..., at : at + 2] = draw.standard_normal((24, 3)).astype(np.float16)[..., None].view(np.uint8)
    raw = raw.reshape(24, -1)
    blocks = blocks_of(raw, kind)
    assert blocks is not None and blocks.format is form
    assert int(blocks.numbers.max()) <= MOST_NUMBER.get(kind, 255)
    want = gguf.quants.dequantize(raw, getattr(gguf.GGMLQuantizationType, kind))
    assert np.array_equal(dense(blocks).numpy(), want)


def test_parts_of_several_formats_say_the_same_together() -> None:
    parts = [random_weight(form, 6, 256, seed) for seed, form in enumerate((Q4_K, Q6_K, Q8_0, Q4_1))]
    whole = concatenate(parts)
    torch.testing.assert_close(dense(whole), torch.cat([dense(part) for part in parts]), atol=1e-6, rtol=1e-6)
    alike = concatenate([random_weight(Q4_1, 6, 64, seed) for seed in range(3)])
    assert alike.format is Q4_1 and alike.shape == (18, 64)


def test_a_few_large_inputs_leave_the_others_their_precision() -> None:
    """Without the Hadamard matrix, the inputs beside a large one are rounded to its steps."""
    x, weight = torch.randn(20, 384), torch.randn(50, 384)
    x[:, [7, 200]] *= 200
    weights = [quantize_weight(weight, form) for form in (replace(INT8, hadamard=1), INT8, IN_BYTES)]
    plain, mixed, wide = ((product(x, one, torch.zeros(50)) - x @ dense(one).T).norm() for one in weights)
    assert 3 * mixed < plain and 10 * wide < mixed


def odd_blocks(form: BlockFormat) -> BlockWeights:
    """Scales of both signs and unlike sizes, and a row of zeros."""
    weight = random_weight(form, 40, 384)
    weight.scales.mul_(torch.logspace(-2, 2, 40)[:, None])
    weight.scales[3] = 0
    return weight


@pytest.mark.parametrize("form", [Q4_0, Q4_1, Q4_K], ids=name_of)
def test_codes_are_off_by_a_step_and_keep_the_mean(form: BlockFormat) -> None:
    """In bytes: rounding is off by 1/2, a code times its step's error by 15/32, a start for small steps by 1/2."""
    weight = odd_blocks(form)
    found = recode(weight, CODES)
    assert found.codes is not None and torch.equal(found.numbers, found.codes.numbers())
    assert int(found.codes.codes.max()) <= MOST_CODE and int((found.numbers.int() - SIGN_BIT).abs().max()) >= 125
    off = (dense(found) - dense(weight)).unflatten(1, (-1, CODE_BLOCK))
    byte = found.scales.repeat_interleave(192 // CODE_BLOCK, dim=1)
    assert (off.abs().amax(2) <= 1.5 * byte).all()
    mean = off.mean(2) / byte.clamp(min=1e-20)
    assert (mean.abs() <= 0.6).all() and abs(mean.mean()) < 0.02, "rounding favours no side"


@pytest.mark.parametrize("form", [Q4_0, Q4_1, Q4_K], ids=name_of)
def test_small_blocks_beside_a_large_one_are_bytes_too(form: BlockFormat) -> None:
    """Kernels need numbers that fit into bytes without wrapping."""
    weight = random_weight(form, 40, 640)
    weight.scales[:, ::3] *= 1e-3
    weight.scales[:, 1::3] = 0
    if weight.lows is not None:
        weight.lows[::2] *= 100
    found = recode(weight, OTHER_CODES[-1]).codes
    assert found is not None and int(found.steps.min()) == 0
    codes, *lines = (values.long() for values in found.tensors())
    steps, nudges, bases = (line.repeat_interleave(CODE_BLOCK, dim=1) for line in lines)
    numbers = (256 * codes + nudges) * steps // 4096 + bases
    assert torch.equal(numbers, found.numbers().long())


@pytest.mark.parametrize("form", [Q4_1, Q4_K], ids=name_of)
def test_offsets_do_not_depend_on_the_order_of_a_sum(form: BlockFormat) -> None:
    """A library adds in an order that depends on the processor. Here the order of inputs changes instead."""
    weight = random_weight(form, 200, 384)
    order = torch.randperm(CODE_BLOCK, generator=torch.Generator().manual_seed(1))
    shuffled = replace(weight, numbers=weight.numbers.unflatten(1, (-1, CODE_BLOCK))[..., order].flatten(1))
    one, other = recode(weight, CODES).codes, recode(shuffled, CODES).codes
    assert one is not None and other is not None
    assert torch.equal(one.nudges, other.nudges) and torch.equal(one.bases, other.bases)


def test_a_product_of_codes_and_bytes_is_in_bytes(tmp_path: Path) -> None:
    """Attention's k and v have four and eight bits, q and k four."""
    kinds = {"attn_q": Kind.Q4_1, "attn_k": Kind.Q4_0, "attn_v": Kind.Q8_0}
    network = tiny_gguf.network("llama")
    raw = {f"blk.0.{name}.weight": (network[f"blk.0.{name}.weight"][0], kind) for name, kind in kinds.items()}
    path = write(tmp_path / "m.gguf", {name: (gguf.quants.quantize(*one), one[1]) for name, one in raw.items()})
    source = GgufFile(path)

    def weight(*names: str) -> BlockWeights:
        found = read_weight(source, [f"layers.0.{name}" for name in names], torch.float32, torch.device("cpu"), "codes")
        assert isinstance(found, BlockWeights)
        return found

    coded, mixed = weight("q", "k"), weight("k", "v")
    assert coded.codes is not None and coded.format.in_codes
    assert mixed.codes is None and not mixed.format.in_codes
    dense = torch.cat([source.tensor(f"layers.0.{name}") for name in ("k", "v")])
    assert torch.equal(mixed.numbers, quantize_weight(dense, mixed.format).numbers)


@pytest.mark.parametrize("form", ["file", "codes"])
def test_the_file_s_blocks_are_the_network_that_its_numbers_are(form: str) -> None:
    """Rotary halves too, which a GGUF file has side by side."""
    exact, blocks = (
        Rows(load_model("smollm2", LoadOptions("float32", max_context=64, formats=Formats(weights=weights))), 1, 16)
        for weights in ("auto", form)
    )
    wanted, found = (rows.step({0: prompt(40)}).log_softmax(-1) for rows in (exact, blocks))
    assert 0 < (wanted.exp() * (wanted - found)).sum(-1).mean() < 0.05  # nats a token


@pytest.mark.parametrize("form", ["file", "codes"])
def test_a_file_without_blocks_says_what_to_do(form: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"token_embd.weight": (values(VOCAB, HIDDEN), gguf.GGMLQuantizationType.F32)})
    with pytest.raises(ConfigError, match=f"--weight-dtype {form}: .* has plain numbers: take auto or int8"):
        load_model(str(path), LoadOptions(formats=Formats(weights=form)))
    assert GgufFile(path).blocks("layers.0.q") is None
