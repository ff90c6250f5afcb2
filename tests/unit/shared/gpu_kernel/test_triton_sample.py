"""The sampler in Triton's kernels, interpreted: the ids of torch's, bit for bit, whatever lies around the logits, in
whatever order the programs run, and over however many of them a row's ids are split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shared.core.sampling_params import SamplingParams
from shared.kernel.product import libraries
from shared.sample import sampler as samplers
from shared.sample.candidates import rank_candidates
from shared.sample.interface import DeviceMasks, History, SampleOutput, SamplingBatch, TokenMasks
from shared.sample.params import params_of
from shared.sample.sampler_numba import NO_TOKEN, sample_cpu
from shared.sample.sampler_torch import OutputRows, score_torch
from tests.support.cores.sampling_cases import (
    VOCAB,
    Case,
    make_params,
    masks_on,
    rank_tensors,
    rows_on,
    sample_tensors,
    windows,
)

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
kernels, launcher = interpreter.kernels("sample"), interpreter.kernels("launch.launcher")
from shared.sample import sampler_triton  # noqa: E402

NAMES = ("ids", "logprobs", "top_ids", "top_logprobs")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabularies of most cases are one block: other splits have nothing in them."""
    monkeypatch.setattr(kernels, "splits_of", lambda num_rows: 1)


def sample_programs(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: np.ndarray,
    positions: torch.Tensor,
    history: History | None,
    masks: TokenMasks | None = None,
) -> SampleOutput:
    """`sample_triton` with the arguments of `sample_cpu`, on logits among NaN and programs in a drawn order."""
    there = None if masks is None else masks_on(masks, logits.device)
    wide = torch.full((len(logits) + 2, logits.shape[1] + 37), torch.nan)
    inner = wide[1:-1, 16 : 16 + logits.shape[1]]
    inner.copy_(logits)
    with interpreter.shuffled(len(logits)):
        output = sampler_triton.sample_triton(inner, rows_on(batch, row_of, logits), positions, history, there)
    assert torch.equal(inner, logits) or logits.isnan().any(), "logits are left as they are"
    return output


def assert_equal(ours: SampleOutput, expected: SampleOutput) -> None:
    for name in NAMES:
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name


def test_every_rule_gives_torch_s_ids() -> None:
    case = Case(1, outputs_per_row=1, num_logprobs=3)
    assert_equal(case.run(sample_programs), case.run(sample_tensors))


@pytest.mark.parametrize("scale", [1e-3, 60.0])
def test_ties_at_every_edge_and_logits_at_the_end_of_the_range(scale: float) -> None:
    """Coarse logits tie by the dozen."""
    case = Case(int(scale), outputs_per_row=1)
    case.logits = (case.logits * 2).round() * scale
    case.logits[:, ::7] = -torch.inf
    case.logits[:, 3::7] = -0.0
    assert_equal(case.run(sample_programs), case.run(sample_tensors))


def test_equal_logits_are_cut_by_id_over_all_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ids but one are alike, and the cut lies behind the first split's: of the later ones nothing is left."""
    monkeypatch.setattr(kernels, "splits_of", lambda num_rows: 4)
    batch = SamplingBatch.build([make_params(kind) for kind in ({"top_k": 1030}, {"top_p": 0.26})], [1, 2], [4, 4])
    logits = torch.zeros((6, 4096))
    logits[:, 4000] = 1.0
    given = (logits, batch, np.asarray([0, 1] * 3), torch.arange(6), None)
    ours = sample_programs(*given)
    assert_equal(ours, sample_tensors(*given))
    assert (ours.ids < 1100).all()


