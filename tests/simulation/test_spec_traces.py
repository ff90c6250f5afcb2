"""Which lengths each drafter accepts, exactly: HashDraft through the production workers at hit rates 0, 50 and 100 %,
and n-gram drafts against a lookup written down plainly."""

from __future__ import annotations

import random

import pytest
import torch

from shared.core.sampling_params import SamplingParams
from shared.kernel.sampling.copies import lookup_on_cpu
from shared.speculation.ngram import LONGEST_MATCH, lookup
from tests.support.cores.core_pair import make_pair, run_pair
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, assert_whole, draw_jobs, make_core, run_local
from tests.support.cores.scripted_core import Script, job
from tests.support.cores.traces import WIDTH, Trace

HEADS = ("eagle", "mtp")


def knobs(spec: str, hit_rate: int, **others: object) -> CoreKnobs:
    defaults: dict = {"backend": "simulated", "chunk_size": 16, "max_running": 5}
    return CoreKnobs(spec=spec, width=WIDTH, hit_rate=hit_rate, **(defaults | others))


@pytest.mark.parametrize("spec", HEADS)
@pytest.mark.parametrize("hit_rate", [0, 50, 100])
def test_accepted_lengths_are_exact(spec: str, hit_rate: int) -> None:
    """Temperatures, penalties, bias, filters, cached prefixes: drafts are drawn as the target draws."""
    jobs = draw_jobs(random.Random(hit_rate), 14)
    core = make_core(knobs(spec, hit_rate))
    trace = Trace().on(core)
    assert_streams(jobs, run_local(core, jobs))
    assert trace.check(jobs, hit_rate) > 30
    assert_whole(core)


@pytest.mark.parametrize("spec", HEADS)
@pytest.mark.parametrize("hit_rate", [0, 50, 100])
def test_accepted_lengths_are_the_same_disaggregated(spec: str, hit_rate: int) -> None:
    """From the first verify on: it stands on draft KV and draft state that the prefill node made."""
    jobs = draw_jobs(random.Random(7 + hit_rate), 14)
    pair = make_pair(knobs(spec, hit_rate))
    trace = Trace().on(pair.decode)
    assert_streams(jobs, run_pair(pair, jobs))
    assert trace.check(jobs, hit_rate) > 30
    pair.close()


@pytest.mark.parametrize("spec", HEADS)
def test_retraction_does_not_lower_acceptance(spec: str) -> None:
    """A window then begins where it did not begin before: what it accepts is a function of its length alone."""
    jobs = draw_jobs(random.Random(5), 14)
    core = make_core(knobs(spec, 70))
    trace = Trace().on(core)
    outcome = run_local(core, jobs, retract_every=5, rng=random.Random(1))
    assert_streams(jobs, outcome)
    assert trace.check_each(70) > 50
    assert_whole(core)


@pytest.mark.parametrize("spec", HEADS)
def test_accepted_lengths_are_exact_after_1000_requests(spec: str) -> None:
    core = make_core(knobs(spec, 50, backend="inline", max_running=8))
    rng = random.Random(11)
    for _ in range(10):
        run_local(core, draw_jobs(rng, 100, max_prompt=20))
    assert core.queues.counters.spec_steps > 5_000
    jobs = draw_jobs(random.Random(12), 14)
    trace = Trace().on(core)
    assert_streams(jobs, run_local(core, jobs))
    trace.check(jobs, 50)
    assert_whole(core)


PENALISED = SamplingParams(max_tokens=60, temperature=0.8, repetition_penalty=1.5, frequency_penalty=1.0)


@pytest.mark.parametrize("spec", HEADS)
def test_penalties_do_not_lower_acceptance(spec: str) -> None:
    """Each draft counts those before it in the window, the bonus token too."""
    jobs = [Job(rid, tuple(range(rid, rid + 30)), PENALISED, rid) for rid in range(4)]
    core = make_core(knobs(spec, 100))
    trace = Trace().on(core)
    assert_streams(jobs, run_local(core, jobs))
    trace.check(jobs, 100)


@pytest.mark.rule("S5")
def test_two_rows_of_equal_length_have_their_own_hidden_state() -> None:
    """Of one length, one temperature and one step: nothing but the rows' own state tells them apart."""
    jobs = [Job(rid, tuple(range(rid, rid + 20)), SamplingParams(max_tokens=30, temperature=0.0), 1) for rid in (1, 2)]
    core = make_core(knobs("eagle", 100, chunk_size=64))
    trace = Trace().on(core)
    assert_streams(jobs, run_local(core, jobs))
    trace.check(jobs, 100)


