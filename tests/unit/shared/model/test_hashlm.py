"""HashLM against its plain reference, and what it must notice: foreign, swapped and stale pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.core.sampling_params import SamplingParams
from shared.kernel.code.step_layout import Layout
from shared.kv.pool import KVPool
from shared.model.hashlm.model import HashLM
from shared.model.math.interface import ModelInputs, ModelOutput
from tests.support.oracles.hashlm_reference import reference_run, reference_stream

GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)


def ragged(rows: list[tuple[list[int], int]], tables: list[list[int]]) -> ModelInputs:
    """One step of rows (ids, first position); every token's logits are asked for."""
    ids = [i for row, _ in rows for i in row]
    positions = [start + k for row, start in rows for k in range(len(row))]
    lens = [len(row) for row, _ in rows]
    table = np.zeros((len(rows), max(len(t) for t in tables)), dtype=np.int32)
    for b, pages in enumerate(tables):
        table[b, : len(pages)] = pages
    return ModelInputs(
        input_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        layout=Layout(
            cu_q_lens=torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32),
            page_tables=(torch.from_numpy(table),),
            max_q_len=max(lens),
            max_seq_len=max(positions) + 1,
        ),
        logits_idx=torch.arange(len(ids)),
    )


def forward(model: HashLM, kv: KVPool, ids: list[int], start: int, pages: list[int]) -> ModelOutput:
    return model.forward(ragged([(ids, start)], [pages]), kv)


def make_pool(model: HashLM, page_size: int, num_pages: int = 64) -> KVPool:
    return KVPool(model.kv_planes(page_size), num_pages, page_size)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_any_chunking_and_paging_gives_the_reference_stream(page_size: int, chunk: int) -> None:
    model = HashLM()
    kv = make_pool(model, page_size)
    rng = np.random.default_rng(7)
    prompt = rng.integers(0, 96, 21).tolist()
    pages = rng.permutation(np.arange(1, 64))[: -(-40 // page_size)].tolist()
    for start in range(0, len(prompt), chunk):
        logits = forward(model, kv, prompt[start : start + chunk], start, pages).logits
    emitted = [int(logits[-1].argmax())]
    while len(emitted) < 19:
        logits = forward(model, kv, emitted[-1:], len(prompt) + len(emitted) - 1, pages).logits
        emitted.append(int(logits[-1].argmax()))
    assert emitted == reference_stream(prompt, GREEDY, seed=0, num=19)


def test_rows_of_one_ragged_step_do_not_touch_each_other() -> None:
    model = HashLM()
    alone, together = make_pool(model, 4), make_pool(model, 4)
    first, second = list(range(10)), list(range(40, 47))
    a = forward(model, alone, first, 0, [3, 9, 1])
    b = forward(model, alone, second, 0, [5, 6])
    both = model.forward(ragged([(first, 0), (second, 0)], [[3, 9, 1], [5, 6]]), together)
    assert torch.equal(torch.cat([a.logits, b.logits]), both.logits)
    assert torch.equal(torch.cat([a.hidden, b.hidden]), both.hidden)


def test_every_swap_of_two_pages_shows() -> None:
    model = HashLM()
    kv = make_pool(model, 2)
    pages = [7, 3, 11, 5, 2, 13]
    ids = list(range(12))
    forward(model, kv, ids, 0, pages)
    right = forward(model, kv, [20], 12, [*pages, 20]).hidden.item()
    for i in range(6):
        for j in range(i):
            swapped = list(pages)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            assert forward(model, kv, [20], 12, [*swapped, 20]).hidden.item() != right


@pytest.mark.parametrize("layer", [0, 1])
def test_one_stale_slot_of_either_layer_shows(layer: int) -> None:
    model = HashLM()
    kv = make_pool(model, 4)
    forward(model, kv, list(range(8)), 0, [1, 2])
    right = forward(model, kv, [9], 8, [1, 2, 3]).hidden.item()
    kv.plane("kv")[2, layer, 1] += 1
    assert forward(model, kv, [9], 8, [1, 2, 3]).hidden.item() != right


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


def test_reference_ends_at_a_stop_id_but_not_before_min_tokens() -> None:
    prompt = [1, 2, 3]
    free = reference_run(prompt, SamplingParams(max_tokens=400), seed=5, num=400)
    first_eos = free.ids.index(95)
    stopped = reference_run(prompt, SamplingParams(max_tokens=400, stop_token_ids=(95,)), seed=5, num=400)
    assert (stopped.ids, stopped.finish_reason) == (free.ids[: first_eos + 1], "stop")
    late = SamplingParams(max_tokens=400, stop_token_ids=(95,), min_tokens=first_eos + 5)
    longer = reference_run(prompt, late, seed=5, num=400)
    assert longer.ids[:first_eos] == free.ids[:first_eos]
    assert len(longer.ids) > first_eos + 5 and 95 not in longer.ids[: first_eos + 5]


def test_reference_depends_on_every_parameter() -> None:
    base = {"max_tokens": 200, "temperature": 0.8}
    changes = [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}]
    changes += [{"repetition_penalty": 1.3}, {"presence_penalty": 0.9}, {"frequency_penalty": 0.5}]
    changes += [{"logit_bias": ((3, 4.0),)}]
    streams = [tuple(reference_stream([4], SamplingParams(**{**base, **c}), 11, 200)) for c in changes]
    streams.append(tuple(reference_stream([4], SamplingParams(**base), 12, 200)))
    assert len(set(streams)) == len(streams)
    assert all(len(stream) == 200 for stream in streams)


def test_vocabulary_outside_the_tie_free_range_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        HashLM(vocab_size=5000)
