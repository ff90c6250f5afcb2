"""Which tokens a row's history is given, and when: once, with its first chunk, what no forward of it will write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.core.sampling_params import SamplingParams
from shared.engine.lease import StepLease
from shared.engine.plan import HistorySeed, StepPlan
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, assert_whole, make_core, run_local


def job(rid: int, penalty: float) -> Job:
    prompt = tuple(n % 90 for n in range(100))
    return Job(rid, prompt, SamplingParams(max_tokens=5, temperature=0.8, presence_penalty=penalty), 7)


@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_cached_tokens_are_seeded_with_the_first_chunk_only(penalty: float) -> None:
    core = make_core(CoreKnobs("inline", chunk_size=8, page_size=16, prefix_cache=True))
    run_local(core, [Job(0, job(0, penalty).prompt[:70], SamplingParams(max_tokens=1, temperature=0.0), 1)])
    seeds: list[tuple[HistorySeed, ...]] = []
    launch = core.engine.launch

    def watch(plan: StepPlan) -> StepLease:
        seeds.append(plan.history_seeds)
        return launch(plan)

    core.engine.launch = watch  # type: ignore[method-assign]
    one = job(1, penalty)
    outcome = run_local(core, [one])
    assert outcome.streams["r1"] == one.expected()
    num_cached = 70 // 16 * 16
    assert [seed.ids.tolist() for seed in seeds[0]] == ([list(one.prompt[:num_cached])] if penalty else [])
    assert len(seeds) > 5 and not any(seeds[1:])
    assert_whole(core)
    core.close()


@pytest.mark.parametrize("width", [1, 4])
def test_bad_words_alone_keep_a_history(width: int) -> None:
    """No penalty: only words of several tokens ask what stands before."""
    words = tuple((first, second) for first in range(0, 95, 2) for second in range(0, 95, 3))
    sampling = SamplingParams(max_tokens=40, temperature=0.0, bad_words=words)
    jobs = [Job(rid, (1, 2, 3 + rid), sampling, 7) for rid in range(4)]
    core = make_core(CoreKnobs("inline", width=width))
    assert_streams(jobs, run_local(core, jobs))
    free = [replace(one, sampling=replace(sampling, bad_words=())).expected() for one in jobs]
    assert [one.expected() for one in jobs] != free, "else nothing was asked"
    assert_whole(core)
    core.close()
