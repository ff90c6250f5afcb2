"""Penalties, bias, mask and filters against plain Python that knows only the definition; and the two implementations
against each other, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shared.core.sampling_params import PARAMETERS, SamplingParams, Step
from shared.kernel.sampling.noise import noise_bits, row_keys
from shared.kernel.sampling.sample_constants import GREEDY_BELOW
from shared.kernel.sampling.sample_team import PlacedParams, TeamSampler
from shared.kernel.team.team import Team
from shared.sample.candidates import rank_candidates
from shared.sample.interface import History, SamplingBatch
from shared.sample.sampler import sample
from shared.sample.sampler_numba import NO_TOKEN, outputs_of, row_params, sample_cpu
from tests.support.cores.sampling_cases import (
    EFFECTS,
    VOCAB,
    Case,
    Sampler,
    draws_with,
    make_params,
    rank_tensors,
    sample_tensors,
    windows,
)

BOTH = pytest.mark.parametrize("sampler", [sample_cpu, sample_tensors])

# --- the definition, in plain Python ---------------------------------------------------------------------------------


def plain_edit(logits: list[float], params: SamplingParams, tokens: list[int], prompt_len: int) -> list[float]:
    scores = list(logits)
    for i in set(tokens):
        scores[i] = scores[i] / params.repetition_penalty if scores[i] > 0 else scores[i] * params.repetition_penalty
    output = tokens[prompt_len:]
    for i in set(output):
        scores[i] -= params.presence_penalty + params.frequency_penalty * output.count(i)
    for i, value in params.logit_bias:
        scores[i] += value
    if len(output) < params.min_tokens:
        for i in params.stop_token_ids:
            scores[i] = -1e30
    if params.allowed_token_ids:
        scores = [score if i in params.allowed_token_ids else -math.inf for i, score in enumerate(scores)]
    for *before, last in params.bad_words:
        if output[len(output) - len(before) :] == before and scores[last] > -math.inf:
            scores[last] = -1e30
    return scores


def plain_filter(scores: list[float], params: SamplingParams) -> list[int]:
    ranking = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if params.top_k > 0:
        ranking = ranking[: params.top_k]
    best = scores[ranking[0]]
    weights = [math.exp((scores[i] - best) / params.temperature) for i in ranking]
    if params.top_p < 1:
        keep, mass = 0, 0.0
        while keep == 0 or mass < params.top_p * sum(weights):
            mass, keep = mass + weights[keep], keep + 1
        ranking, weights = ranking[:keep], weights[:keep]
    return [i for i, weight in zip(ranking, weights, strict=True) if weight >= params.min_p]


def plain_sample(logits: list[float], params: SamplingParams, seed: int, tokens: list[int], prompt_len: int) -> int:
    scores = plain_edit(logits, params, tokens, prompt_len)
    if params.temperature == 0:
        return max(range(len(scores)), key=lambda i: (scores[i], -i))
    keys = row_keys(seed, len(tokens))
    noise = [-math.log(-math.log((noise_bits(*keys, i) + 0.5) / 2**23)) for i in range(len(scores))]
    best = max(scores)
    return max(plain_filter(scores, params), key=lambda i: ((scores[i] - best) / params.temperature + noise[i], -i))


# --- cases ---------------------------------------------------------------------------------------------------------


def plain(case: Case, e: int) -> int:
    b = case.rows[e]
    tokens = case.history.tokens[int(case.history.rows[b]), : int(case.positions[e]) + 1].tolist()
    return plain_sample(case.logits[e].tolist(), case.params[b], case.seeds[b], tokens, case.prompt_lens[b])


@BOTH
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_rule_equals_its_definition_in_plain_python(sampler: Sampler, seed: int) -> None:
    case = Case(seed)
    assert case.run(sampler).ids.tolist() == [plain(case, e) for e in range(len(case.rows))]


@BOTH
def test_a_neutral_value_changes_nothing(sampler: Sampler) -> None:
    """In a row alone, no kernel reads the other parameters; beside rows that have them set, the kernels do."""
    assert EFFECTS.keys() == {one.name for one in PARAMETERS if one.step is not Step.NONE}
    sets = [{}, *EFFECTS.values()]
    neutral, *others = draws_with(sampler, sets)
    assert [[neutral], *([ids] for ids in others)] == [draws_with(sampler, [one]) for one in sets]
    assert [name for name, ids in zip(EFFECTS, others, strict=True) if ids == neutral] == [], "without effect"


@pytest.mark.rule("H35")
def test_numba_and_torch_agree_bit_for_bit() -> None:
    for seed in range(10, 30):
        case = Case(seed, num_logprobs=seed % 5 - 1)
        a, b = case.run(sample_cpu), case.run(sample_tensors)
        for name in ("ids", "logprobs", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("scale", [0.0, 1e-3, 60.0])
def test_numba_and_torch_agree_on_ties_and_on_extreme_logits(scale: float) -> None:
    """Coarse logits tie by the dozen, inside and at the edge of every filter."""
    for seed in range(5):
        case = Case(seed)
        case.logits = (case.logits * 4).round() * scale
        case.logits[:, ::7] = -torch.inf
        assert torch.equal(case.run(sample_cpu).ids, case.run(sample_tensors).ids)


@pytest.mark.rule("H35")
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 1000.0])
@pytest.mark.parametrize("knobs", [{}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_p": 0.9, "min_p": 0.01}], ids=str)
@pytest.mark.parametrize("temperature", [GREEDY_BELOW, 0.3, 1.0, 50.0])
def test_many_blocks_of_ids_give_the_same_draws(scale: float, knobs: dict[str, float], temperature: float) -> None:
    """Blocks are skipped, products overflow, and the last block is short and, in one row, the only one with ids."""
    num, rng = 40, np.random.default_rng(6)
    logits = torch.from_numpy((rng.standard_normal((num, 5_003)) * scale).astype(np.float32) + 7 * scale)
    logits[:, 1::5], logits[:, 2::50], logits[0, :-20] = -torch.inf, -3e38, -torch.inf
    batch = SamplingBatch.build([SamplingParams(max_tokens=1, temperature=temperature, **knobs)], [5], [1])
    found = [
        sampler(logits, batch, np.zeros(num, np.int64), torch.arange(num), None).ids
        for sampler in (sample_cpu, sample_tensors)
    ]
    assert torch.equal(*found)
    if temperature > scale:
        assert (found[0] != logits.argmax(dim=1)).sum() > num / 2, "noise matters"


@pytest.mark.rule("H35")
@BOTH
def test_a_row_does_not_depend_on_its_batch_mates(sampler: Sampler) -> None:
    case = Case(4, num_logprobs=2)
    together = case.run(sampler)
    for e in np.random.default_rng(0).permutation(len(case.rows))[:30]:
        b = case.rows[e]
        batch = SamplingBatch.build([case.params[b]], [case.seeds[b]], [case.prompt_lens[b]])
        history = History(case.history.tokens, case.history.rows[b : b + 1])
        alone = sampler(case.logits[e : e + 1], batch, np.zeros(1, np.int64), case.positions[e : e + 1], history)
        assert alone.ids[0] == together.ids[e]
        assert alone.logprobs[0] == together.logprobs[e]


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_do_not_show(num_threads: int) -> None:
    case = Case(5)
    outputs = outputs_of(case.rows, case.positions, case.history)
    ids = np.full(len(case.rows), -1, np.int64)
    TeamSampler(Team(num_threads)).draw(case.logits.numpy(), row_params(case.batch), outputs, ids)
    assert torch.equal(torch.from_numpy(ids), case.run(sample_cpu).ids)


def test_batches_that_take_turns_are_laid_out_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of two engines in one process do."""
    case, laid_out = Case(5), list[SamplingBatch]()
    batches = [case.batch, case.batch]

    def counted(batch: SamplingBatch) -> PlacedParams:
        laid_out.append(batch)
        return row_params(batch)

    monkeypatch.setattr("shared.sample.sampler_numba.row_params", counted)
    for batch in batches * 2:
        sample_cpu(case.logits, batch, case.rows, case.positions, case.history)
    assert [id(batch) for batch in laid_out] == [id(batch) for batch in batches]


