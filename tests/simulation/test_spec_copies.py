"""Copies beside a head: which rows copy, what, and when the head is not asked; streams are the reference's."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.verify import Drafts
from shared.engine.window import merge
from shared.speculation.copying import CopyingDrafter
from shared.speculation.ngram import LONGEST_MATCH
from tests.support.cores.core_rig import CoreKnobs, assert_streams, assert_whole, draw_jobs, make_core, run_local

WORDS = {1: 40, 2: 8, 3: 3}  # HashLM's, by `shortest`: of all 96 little ever stands twice


def copy_of(text: list[int], shortest: int, num_drafts: int) -> list[int] | None:
    """What follows where the last `shortest` tokens or more stood before; None where they never did."""
    for length in range(LONGEST_MATCH, shortest - 1, -1):
        ends = [e for e in range(length, len(text)) if text[e - length : e] == text[-length:]]
        if len(text) > length and ends:
            longer = list(text)
            for i in range(num_drafts):
                longer.append(longer[ends[-1] + i])
            return longer[len(text) :]
    return None


def test_rows_that_copy_are_chains_among_trees() -> None:
    copies = torch.tensor([[1, 2, 3], [4, 5, 6]])
    trees = Drafts(torch.tensor([[11, 12, 13], [14, 15, 16]]), torch.tensor([[0, 0, 1], [0, 0, 2]]))
    merged = merge(torch.tensor([[True], [False]]), copies, trees)
    assert merged.parents is not None
    assert merged.ids.tolist() == [[1, 2, 3], [14, 15, 16]] and merged.parents.tolist() == [[0, 1, 2], [0, 0, 2]]
    chains = merge(torch.tensor([[False], [True]]), copies, Drafts(trees.ids))
    assert chains.parents is None and chains.ids.tolist() == [[11, 12, 13], [4, 5, 6]]


class Watched:
    """Follows both drafters of a core; knows every row's whole text."""

    def __init__(self, drafter: CopyingDrafter, texts: dict[str, list[int]], shortest: int) -> None:
        self._head, self._shortest, self._texts = drafter._head, shortest, texts
        self._propose, self._ask = drafter.propose, self._head.propose
        self._said: Drafts | None = None
        self.asked = self.unasked = self.copied = self.drafted = 0
        self.wrong: list[tuple[str, int]] = []
        drafter.propose, self._head.propose = self.propose, self.ask  # type: ignore[method-assign]

    def ask(self, *args) -> Drafts:  # noqa: ANN002
        self._said = self._ask(*args)
        return self._said

    def propose(self, fb: ForwardBatch, *rest) -> Drafts:  # noqa: ANN002
        self._said, first = None, fb.plan.num_prefill
        drafts = self._propose(fb, *rest)
        rows = zip(fb.plan.row_ids[first:], fb.committed[first:].tolist(), strict=True)
        expected = [self._expected(row_id.key.rid, committed, fb.plan.width - 1) for row_id, committed in rows]
        self.asked += self._said is not None
        self.unasked += self._said is None
        for n, (where, is_known, copy) in enumerate(expected):
            own = copy if copy is not None else self._said.ids[n].tolist() if self._said is not None else None
            self.copied += is_known and copy is not None
            self.drafted += is_known and copy is None
            if is_known and drafts.ids[n].tolist() != own:
                self.wrong.append(where)
        return drafts

    def _expected(self, rid: str, committed: int, num: int) -> tuple[tuple[str, int], bool, list[int] | None]:
        """What follows the end of a zombie is nobody's."""
        text = self._texts[rid]
        return (rid, committed), committed < len(text), copy_of(text[: committed + 1], self._shortest, num)


@pytest.mark.parametrize("shortest", [1, 2, 3])
@pytest.mark.parametrize("tree", [{}, {"topk": 2, "steps": 3}])
def test_rows_with_repeated_ends_copy_and_the_head_drafts_others(shortest: int, tree: dict) -> None:
    rng = random.Random(shortest)
    bias = tuple((token, 40.0) for token in range(WORDS[shortest]))
    jobs = [replace(one, sampling=replace(one.sampling, logit_bias=bias)) for one in draw_jobs(rng, 24)]
    core = make_core(CoreKnobs(backend="simulated", width=6, copies=shortest, num_pages=300, seed=shortest, **tree))
    drafter = core.engine.worker.drafter
    assert isinstance(drafter, CopyingDrafter)
    watched = Watched(drafter, {f"r{one.rid}": [*one.prompt, *one.expected()] for one in jobs}, shortest)
    assert_streams(jobs, run_local(core, jobs, retract_every=7, rng=rng))
    assert_whole(core)
    assert not watched.wrong
    assert min(watched.copied, watched.drafted, watched.asked) > 20 and watched.unasked > 3