def test_rounded_weights_list_all_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail is heavier than what top_p may leave out, and lighter than float32 shows beside the first id's weight.

    Its ids are never drawn, so the list itself is read: beside the first id it must have as many as top-p keeps."""
    lists: list[tuple[torch.Tensor, torch.Tensor]] = []
    launch = kernels.launch

    def look(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launch(kernel, grid, *args, **options)
        if kernel is kernels.gather_kernel:
            lists.append((args[4], args[5]))

    monkeypatch.setattr(kernels, "launch", look)
    logits = torch.full((1, 5000), -25.0)
    logits[0, 77] = 0.0
    batch = SamplingBatch.build([make_params({"top_p": 1 - 2**-24})], [1], [4])
    sample_programs(logits, batch, np.zeros(1, np.int64), torch.zeros(1, dtype=torch.int64), None)
    listed, num_listed = lists[0]
    head, tail = 2**40, int(np.exp(-25.0) * 2**40)
    left_out = int((head + 4999 * tail) * 2**-24) // tail
    assert 0 < left_out < 4999 and 77 in listed[0, : num_listed[0]] and num_listed[0] >= 5000 - left_out


def test_windows_count_their_own_drafts() -> None:
    """Positions and drafts are read wherever they lie: here others lie between."""
    case, drafts = windows(3)
    case.history.tokens += 40  # other ids than the drafts, which may well be drawn again
    for logits, ids in zip(case.logits, drafts, strict=True):
        logits[list(set(ids))] += 6.0
    some = slice(80, None, 2)
    case.rows, case.positions, case.logits = case.rows[some], case.positions[some], case.logits[some]
    assert case.history.common is not None and case.history.drafted is not None
    case.history.common, case.history.drafted = case.history.common[some], case.history.drafted[some]
    assert_equal(case.run(sample_programs), case.run(sample_tensors))


KINDS: list[dict[str, Any]] = [
    {"top_k": 40, "top_p": 0.9},
    {"top_p": 0.97, "temperature": 0.8},
    {"top_k": 3000},
    {"top_p": 0.999, "min_p": 1e-4, "repetition_penalty": 1.1},
    {"temperature": 0.0, "frequency_penalty": 0.3},
    {"logit_bias": ((96, 3.0), (0, 2.0)), "top_p": 0.5},
]


@pytest.mark.parametrize(
    ("vocab_size", "splits"),
    [(97, 1), (1000, 4), (4099, 4), (4099, 1), pytest.param(32000, 16, marks=pytest.mark.long)],
)
def test_vocabularies_of_any_size(vocab_size: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random logits over several blocks, half of them rounded so that they tie; each row under a grammar or without."""
    monkeypatch.setattr(kernels, "splits_of", lambda num_rows: splits)
    rng = np.random.default_rng(vocab_size)
    batch = SamplingBatch.build([make_params(kind, num_logprobs=2) for kind in KINDS], [7, 2**63, 3, 4, 5, 6], [4] * 6)
    logits = rng.standard_normal((6, vocab_size)) * 3
    logits[::2] = logits[::2].round(1)
    history = History(
        torch.from_numpy(rng.integers(-5, vocab_size + 5, (9, 700)).astype(np.int32)), torch.arange(6) + 2
    )
    words = rng.integers(0, 2**32, (3, -(-vocab_size // 32) + 1), dtype=np.uint32)
    masks = TokenMasks(np.asarray([-1, 0, 2, -1, 1, 2]), words)
    positions = torch.tensor([9, 300, 255, 256, 600, 511])
    given = (torch.from_numpy(logits.astype(np.float32)), batch, np.arange(6), positions, history, masks)
    if vocab_size > 30000:  # one row is enough of it
        given = (
            given[0][:1],
            batch,
            np.zeros(1, np.int64),
            positions[:1],
            history,
            TokenMasks(np.zeros(1, np.int64), words),
        )
    assert_equal(sample_programs(*given), sample_tensors(*given))


def test_bad_words_and_lists_longer_than_a_program_takes_at_once() -> None:
    words = tuple((first, i) for first in range(12) for i in range(0, VOCAB, 3))
    params = [
        make_params({"bad_words": words, "temperature": 0.0}),
        make_params({"allowed_token_ids": tuple(range(0, VOCAB, 2)) * 3, "bad_words": ((5, 7, 8), (2,))}),
        make_params({"min_tokens": 50, "stop_token_ids": tuple(range(150))}),
        make_params({"bad_words": words, "temperature": 0.0}),
    ]
    batch = SamplingBatch.build(params, [1, 2, 3, 4], [5, 5, 5, 24])
    logits = torch.from_numpy(np.random.default_rng(5).standard_normal((4, VOCAB)).astype(np.float32))
    logits[3, 9] = 10.0
    tokens = torch.from_numpy(np.random.default_rng(6).integers(0, 12, (4, 30)).astype(np.int32))
    given = (logits, batch, np.arange(4), torch.tensor([20, 21, 22, 23]), History(tokens, torch.arange(4)))
    ours = sample_programs(*given)
    assert_equal(ours, sample_tensors(*given))
    assert ours.ids[3] == 9, "the prompt has begun a bad word, not the answer"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_finite_logit_get_the_cpu_s_id(bad: float) -> None:
    case = Case(8, outputs_per_row=1)
    case.rows, case.positions, case.logits = case.rows[:21:2], case.positions[:21:2], case.logits[:21:2]
    case.logits[:] = bad
    case.logits[:, 5] = torch.nan
    assert torch.equal(case.run(sample_programs).ids, case.run(sample_cpu).ids)


@pytest.mark.rule("H28")
def test_no_outputs_is_not_an_error() -> None:
    case = Case(9)
    none = np.zeros(0, np.int64)
    output = sample_programs(case.logits[:0], case.batch, none, torch.zeros(0, dtype=torch.int64), case.history)
    assert output.ids.shape == (0,) and output.top_ids.shape == (0, 0)


@pytest.mark.rule("H35")
def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    case = Case(4, outputs_per_row=1, num_logprobs=2)
    together = case.run(sample_programs)
    for e in (5, 13, 15, 20, 28):
        batch = SamplingBatch.build([case.params[e]], [case.seeds[e]], [case.prompt_lens[e]])
        history = History(case.history.tokens, case.history.rows[e : e + 1])
        one = slice(e, e + 1)
        alone = sample_programs(case.logits[one], batch, np.zeros(1, np.int64), case.positions[one], history)
        assert alone.ids[0] == together.ids[e] and alone.logprobs[0] == together.logprobs[e]


def test_each_row_gets_as_many_logprobs_as_it_asked_for() -> None:
    batch = SamplingBatch.build([SamplingParams(max_tokens=1, num_logprobs=n) for n in (-1, 0, 2, 5)], [1] * 4, [1] * 4)
    logits = torch.tensor([[0.5, 2.0, 1.0]] * 4)
    given = (logits, batch, np.arange(4), torch.full((4,), 3), None)
    ours = sample_programs(*given)
    assert_equal(ours, sample_tensors(*given))
    assert ours.top_ids[3].tolist() == [1, 2, 0, NO_TOKEN, NO_TOKEN]


def test_candidates_are_torch_s() -> None:
    case, _ = windows(2)
    case.logits[::7, ::3] = -torch.inf  # a draft head that has no id for them
    some = slice(0, None, 5)
    history = case.history
    assert history.common is not None and history.drafted is not None
    past = History(history.tokens, history.rows, history.common[some], history.drafted[some])
    given = (case.logits[some], case.batch, case.rows[some], case.positions[some], past, 6)
    logits, batch, row_of, positions, past, num = given
    ours = sampler_triton.rank_candidates_triton(logits, rows_on(batch, row_of, logits), positions, past, num)
    for one, expected in zip(ours, rank_tensors(*given), strict=True):
        assert torch.equal(one, expected)


def test_given_tokens_are_scored_as_torch_scores_them() -> None:
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.standard_normal((5, 1500)).astype(np.float32).round(1))
    ids = torch.from_numpy(rng.integers(0, 1500, 5))
    for num_top in (0, 4):
        assert_equal(sampler_triton.score_triton(logits, num_top, ids), score_torch(logits, num_top, ids))


def test_no_batch_compiles_anything_anew() -> None:
    """A number that Triton compiles in, where it is 1 or a multiple of 16, would do so in the middle of a step."""
    seen = []
    for num, words, width in ((5, 1, 1), (16, 16, 16), (17, 3, 5)):
        case = Case(1, outputs_per_row=1, num_logprobs=width)
        params = rows_on(case.batch, case.rows, case.logits).params
        params = {name: value.to("meta") for name, value in params.items()}
        host = params_of(case.batch, VOCAB)
        rows = OutputRows(np.arange(num), host, torch.empty(num, dtype=torch.int64, device="meta"), params)
        table = torch.empty((num, words), dtype=torch.int32, device="meta")
        integers = torch.empty(num, dtype=torch.int64, device="meta")
        history = History(table, integers, integers, table)
        logits = torch.empty((num, VOCAB), device="meta")
        with launcher.recorded() as signatures:
            sampler_triton.sample_triton(logits, rows, integers, history, DeviceMasks(integers, table))
        seen.append({one for one in signatures if "tell_kernel" not in one.kernel})  # it has a size of its own
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 8


def test_the_sampler_takes_triton_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, and nowhere else unless asked; torch where it can't be imported."""
    assert libraries.runs_triton(torch.device("cuda", 0)) and not libraries.runs_triton(torch.device("cpu"))
    monkeypatch.setattr(libraries, "has_triton", lambda: False)
    assert not libraries.runs_triton(torch.device("cuda", 0))
    called = []
    monkeypatch.setattr(libraries, "runs_triton", lambda device: True)
    monkeypatch.setattr(sampler_triton, "sample_triton", lambda *given: called.append("sample"))
    monkeypatch.setattr(sampler_triton, "score_triton", lambda *given: called.append("score"))
    monkeypatch.setattr(sampler_triton, "rank_candidates_triton", lambda *given: called.append("rank"))
    case = Case(1)
    rows = rows_on(case.batch, case.rows, case.logits)
    samplers.sample(case.logits, case.batch, rows, case.positions, case.history)
    samplers.score(case.logits, case.positions, 2)
    rank_candidates(case.logits, case.batch, rows, case.positions, case.history, 2)
    assert called == ["sample", "score", "rank"]