def test_an_array_of_another_layout_is_refused() -> None:
    """Code for one layout reads every array as that."""
    case = Case(5)
    outputs, ids = outputs_of(case.rows, case.positions, case.history), np.zeros(len(case.rows), np.int64)
    params, logits = row_params(case.batch), case.logits.numpy()
    for wrong in (
        outputs._replace(common=outputs.common.astype(np.int32)),
        outputs._replace(history=np.asfortranarray(outputs.history)),
    ):
        with pytest.raises(TypeError, match="contiguous"):
            TeamSampler(Team(1)).draw(logits, params, wrong, ids)


@BOTH
def test_equal_logits_go_to_the_lowest_id(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 41, 90]] = 3.0
    one = np.zeros(1, np.int64)
    greedy = SamplingBatch.build([SamplingParams(max_tokens=1, temperature=0.0)], [1], [1])
    assert sampler(logits, greedy, one, torch.tensor([5]), None).ids.tolist() == [40]
    batch = SamplingBatch.build([SamplingParams(max_tokens=1, top_k=2, num_logprobs=3)], [1], [1])
    output = sampler(logits, batch, one, torch.tensor([5]), None)
    assert output.ids.item() in (40, 41) and output.top_ids.tolist() == [[40, 41, 90]]


@BOTH
def test_logprobs_are_of_the_raw_distribution(sampler: Sampler) -> None:
    case = Case(7, num_logprobs=4)
    output = case.run(sampler)
    exact = torch.log_softmax(case.logits.double(), dim=1)
    chosen = exact.gather(1, output.ids[:, None])[:, 0]
    assert torch.allclose(output.logprobs.double(), chosen, atol=2e-6)
    best = exact.topk(4, dim=1)
    assert torch.equal(output.top_ids, best.indices)
    assert torch.allclose(output.top_logprobs.double(), best.values, atol=2e-6)


