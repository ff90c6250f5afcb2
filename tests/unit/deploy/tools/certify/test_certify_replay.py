"""Certified answers are computed again: by whatever way they came, one plain engine gives the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from deploy.tools.certify.replay import Replayer, ReplayTask, ReplayVerdict
from shared.core.keys import sequence_seed
from shared.core.sampling_params import SamplingParams
from shared.model.formats.opened import PLAIN_END
from shared.node.records.core import NodeCore
from tests.support.cores.certified_replays import certified, forced, resumed, verdicts, with_tokens
from tests.support.cores.core_pair import make_pair, run_pair
from tests.support.cores.core_rig import (
    CoreKnobs,
    Job,
    draw_jobs,
    make_core,
    run_local,
    some_follow_grammars,
)

PAGE = 16
PLAIN = CoreKnobs(spec="none", page_size=PAGE)
NGRAM = CoreKnobs(spec="ngram", width=4, page_size=PAGE)
HEAD = CoreKnobs(spec="eagle", width=4, page_size=PAGE, draw_widths=True)
TREE = CoreKnobs(spec="eagle", width=5, topk=2, steps=2, page_size=PAGE)
BY_LIBRARY = "hashlm-1-96 by a library 1.0"


@pytest.fixture(scope="module")
def plain() -> Iterator[NodeCore]:
    core = make_core(PLAIN)
    yield core
    core.close()


def workload(seed: int, count: int = 12) -> list[Job]:
    return some_follow_grammars(draw_jobs(random.Random(seed), count, max_prompt=60))


def one_answer(plain: NodeCore, sampling: SamplingParams, **changes: Any) -> ReplayTask:
    job = Job(0, (5, 6, 7, 8), sampling, 11)
    outcome = run_local(plain, [job])
    (task,) = certified(plain, [job], outcome, **changes)
    return task


def drafted(knobs: CoreKnobs) -> Iterator[ReplayTask]:
    core, jobs = make_core(knobs), workload(3)
    yield from certified(core, jobs, run_local(core, jobs, retract_every=7, rng=random.Random(1)))
    core.close()


def handed_over() -> Iterator[ReplayTask]:
    """Without grammars, which the pair of cores knows nothing of."""
    pair, jobs = make_pair(HEAD), draw_jobs(random.Random(4), 12, max_prompt=60)
    yield from certified(pair.decode, jobs, run_pair(pair, jobs, retract_every=9, rng=random.Random(2)))
    pair.close()


def resumed_after_a_kill() -> Iterator[ReplayTask]:
    """Each answer's beginning comes from one node, and the rest from another, as the router asks for it."""
    jobs = workload(5)
    dead, heir = make_core(NGRAM), make_core(HEAD)
    yield from certified(heir, jobs, resumed(dead, heir, jobs, 9))
    dead.close()
    heir.close()


WAYS = {
    "plain, with retractions": lambda: drafted(PLAIN),
    "n-gram drafts": lambda: drafted(NGRAM),
    "a head's drafts": lambda: drafted(HEAD),
    "a tree of drafts": lambda: drafted(TREE),
    "handed over": handed_over,
    "resumed after a kill": resumed_after_a_kill,
}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_replays_equal_by_whatever_way_it_came(plain: NodeCore, way: str) -> None:
    assert set(verdicts(plain, list(WAYS[way]())).values()) == {ReplayVerdict(True, "equal")}


def test_each_of_n_answers_has_its_own_seed(plain: NodeCore) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0)
    jobs = [Job(n, (1, 2, 3), sampling, sequence_seed(77, n)) for n in range(3)]
    outcome = run_local(plain, jobs)
    tasks = []
    for n, job in enumerate(jobs):
        (task,) = certified(plain, [job], outcome)
        record = msgspec.structs.replace(task.record, seed=77, sequence=n)
        tasks.append(replace(task, record=record))
    assert len({tuple(task.token_ids or ()) for task in tasks}) == 3
    assert all(verdict.is_equal for verdict in verdicts(plain, tasks).values())
    moved = replace(tasks[1], record=msgspec.structs.replace(tasks[1].record, sequence=2))
    (verdict,) = verdicts(plain, [moved]).values()
    assert verdict.is_equal is False


