"""Growing a tree of drafts, against a slow reference that runs every path on its own."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.config.settings.settings import SpecConfig
from shared.core.errors import ConfigError
from shared.core.sampling_params import SamplingParams
from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.engine.verify import Drafts
from shared.kernel.attention.attention import AttentionInputs
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.math.draft_head import DraftOutput
from shared.sample.candidates import rank_candidates
from shared.sample.interface import History
from shared.speculation.draft_tree import Level, _likeliest, grow, num_levels
from shared.speculation.draw import Draw
from tests.support.cores.verify_steps import make_batch, make_plan

VOCAB, PAGE = 50, 4
PATH = tuple[int, ...]


def state_of(row_pages: int, path: PATH) -> int:
    """A head's state after a path of drafts, which no other path has."""
    return zlib.crc32(repr((row_pages, path)).encode())


def logits_of(state: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(state).standard_normal(VOCAB).astype(np.float32) * 2)


class ReadingHead:
    """A DraftHead whose state is what it reads through the visible slots of its plane: the ids on the way."""

    hidden_shape: tuple[int, ...] = (1,)
    hidden_dtype = torch.int64
    d2t: torch.Tensor | None = None
    weights_hash = "test"

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return (PlaneSpec("ids", (page_size, 1), torch.int64),)

    def forward(self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool) -> DraftOutput:
        assert view.slots is not None and view.visible is not None
        plane = kv.plane("ids")
        states = []
        for t, (slot, seen) in enumerate(zip(view.slots.tolist(), view.visible.tolist(), strict=True)):
            row = int(torch.searchsorted(view.layout.cu_q_lens[1:], t, right=True))
            pages = view.layout.page_table[row].tolist()
            start = slot - seen.bit_length() + 1
            plane[pages[slot // PAGE], slot % PAGE, 0] = next_ids[t]
            on_the_way = [start + n for n in range(seen.bit_length()) if seen >> n & 1]
            path = tuple(int(plane[pages[s // PAGE], s % PAGE, 0]) for s in on_the_way)
            assert int(features[t, 0]) == state_of(pages[0], path[:-1]), "it stands on its parent's state"
            assert int(view.positions[t]) == start + len(path) - 1, "siblings share a position"
            states.append(state_of(pages[0], path))
        return DraftOutput(torch.tensor(states).unsqueeze(1), torch.stack(list(map(logits_of, states))))


def slow_tree(fb: ForwardBatch, history: History, d: int, topk: int, steps: int) -> dict[PATH, float]:
    """Every candidate of a row by its path, and how likely it is."""
    b, committed = fb.plan.num_prefill + d, int(fb.committed[fb.plan.num_prefill + d])
    pages = int(fb.plan.layout.page_table[b, 0])
    found: dict[PATH, float] = {}
    level: dict[PATH, float] = {(): 0.0}
    for _ in range(steps):
        children: dict[PATH, float] = {}
        for path, score in level.items():
            own = torch.tensor([path if path else (-1,)], dtype=torch.int32)
            counted = History(history.tokens, history.rows, torch.tensor([committed + 1]), own)
            position, logits = torch.tensor([committed + len(path)]), logits_of(state_of(pages, path)).unsqueeze(0)
            ids, log_probs = rank_candidates(logits, fb.plan.sampling, np.array([b]), position, counted, topk)
            for i, log_prob in zip(ids[0].tolist(), log_probs[0].tolist(), strict=True):
                children[*path, i] = score + log_prob
        found |= children
        level = dict(sorted(children.items(), key=lambda item: -item[1])[:topk])
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("topk", "steps", "width"), [(2, 2, 7), (2, 3, 6), (3, 3, 8), (4, 4, 16), (4, 3, 3), (2, 1, 2)]
)
def test_a_tree_is_the_likeliest_of_all_paths(topk: int, steps: int, width: int, temperature: float) -> None:
    sampling = SamplingParams(9, temperature=temperature, repetition_penalty=1.5, presence_penalty=0.5, top_p=0.8)
    plan = make_plan([9, 14], width, [3], PAGE, sampling)
    fb, head = make_batch(plan), ReadingHead()
    kv = KVPool(head.kv_planes(PAGE), int(plan.layout.page_table.max()) + 1, PAGE)
    future_map = FutureMap(4, 64)
    future_map.history[:] = torch.randint(0, VOCAB, (4, 64), generator=torch.Generator().manual_seed(2))
    history = future_map.history_of(fb.future)
    roots = torch.tensor([[state_of(int(plan.layout.page_table[b, 0]), ())] for b in (1, 2)])
    draw = Draw(fb, future_map, VOCAB, *fb.decode_rows())
    last, logits = future_map.history[[2, 3], [9, 14]].long(), torch.stack([logits_of(int(root)) for root in roots])
    ids, probabilities = draw.first(head, logits, last, fb.committed[1:], topk)
    drafts = grow(head, draw, fb, kv, Level(ids, probabilities.log(), torch.full_like(ids, -1)), roots, steps)
    for d in range(2):
        want = slow_tree(fb, history, d, topk, num_levels(width, topk, steps))
        paths = paths_of(drafts, d)
        assert len(set(paths)) == width - 1 and set(paths) <= set(want)
        kept = sorted(want[path] for path in paths)
        best = sorted(want.values())[-(width - 1) :]
        assert kept == pytest.approx(best, abs=1e-4), "none that was left out is likelier"


def paths_of(drafts: Drafts, d: int) -> list[PATH]:
    """Of nodes 1 .. width - 1; every parent comes before its children."""
    assert drafts.parents is not None
    paths: list[PATH] = [()]
    for node, (parent, i) in enumerate(zip(drafts.parents[d].tolist(), drafts.ids[d].tolist(), strict=True), start=1):
        assert 0 <= parent < node
        paths.append((*paths[parent], i))
    return paths[1:]


@given(seed=st.integers(0, 2**32), topk=st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_kept_nodes_have_kept_parents_even_among_equals(seed: int, topk: int) -> None:
    """Scores of few values: ties between a node and its own parent."""
    rng = random.Random(seed)
    levels, first, before = [], 0, 0
    for depth in range(rng.randrange(1, 4)):
        num = topk if depth == 0 else topk * topk
        parents = [-1] * num if depth == 0 else [first + n // topk for n in range(num)]
        above = torch.cat([level.scores for level in levels], dim=1)[0] if levels else torch.zeros(0)
        scores = [(0.0 if p < 0 else float(above[p])) - rng.choice([0.0, 0.0, 1.0, float("inf")]) for p in parents]
        ids = list(range(1000 + before, 1000 + before + num))
        levels.append(Level(torch.tensor([ids]), torch.tensor([scores]), torch.tensor([parents])))
        first, before = before, before + num
    num_nodes = rng.randrange(1, before + 1)
    drafts = _likeliest(levels, num_nodes)
    assert drafts.parents is not None
    candidates = [0, *(int(i) - 999 for i in drafts.ids[0])]  # candidate numbers, from 1 on; 0: the bonus token
    parents = torch.cat([level.parents for level in levels], dim=1)[0]
    for node in range(1, num_nodes + 1):
        parent = candidates[int(drafts.parents[0, node - 1])]
        assert parent == int(parents[candidates[node] - 1]) + 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"spec_topk": 4, "spec_steps": 4, "spec_width": 8}, "12 slots"),
        ({"spec_topk": 2, "spec_steps": 2, "spec_width": 8}, "6 drafts at most"),
        ({"spec": "ngram", "spec_topk": 2}, "only eagle"),
    ],
)
def test_a_tree_that_does_not_fit_its_window_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpecConfig(**({"spec": "eagle"} | fields))  # type: ignore[arg-type]
