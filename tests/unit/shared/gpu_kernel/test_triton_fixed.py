"""`--deterministic`: a request has the same bits alone, in batches of other sizes, and cut into other chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.core.errors import ConfigError
from shared.engine.buckets import MOST_PROMPTS, PromptShape
from shared.engine.graphs import FixedInputs
from shared.kernel.attention.attention import AttentionShape
from shared.kernel.code.step_layout import HostLengths
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.interface import ModelInputs
from shared.model.math.kernels import Formats
from shared.node.assembly.deterministic import check_deterministic
from tests.support.cores.core_rig import Job, Outcome, assert_whole, run_local
from tests.support.gpus.cuda_core import KINDS, Kind, folder_of, make_core
from tests.support.gpus.cuda_jobs import jobs_for
from tests.support.gpus.cuda_node import parts_of
from tests.support.kernels.paged_steps import Row, make_step, tables_of

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
attention, products = interpreter.kernels("attention"), interpreter.kernels("product")
blocks = interpreter.kernels("blocks")

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 32, 1e-5)
SLIDING = AttentionShape(4, 2, 32, 1e-5, windows=(0, 21, 0))


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Don't look for integer overflow, which would take two thirds of the time."""
    monkeypatch.setattr(interpreter.grids.interpreter_builder, "options", interpreter.UNCHECKED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (200, 131), (7, 1)])
def test_a_product_has_the_library_s_numbers(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(67, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    got = products.product(x.to(dtype), weight.to(dtype), bias.to(dtype))
    wanted = torch.nn.functional.linear(x.to(dtype).float(), weight.to(dtype).float(), bias.to(dtype).float())
    assert got.dtype == dtype
    close = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), wanted, atol=close, rtol=close)
    wide = products.product(x.to(dtype), weight.to(dtype), None, torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, wanted - bias.to(dtype).float(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("batch", [2, 5, 63, 64, 65, 130])
def test_a_row_of_a_product_has_its_bits_in_any_batch(batch: int) -> None:
    """Wherever it stands, and whatever the others are; with weights in bytes, too."""
    torch.manual_seed(batch)
    weight, rows = torch.randn(96, 200), torch.randn(batch, 200)
    in_bytes = products.ByteLinear(weight, None, torch.float8_e4m3fn, is_fixed=True)
    for linear in (products.FixedLinear(weight), in_bytes):
        alone = linear(rows[:1].clone())
        for place in {0, batch // 2, batch - 1}:
            moved = torch.randn(batch, 200) * 1e3
            moved[place] = rows[0]
            with interpreter.shuffled(place):
                assert torch.equal(linear(moved)[place : place + 1], alone)


@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "inner"), [(3, 48), (67, 33), (1, 1)])
def test_a_gated_product_has_the_two_launches_bits(rows: int, inner: int, dtype: torch.dtype, is_gelu: bool) -> None:
    """Whose halves share a tile only here. With weights in bytes, a bias, and rows in any order, too."""
    torch.manual_seed(inner)
    weight, bias, x = torch.randn(2 * inner, 70), torch.randn(2 * inner), torch.randn(rows, 70).to(dtype)
    in_blocks = blocks.TritonBlocks(1e-5, dtype, is_gelu)
    for own in (None, bias):
        in_bytes = products.ByteLinear(weight, own, torch.float8_e4m3fn)
        for linear in (products.FixedLinear(weight.to(dtype), None if own is None else own.to(dtype)), in_bytes):
            with interpreter.shuffled(rows):
                got = in_blocks.gated(linear, x)
            assert got.shape == (rows, inner) and got.dtype == dtype
            assert torch.equal(got, in_blocks.gate(linear(x)))
            assert torch.equal(in_blocks.gated(linear, x[-1:].clone()), got[-1:])


def prompt_bits(shape: AttentionShape, cuts: Sequence[int], beside: Sequence[Row] = (), fixed: bool = True) -> object:
    """Attention's results for a prompt of 40 tokens cut there, each chunk the first row of a step with the others."""
    whole = make_step(shape, [Row(0, 40)])
    found, pages = [], whole.kv.clone()
    for start, stop in zip((0, *cuts), (*cuts, 40), strict=True):
        step = make_step(shape, [Row(start, stop - start), *beside], seed=start)
        own = whole.inputs.layout.page_table[0]
        line = step.inputs.layout.page_table[0, : len(own)].long()
        step.kv[line] = pages[own[: len(line)].long()]
        step.qkv[: stop - start] = whole.qkv[start:stop]
        host = HostLengths(np.asarray(step.inputs.layout.cu_q_lens), None, len(beside))
        step.inputs = replace(step.inputs, layout=replace(step.inputs.layout, host=host))
        found.append(step.run(attention.TritonAttention(shape, tables_of(shape), is_fixed=fixed))[: stop - start])
        pages[own[: len(line)].long()] = step.kv_after[line]
    return torch.cat(found)


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [(SHAPE, ()), (SHAPE, (1, 2, 3, 20)), (SHAPE, (16, 32)), (SLIDING, (39,)), (SLIDING, (17, 35))],
    ids=["whole", "short chunks", "at pages", "sliding, one token", "sliding, two chunks"],
)
def test_a_prompt_has_its_bits_however_it_is_cut(shape: AttentionShape, cuts: tuple[int, ...]) -> None:
    alone = prompt_bits(shape, ())
    assert torch.equal(prompt_bits(shape, cuts), alone)
    assert torch.equal(prompt_bits(shape, cuts, [Row(33, 1), Row(5, 1)]), alone)