# What differs


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("place", [0, 5, 11])
def test_the_first_token_that_differs_is_named(plain: NodeCore, temperature: float, place: int) -> None:
    task = one_answer(plain, SamplingParams(max_tokens=12, temperature=temperature))
    ids = list(task.token_ids or ())
    wrong = [*ids[:place], (ids[place] + 1) % 90, *ids[place + 1 :]]
    (verdict,) = verdicts(plain, [with_tokens(task, wrong)]).values()
    assert verdict.is_equal is False
    assert f"token {place} is {wrong[place]} in the certificate and {ids[place]} here" in verdict.text
    (unshown,) = verdicts(plain, [replace(with_tokens(task, wrong), token_ids=None)]).values()
    assert unshown.is_equal is False and "can't be said where" in unshown.text
    (right,) = verdicts(plain, [replace(task, token_ids=None)]).values()
    assert right == ReplayVerdict(True, "equal")


def test_a_margin_counts_the_noise(plain: NodeCore) -> None:
    """What was drawn has the best score with the noise, and often not without it."""
    task = one_answer(plain, SamplingParams(max_tokens=12, temperature=1.5))
    ids = list(task.token_ids or ())
    wrong = [with_tokens(task, [*ids[:at], (ids[at] + 1) % 90, *ids[at + 1 :]]) for at in range(len(ids))]
    named = [replace(one, name=f"at {place}") for place, one in enumerate(wrong)]
    for verdict in verdicts(plain, named).values():
        assert float(verdict.text.split(" here, ")[1].split()[0]) > 0, verdict.text


def test_an_end_that_the_engine_does_not_reach_differs(plain: NodeCore) -> None:
    """A stop token ends the engine's answer; the certified one goes on, or is said to have another end."""
    free = one_answer(plain, SamplingParams(max_tokens=12, temperature=0.8))
    ids = list(free.token_ids or ())
    stops = replace(free.sampling, stop_token_ids=(ids[4],))
    cut = ids[: ids.index(ids[4]) + 1]
    longer = with_tokens(free, ids, sampling=stops)
    (verdict,) = verdicts(plain, [longer]).values()
    assert verdict.is_equal is False and f"ends after {len(cut)} tokens" in verdict.text
    for reason, stop_strings, is_equal in (
        ("stop", (), True), ("length", (), False), ("length", ("x",), False),
    ):  # fmt: skip
        task = with_tokens(free, cut, sampling=stops, finish_reason=reason, stops=stop_strings)
        (verdict,) = verdicts(plain, [task]).values()
        assert verdict.is_equal is is_equal, verdict


@pytest.mark.parametrize("stops", [(), ("x",)])
def test_an_answer_that_the_router_cut_differs(plain: NodeCore, stops: tuple[str, ...]) -> None:
    """Only all of max_tokens is the end `length`. A stop string may have ended any answer but an empty one."""
    task = one_answer(plain, SamplingParams(max_tokens=12))
    cut = list(task.token_ids or ())[:5]
    for ids, reason, is_equal in (
        (cut, "length", False), ([], "length", False), ([], "stop", False), (cut, "stop", bool(stops)),
    ):  # fmt: skip
        other = with_tokens(task, ids, sampling=task.sampling, stops=stops, finish_reason=reason)
        (verdict,) = verdicts(plain, [other]).values()
        assert verdict.is_equal is is_equal, verdict


def test_an_answer_of_no_tokens_and_one_too_long_are_told(plain: NodeCore) -> None:
    """max_tokens=0 with `echo`: nodes get 1, and the answer has none."""
    task = one_answer(plain, SamplingParams(max_tokens=1))
    (empty,) = verdicts(plain, [with_tokens(task, [])]).values()
    assert empty.is_equal is True
    long = replace(task, prompt_ids=[1] * 600)
    (untold,) = verdicts(plain, [long]).values()
    assert untold.is_equal is None and "not computed" in untold.text