@BOTH
def test_each_row_gets_as_many_logprobs_as_it_asked_for(sampler: Sampler) -> None:
    wants = [-1, 0, 2, 5]
    params = [SamplingParams(max_tokens=1, num_logprobs=n) for n in wants]
    batch = SamplingBatch.build(params, [1] * 4, [1] * 4)
    logits = torch.from_numpy(np.random.default_rng(9).standard_normal((4, VOCAB)).astype(np.float32))
    output = sampler(logits, batch, np.arange(4), torch.full((4,), 3), None)
    assert (output.top_ids != NO_TOKEN).sum(dim=1).tolist() == [0, 0, 2, 5]
    assert (output.logprobs != 0).tolist() == [False, True, True, True]


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_give_some_id(sampler: Sampler, bad: float) -> None:
    case = Case(8)
    case.logits[:] = bad
    ids = case.run(sampler).ids
    assert ((ids >= 0) & (ids < VOCAB)).all()


@pytest.mark.rule("H28")
@BOTH
def test_no_outputs_is_not_an_error(sampler: Sampler) -> None:
    case = Case(9)
    none = np.zeros(0, np.int64)
    output = sampler(case.logits[:0], case.batch, none, torch.zeros(0, dtype=torch.int64), case.history)
    assert output.ids.shape == (0,) and output.top_ids.shape == (0, 0)


def test_ids_outside_the_vocabulary_are_skipped() -> None:
    """Stop ids, bias and stale history come from elsewhere: none may reach foreign memory."""
    beyond = {"logit_bias": ((VOCAB + 3, 1.0),), "bad_words": ((VOCAB,), (VOCAB + 1, 5)), "min_tokens": 99}
    params = make_params({}, stop_token_ids=(VOCAB, -1), **beyond)
    penalised = make_params({}, repetition_penalty=1.2)
    batch = SamplingBatch.build([params, penalised], [1, 1], [1, 1])
    history = History(torch.full((2, 10), 10**9, dtype=torch.int32), torch.arange(2))
    logits = torch.from_numpy(np.random.default_rng(9).standard_normal((2, VOCAB)).astype(np.float32))
    free = SamplingBatch.build([make_params({})] * 2, [1, 1], [1, 1])
    positions = torch.full((2,), 4)
    expected = sample(logits, free, np.arange(2), positions).ids
    for sampler in (sample_cpu, sample_tensors):
        assert torch.equal(sampler(logits, batch, np.arange(2), positions, history).ids, expected)


def test_misuse_is_refused() -> None:
    case = Case(10)
    with pytest.raises(ValueError, match="history"):
        sample(case.logits, case.batch, case.rows, case.positions, None)
    with pytest.raises(TypeError, match="float32"):
        sample(case.logits.bfloat16(), case.batch, case.rows, case.positions, case.history)
    with pytest.raises(IndexError, match="batch rows"):
        sample(case.logits, case.batch, case.rows + 1, case.positions, case.history)
    with pytest.raises(IndexError, match="past the history"):
        sample(case.logits, case.batch, case.rows, case.positions + 40, case.history)
    with pytest.raises(IndexError, match="positions"):
        sample(case.logits, case.batch, case.rows, case.positions[:1], case.history)