STEPS = (
    [Row(0, 33), Row(17, 12), Row(70, 1), Row(0, 18)],
    [Row(5, 1)],
    [Row(20, 3), Row(0, 16)],
    [Row(3, 7)] * MOST_PROMPTS,
    [Row(40, 64)],
)


@pytest.mark.parametrize("shape", [SHAPE, SLIDING], ids=["full", "sliding"])
def test_prompts_have_their_bits_in_a_graph_s_places(shape: AttentionShape) -> None:
    """Behind them is the row of the padding, on page 0, and rows without tokens; and larger steps were there before."""
    fixed, ours = FixedInputs([PromptShape(64, 128)], 8, ("input_ids", "positions"), CPU), attention.TritonAttention
    read = fixed.of(PromptShape(64, 128))
    for seed, rows in enumerate(STEPS):
        step = make_step(shape, rows, seed=seed)
        host = HostLengths(np.asarray(step.inputs.layout.cu_q_lens), None, 0)
        layout = replace(step.inputs.layout, host=host)
        step.inputs = replace(step.inputs, layout=layout)
        wanted = step.run(ours(shape, tables_of(shape), is_fixed=True))
        positions, num_padding = step.inputs.positions, 64 - len(step.qkv)
        fixed.fill(ModelInputs(positions, positions, layout, positions[:1]), read)
        qkv = torch.cat((step.qkv, torch.randn(num_padding, step.qkv.shape[1])))
        is_real = torch.cat((step.is_real, torch.zeros(num_padding, dtype=torch.bool)))
        placed = replace(step, inputs=read.for_attention(), qkv=qkv, is_real=is_real)
        assert torch.equal(placed.run(ours(shape, tables_of(shape))), wanted)
        assert torch.equal(placed.pages()[0], step.pages()[0])


def test_a_short_chunk_is_read_as_a_chunk_beside_nobody() -> None:
    """Without the flag its kernel follows from the longest row of the step, and splits its keys."""
    inputs = make_step(SHAPE, [Row(30, 2), Row(9, 1)]).inputs
    host = HostLengths(np.asarray(inputs.layout.cu_q_lens), None, 1)
    inputs = replace(inputs, layout=replace(inputs.layout, host=host))
    chunks, windows = attention.parted(inputs, is_fixed=True)
    assert (chunks.num_rows, chunks.num_tokens, windows.num_rows, windows.max_q_len) == (1, 2, 1, 1)
    assert attention.parted(inputs)[0].num_rows == 0


def logprobs_of(kind: Kind, asked: list[Job], chunk: int = 16) -> Outcome:
    core = make_core(kind, kernels="fixed", chunk_size=chunk)
    outcome = run_local(core, asked)
    assert_whole(core)
    core.close()
    assert all(end.error is None for end in outcome.ends.values())
    return outcome


@pytest.mark.parametrize("name", ["plain", pytest.param("n-gram", marks=pytest.mark.long)])
def test_a_request_has_its_bits_in_any_company(name: str) -> None:
    """Alone, with two others, and in chunks of another size: ids and log-probabilities, of prompt and answer."""
    kind = KINDS[name]
    asked = [told(job) for job in jobs_for(kind, (), 3)]
    together, smaller = logprobs_of(kind, asked), logprobs_of(kind, asked, chunk=7)
    for job in asked[1:2]:
        alone = logprobs_of(kind, [job])
        for key in alone.streams:
            for others in (together, smaller):
                assert others.streams[key] == alone.streams[key]
                assert others.logprobs[key] == alone.logprobs[key] and alone.logprobs[key]
                assert others.scores[key] == alone.scores[key] and alone.scores[key]


def told(job: Job) -> Job:
    return replace(job, sampling=replace(job.sampling, max_tokens=4, num_logprobs=2, prompt_logprobs=1))


def test_nodes_with_and_without_it_do_not_pair() -> None:
    folder = str(folder_of("qwen3"))
    hashes = [
        load_model(folder, LoadOptions("float32", kernels=kernels)).spec.weights_hash for kernels in ("triton", "fixed")
    ]
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
    ("family", "formats", "told"),
    [("qwen3-moe", Formats(), "products of experts"), ("qwen3", Formats(weights="int8"), "products of int8 weights")],
)
def test_products_of_the_library_are_refused(family: str, formats: Formats, told: str) -> None:
    with pytest.raises(ConfigError, match=f"--deterministic: {told}"):
        load_model(str(folder_of(family)), LoadOptions("float32", kernels="fixed", formats=formats))


def test_it_is_refused_where_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.model.math.kernels.has_triton", lambda: False)
    with pytest.raises(ConfigError, match="--deterministic: Triton is missing"):
        load_model(str(folder_of("qwen3")), LoadOptions("float32", kernels="fixed"))


@pytest.mark.parametrize(
    ("changes", "on_gpu", "told"),
    [
        ({}, False, "--device cuda"),
        ({"lora": ("a=b",)}, True, "--lora"),
        ({"spec": "eagle"}, True, "draft head"),
        ({"spec": "ngram"}, True, "--no-spec-adaptive"),
    ],
)
def test_what_it_can_t_be_kept_beside_is_refused(changes: dict[str, object], on_gpu: bool, told: str) -> None:
    check_deterministic(parts_of(**changes), on_gpu=on_gpu)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=told):
        check_deterministic(parts_of(deterministic=True, **changes), on_gpu=on_gpu)  # type: ignore[arg-type]
    check_deterministic(parts_of(deterministic=True), on_gpu=True)
