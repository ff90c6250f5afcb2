"""Trees of drafts through the engine's parts, each against a slow reference: shape, verify, penalties, compaction."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.plan import StepPlan
from shared.engine.verify import Drafts, last_token_idx, next_ids, verify
from shared.engine.window import compact, counted_tokens, lay_out
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.math.interface import ModelOutput
from shared.sample.interface import SampleOutput
from tests.support.cores.draft_trees import depths, draw_parents, path_to, visible_bits
from tests.support.cores.verify_steps import make_batch, make_plan

PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 16])


def drawn(ids: torch.Tensor) -> SampleOutput:
    """Draws whose other columns tell which output they belong to."""
    number = torch.arange(len(ids))
    return SampleOutput(ids, number.float(), number[:, None], number[:, None].float())


def slow_accept(parents: list[int], ids: list[int], draws: list[int]) -> list[int]:
    """The longest path on which every draft equals its parent's draw; of equally long ones the lowest node's."""
    best = [0]
    for node in range(1, len(draws)):
        path = path_to(parents, node)
        right = all(ids[n - 1] == draws[parents[n - 1]] for n in path[1:])
        if right and len(path) > len(best):
            best = path
    return best


@given(seed=st.integers(0, 2**32), width=st.integers(2, 16), num_rows=st.integers(1, 4), vocab=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_verify_takes_the_longest_right_path(seed: int, width: int, num_rows: int, vocab: int) -> None:
    """A vocabulary of few tokens: siblings may even be equal."""
    rng = random.Random(seed)
    chunks = rng.choice([[], [4], [2, 5]])
    trees = [draw_parents(rng, width) for _ in range(num_rows)]
    ids = [[rng.randrange(vocab) for _ in tree] for tree in trees]
    fb = make_batch(make_plan([rng.randrange(1, 40) for _ in trees], width, chunks))
    drafts = Drafts(torch.tensor(ids), torch.tensor(trees))
    lay_out(fb, drafts)
    num_chunk = 1 if chunks else 0
    draws = torch.tensor([rng.randrange(vocab) for _ in range(num_chunk + num_rows * width)])
    verified = verify(fb, drawn(draws), drafts)
    assert verified.order is not None
    for d, (tree, row_ids) in enumerate(zip(trees, ids, strict=True)):
        b, first = len(chunks) + d, num_chunk + d * width
        row_draws = draws[first : first + width].tolist()
        path = slow_accept(tree, row_ids, row_draws)
        assert verified.accept_lens[b] == len(path)
        assert verified.order[d, : len(path)].tolist() == path
        assert sorted(verified.order[d].tolist()) == list(range(width))
        assert verified.tokens[b, : len(path)].tolist() == [row_draws[node] for node in path]
        assert verified.next_token[b] == row_draws[path[-1]]
        assert verified.seq_lens[b] == fb.committed[b] + len(path)
        outputs = verified.sampled.top_ids[verified.output_of[b, : len(path)], 0]
        assert (outputs - first).tolist() == path, "logprobs are those of the path's nodes"
        tokens = int(fb.inputs.layout.cu_q_lens[b])
        assert next_ids(fb, verified)[tokens : tokens + len(path)].tolist() == verified.tokens[b, : len(path)].tolist()
        assert last_token_idx(fb, verified)[b] == tokens + len(path) - 1
    if chunks:
        assert verified.tokens[len(chunks) - 1, 0] == draws[0] and verified.accept_lens[len(chunks) - 1] == 1


@given(seed=st.integers(0, 2**32), width=st.integers(2, 16))
@settings(max_examples=60, deadline=None)
def test_a_tree_is_laid_out_by_depth_and_ancestors(seed: int, width: int) -> None:
    rng = random.Random(seed)
    trees = [draw_parents(rng, width) for _ in range(2)]
    ids = torch.tensor([[rng.randrange(90) for _ in tree] for tree in trees])
    fb = make_batch(make_plan([9, 20], width, [4]))
    before = fb.inputs.input_ids.clone()
    drafts = Drafts(ids, torch.tensor(trees))
    lay_out(fb, drafts)
    inputs = fb.inputs
    assert inputs.slots is not None and inputs.visible is not None
    common, drafted = counted_tokens(fb, drafts)
    assert common[0] == 7 and (drafted[0] == -1).all(), "a chunk's output counts its row up to its own position"
    for d, (tree, committed) in enumerate(zip(trees, (9, 20), strict=True)):
        window = slice(4 + d * width, 4 + (d + 1) * width)
        assert inputs.input_ids[window].tolist() == [before[4 + d * width], *ids[d]]
        assert inputs.slots[window].tolist() == list(range(committed, committed + width))
        assert inputs.positions[window].tolist() == [committed + depth for depth in depths(tree)]
        assert torch.equal(inputs.visible[window], visible_bits(tree))
        for node in range(width):
            output = 1 + d * width + node
            counted = [int(i) for i in drafted[output] if i >= 0]
            assert common[output] == committed + 1
            assert counted == [int(ids[d, n - 1]) for n in path_to(tree, node)[1:]], "no sibling, and itself"
    assert inputs.positions[:4].tolist() == inputs.slots[:4].tolist() == [3, 4, 5, 6]
    assert (inputs.visible[:4] == -1).all()


# --- compaction -------------------------------------------------------------------------------------------------------


def make_pool(page_size: int, num_pages: int) -> KVPool:
    """Planes whose slots lie in different dimensions; every value is another one."""
    planes = (
        PlaneSpec("kv", (3, 2, 2, page_size, 4), torch.float32),
        PlaneSpec("hash", (2, page_size), torch.int64, slot_dim=-1),
        PlaneSpec("draft", (page_size, 5), torch.int64),
    )
    pool = KVPool(planes, num_pages, page_size)
    for plane in planes:
        view = pool.plane(plane.name)
        view.copy_(torch.arange(view.numel()).view(view.shape))
    return pool


def slots_of(pool: KVPool, name: str, pages: np.ndarray, slots: list[int]) -> list[torch.Tensor]:
    """What a row has in some slots of a plane, read one by one."""
    dims = {"kv": 3, "hash": 1, "draft": 0}
    found = []
    for slot in slots:
        page = pool.plane(name)[int(pages[slot // pool.page_size])]
        found.append(page.select(dims[name], slot % pool.page_size).clone())
    return found


@pytest.mark.rule("H12")
@PAGE_SIZES
@pytest.mark.parametrize("seed", range(6))
def test_compaction_moves_all_planes_slots_and_the_step_s_rows(page_size: int, seed: int) -> None:
    """Windows that cross pages, paths whose sources and targets overlap."""
    rng = random.Random(seed)
    width = rng.choice([3, 8, 16])
    plan = make_plan([rng.choice([14, 15, 16]), rng.randrange(1, 40), 13], width, [4], page_size)
    fb = make_batch(plan)
    pool = make_pool(page_size, int(plan.layout.page_table.max()) + 1)
    trees = [draw_parents(rng, width) for _ in range(3)]
    lay_out(fb, Drafts(torch.zeros((3, width - 1), dtype=torch.int64), torch.tensor(trees)))
    inputs = fb.inputs
    inputs.input_ids = torch.arange(len(inputs.input_ids))
    output = ModelOutput(torch.empty(0), torch.arange(1 + 3 * width)[:, None], torch.arange(4 + 3 * width)[:, None])
    order = torch.tensor([[0, *rng.sample(range(1, width), width - 1)] for _ in trees])
    committed = plan.seq_lens_cpu.tolist()[1:]
    names = [plane.name for plane in pool.planes]
    want = {}
    for d, start in enumerate(committed):
        slots = [start + node for node in order[d].tolist()]
        want[d] = {name: slots_of(pool, name, plan.layout.page_table[1 + d], slots) for name in names}
    untouched = pool.pages_bytes.clone()
    compact(fb, output, order, pool)
    for d, start in enumerate(committed):
        for name in names:
            got = slots_of(pool, name, plan.layout.page_table[1 + d], list(range(start, start + width)))
            for node, (a, b) in enumerate(zip(got, want[d][name], strict=True)):
                assert torch.equal(a, b), f"plane {name}, row {d}, place {node}"
        tokens = slice(4 + d * width, 4 + (d + 1) * width)
        assert (inputs.input_ids[tokens] - 4 - d * width).tolist() == order[d].tolist()
        assert output.aux is not None and torch.equal(output.aux[tokens, 0], inputs.input_ids[tokens])
        assert (output.hidden[1 + d * width : 1 + (d + 1) * width, 0] - 1 - d * width).tolist() == order[d].tolist()
        assert inputs.positions[tokens].tolist() == list(range(start, start + width))
    assert inputs.slots is None and inputs.visible is None
    assert torch.equal(inputs.input_ids[:4], torch.arange(4)) and inputs.positions[:4].tolist() == [3, 4, 5, 6]
    _assert_only_windows_changed(pool, untouched, plan, width)


def _assert_only_windows_changed(pool: KVPool, before: torch.Tensor, plan: StepPlan, width: int) -> None:
    page_size = pool.page_size
    written = set()
    for b, start in enumerate(plan.seq_lens_cpu.tolist()[1:], start=1):
        written |= {int(plan.layout.page_table[b, slot // page_size]) for slot in range(start, start + width)}
    for page in range(pool.num_pages):
        assert page in written or torch.equal(pool.pages_bytes[page], before[page]), f"page {page}"
