"""Triton's attention, in its interpreter, against the reference: the same results, and the same bits in the pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.kernel.attention.attention import AttentionBackend, AttentionShape, TorchAttention
from tests.gpu.checks.real import by_token
from tests.support.kernels.attention_cases import CASES, TREE, shape_of
from tests.support.kernels.paged_steps import Row, bounded, make_step, tables_of

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
attention = interpreter.kernels("attention")
paged = interpreter.kernels("paged_attention")

SPLIT = 64  # so that short rows are split


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overflow of whole numbers is not looked for here, which takes two thirds of the time."""
    monkeypatch.setattr(paged, "SPLIT_KEYS", SPLIT)
    monkeypatch.setattr(interpreter.grids.interpreter_builder, "options", interpreter.UNCHECKED)


def backends(shape: AttentionShape) -> tuple[AttentionBackend, AttentionBackend]:
    tables, local = tables_of(shape), tables_of(shape, 500.0)
    return attention.TritonAttention(shape, tables, local), TorchAttention(shape, tables, local)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    """Slots that none may read are no numbers. The programs run in a drawn order."""
    case = CASES[name]
    step = case.step()
    ours, reference = backends(case.shape)
    wanted = step.run(reference)
    pages, scales = step.pages()
    with interpreter.shuffled(5):
        got = step.run(ours)
    assert got.isfinite().all()
    torch.testing.assert_close(got, wanted, atol=case.tolerance, rtol=case.tolerance)
    if not case.norms:  # the mean of squares has another order of sums
        assert torch.equal(step.pages()[0], pages)
        torch.testing.assert_close(step.pages()[1], scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["trees, window", "chunks and trees"])
def test_the_order_of_programs_changes_no_bit(name: str) -> None:
    case = CASES[name]
    step = case.step()
    found = []
    for seed in (1, 2):
        with interpreter.shuffled(seed):
            found.append((step.run(backends(case.shape)[0]), *step.pages()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("name", ["decode", "decode, window", "trees, window", "int8"])
def test_the_host_s_bound_changes_no_bit(name: str) -> None:
    """Nor does whether there is a merge at all."""
    case = CASES[name]
    step = case.step()
    found = [bounded(step, most).run(backends(case.shape)[0]) for most in (step.inputs.layout.max_seq_len, 600)]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["trees, window", "int8", "chunk, fp8"])
def test_pages_token_by_token_change_no_bit(name: str) -> None:
    case = CASES[name]
    step, tables = case.step(), tables_of(case.shape)
    wanted = step.run(attention.TritonAttention(case.shape, tables))
    assert torch.equal(step.run(by_token(attention)(case.shape, tables)), wanted)


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    """Even beside one so long that splits are doubled for it."""
    shape = shape_of(6, 2, 32)
    few = [Row(100, 2), Row(20, 2)]
    alone = make_step(shape, few)
    beside = make_step(shape, [*few, Row(690, 2), Row(5, 3)])
    kept = len(alone.qkv)
    beside.qkv[:kept] = alone.qkv
    for from_row, to_row in zip(alone.inputs.layout.page_table, beside.inputs.layout.page_table, strict=False):
        beside.kv[to_row[: len(from_row)].long()] = alone.kv[from_row.long()]
    wanted = alone.run(backends(shape)[0])
    assert torch.equal(beside.run(backends(shape)[0])[:kept], wanted)


@pytest.mark.parametrize("window", [0, 300])
def test_a_long_row_ends_within_the_splits_there_are(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "MOST_SPLITS", 3)
    shape = shape_of(4, 2, 16, window)
    step = make_step(shape, [Row(600, 2), Row(193, 2), Row(30, 2)])
    ours, reference = backends(shape)
    assert paged.splits_of(attention.parted(step.inputs)[1], window) == 3
    torch.testing.assert_close(step.run(ours), step.run(reference), atol=2e-6, rtol=2e-6)


def test_tokens_behind_the_last_row_write_page_0_only() -> None:
    """A batch that a graph holds may be larger than its rows."""
    shape = shape_of(6, 2, 64)
    step = make_step(shape, [Row(40, 1), Row(70, 1), Row(3, 1)])
    ours = backends(shape)[0]
    wanted = step.run(ours)
    pages, _ = step.pages()
    more = replace(step.inputs, positions=torch.cat((step.inputs.positions, torch.tensor([0, 0]))))
    step.inputs, step.qkv = more, torch.cat((step.qkv, torch.full_like(step.qkv[:2], 3.0)))
    step.is_real = torch.cat((step.is_real, torch.tensor([False, False])))
    assert torch.equal(step.run(ours), wanted) and torch.equal(step.pages()[0], pages)


def test_rows_without_tokens_are_passed_over() -> None:
    shape = shape_of(6, 2, 64)
    ours, reference = backends(shape)
    for rows in ([Row(5, 0), Row(40, 1), Row(7, 0), Row(9, 1), Row(3, 0)], [Row(5, 0), Row(40, 20), Row(7, 0)]):
        step = make_step(shape, rows)
        torch.testing.assert_close(step.run(ours), step.run(reference), atol=2e-6, rtol=2e-6)


def test_numbers_may_come_as_a_view_of_one() -> None:
    """As the position of all alternatives of a draft does."""
    shape = shape_of(6, 2, 64)
    step = make_step(shape, [replace(TREE, num=2)])
    assert len(set(step.inputs.positions[1:].tolist())) == 1
    ours = backends(shape)[0]
    wanted = step.run(ours)
    first = step.inputs.positions[0]
    level = replace(step.inputs, positions=torch.full((2,), int(first)))
    step.inputs = level
    same = step.run(ours)
    first = torch.stack((first, first + 1))[:1]  # what lies behind it is another
    table = torch.cat((level.layout.page_table,) * 2, 1)[:, ::1]
    step.inputs = replace(level, positions=first.expand(2), layout=replace(level.layout, page_tables=(table,)))
    assert torch.equal(step.run(ours), same) and not torch.equal(same, wanted)


@pytest.mark.parametrize("name", ["decode", "decode, window", "trees", "int8", "chunk", "chunks and trees"])
def test_no_number_of_the_device_comes_to_the_host(name: str) -> None:
    """On the meta device there is none to come: whoever asks is refused. What grids and memory there are follows from
    the host's bounds alone."""
    case = CASES[name]
    step = case.step()
    tables = tuple(of.to("meta") for of in tables_of(case.shape))
    there = step.to(torch.device("meta"))
    ours = attention.TritonAttention(case.shape, tables)
    try:
        ours.begin(there.inputs, there.kv, there.scales)
        out = ours.attend(1, there.qkv, None, None)
    except (NotImplementedError, RuntimeError) as error:
        pytest.fail(str(error))
    assert out.shape == (len(step.qkv), case.shape.num_heads * case.shape.head_dim)