@pytest.mark.parametrize(
    ("changes", "name", "advised"),
    [
        ({"numerics": 1}, "numerics", "a version of Baton"),
        ({"weights": "others"}, "weights", "--model"),
        ({"weights": "hashlm-1-96 int8 blocks"}, "weights", "the files are the same, their formats are not"),
        ({"weights": "hashlm-1-96 by transformers 5.0"}, "weights", "run them by transformers 5.0"),
        ({"dtype": "bfloat16"}, "dtype", "--dtype bfloat16"),
        ({"model": "another"}, "model", "--model"),
        ({"page_layout": "kv:2x16:torch.int8"}, "pages", "--kv-dtype"),
    ],
)
def test_another_fingerprint_is_named(plain: NodeCore, changes: dict[str, Any], name: str, advised: str) -> None:
    """And those with the engine's own are computed all the same."""
    tasks = [one_answer(plain, SamplingParams(max_tokens=3), **one) for one in (changes, {})]
    untold, equal = verdicts(plain, [replace(task, name=name) for task, name in zip(tasks, "ab", strict=True)]).values()
    assert untold.is_equal is None and f"another fingerprint: {name} is" in untold.text and equal.is_equal
    assert advised in untold.text


def test_nodes_of_two_kinds_and_a_missing_adapter_are_named(plain: NodeCore) -> None:
    task = one_answer(plain, SamplingParams(max_tokens=3))
    other = msgspec.structs.replace(task.record.nodes[0], numerics=99)
    two = msgspec.structs.replace(task.record, nodes=[*task.record.nodes, other])
    adapted = msgspec.structs.replace(task.record, adapter="abc")
    for record, words in ((two, "nodes of different kinds"), (adapted, "--lora NAME=PATH")):
        (untold,) = verdicts(plain, [replace(task, record=record)]).values()
        assert untold.is_equal is None and words in untold.text


def test_sums_of_plain_torch_are_judged_by_nobody() -> None:
    """Neither where it computed the answer, be it the same engine's, nor where it would replay one of kernels."""
    core = make_core(PLAIN)
    kernels = core.spec.weights_hash
    core.model.spec = replace(core.spec, weights_hash=kernels + PLAIN_END)  # type: ignore[misc]
    try:
        for weights, told in (
            (kernels + PLAIN_END, "plain torch computed it"),
            (kernels, "use an x86-64 processor with FMA"),
        ):
            (verdict,) = verdicts(core, [one_answer(core, SamplingParams(max_tokens=3), weights=weights)]).values()
            assert verdict.is_equal is None and told in verdict.text, verdict
    finally:
        core.close()


# Near ties


def with_ties(core: NodeCore, tie: float) -> NodeCore:
    """The core as if a library ran its model, whose logits may move by half of `tie`."""
    core.model.spec = replace(core.model.spec, weights_hash=BY_LIBRARY, tie=tie)  # type: ignore[misc]
    return core


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_library_s_near_ties_are_no_differences(temperature: float) -> None:
    """Two certified tokens are not the engine's. Behind each, the engine goes on from the certified one."""
    core = make_core(PLAIN)
    try:
        right = one_answer(core, SamplingParams(max_tokens=12, temperature=temperature))
        ids: list[int] = []
        for place, token in enumerate(one := list(right.token_ids or ())):
            if place in (3, 7):
                ids.append((token + 1) % 90)
                one[place + 1 :] = forced(core, right, ids)[len(ids) :]
            else:
                ids.append(one[place])
        wrong = with_tokens(right, ids)
        assert right.record.replays == "exact" and verdicts(core, [wrong])["r0"].is_equal is False
        for tie, is_equal in ((1000.0, True), (1e-9, False)):
            with_ties(core, tie)
            record = msgspec.structs.replace(wrong.record, replays="near-ties", nodes=[Replayer(core, PAGE).numerics])
            (verdict,) = verdicts(core, [replace(wrong, record=record)]).values()
            assert verdict.is_equal is is_equal, verdict
            assert not is_equal or ("2 near ties" in verdict.text and "token 7 is" in verdict.text)
            exact = replace(wrong, record=msgspec.structs.replace(record, replays="exact"))
            assert verdicts(core, [exact])["r0"].is_equal is False
    finally:
        core.close()