def test_a_window_that_was_accepted_whole_is_written_again() -> None:
    """Its drafts came true, so its slots hold the right tokens, but on the head's own features: now the target's."""
    script = Script(width=WIDTH, hit_rate=100)
    one = job(1, 12, 40)
    (req,) = script.submit(one)
    script.run_until_running(req)
    script.world.run_until_idle()
    slots = script.core.pool.plane("draft0")[script.core.kv.rows.pages_of(req.row)].reshape(-1, 4)
    committed = int(script.core.future_map.new_seq_lens_buf[req.row])
    assert committed == 12 + WIDTH and slots[:committed, 3].eq(0).all()
    assert_streams([one], script.finish())


# ---- n-gram


def plain_lookup(tokens: list[int], num_drafts: int) -> list[int]:
    known = list(tokens)
    for length in (3, 2, 1):
        last = tokens[-length:]
        ends = [e for e in range(length - 1, len(tokens) - 1) if tokens[e - length + 1 : e + 1] == last]
        if len(last) == length and ends:
            for i in range(num_drafts):
                known.append(known[ends[-1] + 1 + i])
            return known[len(tokens) :]
    return [tokens[-1]] * num_drafts


def plain_match(tokens: list[int]) -> int:
    """How many of the last tokens, up to three, stood together somewhere before."""
    parts = {length: [tokens[e - length : e] for e in range(length, len(tokens))] for length in (3, 2, 1)}
    return next((length for length, found in parts.items() if tokens[-length:] in found), 0)


def test_the_lookup_is_the_one_written_down_plainly() -> None:
    rng = random.Random(2)
    for _ in range(300):
        rows = [[rng.randrange(rng.choice([2, 4, 30])) for _ in range(rng.randrange(2, 40))] for _ in range(5)]
        num, longest = rng.randrange(1, 8), max(map(len, rows))
        tokens = torch.tensor([row + [rng.randrange(4) for _ in range(longest + 2 - len(row))] for row in rows])
        last = torch.tensor([len(row) - 1 for row in rows])
        drafts, matched = lookup(tokens.to(torch.int32), last, num)
        assert drafts.tolist() == [plain_lookup(row, num) for row in rows]
        assert matched.tolist() == [plain_match(row) for row in rows]
        places = torch.tensor(rng.sample(range(9), 5))
        history = torch.zeros((9, longest + 2), dtype=torch.int32)
        history[places] = tokens.to(torch.int32)
        on_cpu = lookup_on_cpu(history, places, last, LONGEST_MATCH, num)
        assert torch.equal(on_cpu[0], drafts) and torch.equal(on_cpu[1], matched)


@pytest.mark.parametrize(("row", "last"), [(3, 2), (-1, 2), (0, 8), (0, 0)])
def test_the_lookup_reads_nothing_beside_the_history(row: int, last: int) -> None:
    rows, ends = torch.tensor([1, row]), torch.tensor([2, last])
    with pytest.raises(IndexError, match=f"token {last} of row {row} is not in a history"):
        lookup_on_cpu(torch.zeros((3, 8), dtype=torch.int32), rows, ends, LONGEST_MATCH, 2)


@pytest.mark.parametrize("disaggregated", [False, True])
def test_ngram_drafts_are_copies_of_what_the_row_has(disaggregated: bool) -> None:
    """Prompt, output, prefix-cache hits, PREBUILT rows and retracted ones: every token of the row is in its history."""
    jobs = draw_jobs(random.Random(4), 14)
    texts = {f"r{one.rid}": [*one.prompt, *one.expected()] for one in jobs}
    setup = knobs("ngram", 0)
    pair = make_pair(setup) if disaggregated else None
    core = make_core(setup) if pair is None else pair.decode
    drafter = core.engine.worker.drafter
    assert drafter is not None
    propose, checked, wrong = drafter.propose, 0, []

    def watched(fb, *rest):  # noqa: ANN001, ANN002, ANN202
        nonlocal checked
        drafts, first = propose(fb, *rest), fb.plan.num_prefill
        for row_id, committed, ids in zip(
            fb.plan.row_ids[first:], fb.committed[first:].tolist(), drafts.ids.tolist(), strict=True
        ):
            text = texts[row_id.key.rid]
            if committed < len(text):  # what follows the end of a zombie is nobody's
                checked += 1
                if ids != plain_lookup(text[: committed + 1], WIDTH - 1):
                    wrong.append((row_id.key.rid, committed))
        return drafts

    drafter.propose = watched  # type: ignore[method-assign]
    rng = random.Random(9)
    outcome = run_local(core, jobs, retract_every=7, rng=rng) if pair is None else run_pair(pair, jobs)
    assert_streams(jobs, outcome)
    assert checked > 100 and not wrong