@BOTH
def test_a_bad_word_counts_from_the_answer_s_first_token(sampler: Sampler) -> None:
    """The prompt ends with 5, 6. After it, 7 would be the third of a bad word only if the answer had begun it."""
    logits = torch.zeros((3, VOCAB))
    logits[:, 7] = 10.0
    history = History(torch.tensor([[1, 5, 6], [5, 6, 0], [1, 5, 6]], dtype=torch.int32), torch.arange(3))
    params = make_params({"temperature": 0.0}, bad_words=((5, 6, 7),))
    batch = SamplingBatch.build([params] * 3, [1] * 3, prompt_lens=[3, 0, 2])
    ids = sampler(logits, batch, np.arange(3), torch.tensor([2, 1, 2]), history).ids.tolist()
    assert ids == [7, 0, 7]


# --- windows of alternatives ------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("seed", [1, 2])
def test_drafts_of_an_output_count_as_if_they_had_been_emitted(sampler: Sampler, seed: int) -> None:
    """Each output alone, over a plain history that goes through its own drafts, gives the same token."""
    case, drafts = windows(seed)
    together = case.run(sampler)
    for e, b in enumerate(case.rows):
        tokens, common = case.history.tokens.clone(), int(case.history.common[e])  # type: ignore[index]
        tokens[int(case.history.rows[b]), common : common + len(drafts[e])] = torch.tensor(drafts[e], dtype=torch.int32)
        plain_history = History(tokens, case.history.rows[b : b + 1])
        batch = SamplingBatch.build([case.params[b]], [case.seeds[b]], [case.prompt_lens[b]])
        one = np.zeros(1, np.int64)
        alone = sampler(case.logits[e : e + 1], batch, one, case.positions[e : e + 1], plain_history)
        assert alone.ids[0] == together.ids[e], f"output {e} of {case.params[b]}"


def test_a_wrong_window_is_refused() -> None:
    case, _ = windows(1)
    case.history.drafted = case.history.drafted[1:]  # type: ignore[index]
    with pytest.raises(IndexError, match="draft ancestors"):
        sample(case.logits, case.batch, case.rows, case.positions, case.history)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_candidates_begin_with_the_draw_then_follow_noisy_logits(seed: int) -> None:
    case, drafts = windows(seed)
    case.logits[::7, ::3] = -torch.inf  # a draft head that has no id for them
    arguments = (case.logits, case.batch, case.rows, case.positions, case.history)
    ids, log_probs = rank_candidates(*arguments, num=6)
    for a, b in zip((ids, log_probs), rank_tensors(*arguments, num=6), strict=True):
        assert torch.equal(a, b), "both implementations give the same bits"
    assert torch.equal(ids[:, 0], sample(*arguments).ids)
    assert (log_probs <= 0).all() and (log_probs[:, 1:-1] >= log_probs[:, 2:]).all()
    for e in range(0, len(case.rows), 5):
        b = case.rows[e]
        own = case.history.tokens[int(case.history.rows[b]), : int(case.history.common[e])].tolist()  # type: ignore[index]
        scores = plain_edit(case.logits[e].tolist(), case.params[b], own + drafts[e], case.prompt_lens[b])
        if case.params[b].temperature:
            keys = row_keys(case.seeds[b], int(case.positions[e]) + 1)
            noise = [-math.log(-math.log((noise_bits(*keys, i) + 0.5) / 2**23)) for i in range(VOCAB)]
            scores = [s + case.params[b].temperature * n for s, n in zip(scores, noise, strict=True)]
        others = sorted(set(range(VOCAB)) - {int(ids[e, 0])}, key=lambda i: (-scores[i], i))
        assert ids[e, 1:].tolist() == others[:5]
        exact = torch.log_softmax(torch.tensor(scores, dtype=torch.float64), dim=0)
        torch.testing.assert_close(log_probs[e, 1:].double(), exact[ids[e, 1:]], atol=1e-4, rtol=1e-4)
        assert float(log_probs[e, 0]) == pytest.approx(float(exact.max()), abs=1e-4)
