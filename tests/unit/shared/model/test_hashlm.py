"""HashLM against its plain reference, and what it must notice: foreign, swapped and stale pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.core.sampling_params import SamplingParams
from shared.model.hashlm.model import HashLM
from tests.support.models.tiny_models import Rows, prompt
from tests.support.oracles.hashlm_reference import reference_stream

GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_any_chunking_and_paging_gives_the_reference_stream(page_size: int, chunk: int) -> None:
    """Another row is in every step."""
    rows, ids = Rows(HashLM(), 2, page_size), prompt(21)
    for start in range(0, len(ids), chunk):
        logits = rows.step({0: ids[start : start + chunk], 1: [start]})[:-1]
    emitted = [int(logits[-1].argmax())]
    while len(emitted) < 19:
        emitted.append(int(rows.step({0: emitted[-1:], 1: [5]})[0].argmax()))
    assert emitted == reference_stream(ids, GREEDY, seed=0, num=19)


def test_every_swap_of_two_pages_shows() -> None:
    rows = Rows(HashLM(), 1, page_size=2)
    rows.step({0: list(range(12))})
    pages = rows.table.clone()
    right = again(rows)
    for i in range(6):
        for j in range(i):
            rows.table[0, [i, j]] = pages[0, [j, i]]
            assert not torch.equal(again(rows), right)
            rows.table[:] = pages


def again(rows: Rows) -> torch.Tensor:
    """The logits of one more token, which is taken back."""
    logits = rows.step({0: [20]})
    rows.lens[0] -= 1
    return logits


@pytest.mark.parametrize("layer", [0, 1])
def test_one_stale_slot_of_either_layer_shows(layer: int) -> None:
    rows = Rows(HashLM(), 1, page_size=4)
    rows.step({0: list(range(8))})
    right = again(rows)
    rows.pool.plane("kv")[rows.table[0, 1].long(), layer, 1] += 1
    assert not torch.equal(again(rows), right)


def test_logits_are_unique_exact_and_end_sequences_now_and_then() -> None:
    model = HashLM()
    logits = model.logits_of(np.random.default_rng(1).integers(0, 2**63, 4000).astype(np.uint64))
    assert logits.dtype == torch.float32
    assert all(len(row.unique()) == 96 for row in logits[:200])
    assert (logits * 2**19 == (logits * 2**19).round()).all()
    assert 0.02 < (logits.argmax(dim=1) == 95).double().mean() < 0.06
    assert 0.02 < torch.softmax(logits, dim=1)[:, 95].mean() < 0.06
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert 1.0 < entropy < 3.0  # neither greedy in disguise nor uniform


def test_vocabulary_outside_the_tie_free_range_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        HashLM(vocab_size=5000)
