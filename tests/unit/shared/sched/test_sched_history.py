"""Which tokens a row's history is given, and when: once, with its first chunk, what no forward of it will write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.core.sampling_params import SamplingParams
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, assert_whole, make_core, run_local
from tests.support.cores.steps import plans_of


def test_cached_tokens_are_seeded_with_the_first_chunk_only() -> None:
    core = make_core(CoreKnobs("inline", chunk_size=8))
    prompt = tuple(n % 90 for n in range(100))
    run_local(core, [Job(0, prompt[:70], SamplingParams(max_tokens=1, temperature=0.0), 1)])
    plans = plans_of(core)
    penalised = Job(1, prompt, SamplingParams(max_tokens=5, temperature=0.8, presence_penalty=1.5), 7)
    assert_streams([penalised], run_local(core, [penalised]))
    seeds = [[seed.ids.tolist() for seed in plan.history_seeds] for plan in plans]
    assert seeds[0] == [list(prompt[:64])], "the pages that were cached"
    assert len(seeds) > 5 and not any(seeds[1:])


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
