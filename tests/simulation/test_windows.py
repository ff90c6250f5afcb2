"""Models whose layers all have a sliding window: pages behind it are free while the request runs, unseen."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from router.fleet.node_room import room_in
from shared.kv.layout import PlaneSpec, page_windows
from shared.model.hashlm.layer import STATE
from shared.model.hashlm.model import HashLM
from shared.node.assembly.fingerprint import make_fingerprint
from shared.wire.fitting import misfit, num_page_groups
from shared.wire.messages import NodeLoad
from tests.support.cores.core_rig import CoreKnobs, assert_streams, assert_whole, make_core, run_local
from tests.support.cores.equivalence_cells import Watch, run_cell
from tests.support.cores.scripted_core import Script, job
from tests.support.oracles.hashlm_reference import reference_stream

WINDOWS = (2, 5, 17, 40)
NUM_SEEDS = 24


@pytest.mark.parametrize("cell", range(NUM_SEEDS))
def test_streams_are_the_windowed_reference_s(cell: int) -> None:
    """The matrix of test_equivalence, without draft heads."""
    run_cell(70_000 + cell, Watch(), num_jobs=24, window=WINDOWS[cell % len(WINDOWS)])


@pytest.mark.parametrize("cell", range(NUM_SEEDS))
def test_layers_with_unlike_windows_have_pages_of_their_own(cell: int) -> None:
    """The lower layer reads everything, or more or less than the upper one. Their pages are in two groups."""
    window = WINDOWS[cell % len(WINDOWS)]
    lower = (0, 0, 3, 30)[cell // len(WINDOWS) % 4]
    run_cell(72_000 + cell, Watch(), num_jobs=24, window=window, lower_window=lower)


@pytest.mark.parametrize("cell", range(6))
def test_a_recurrence_goes_on_from_its_last_state(cell: int) -> None:
    """The lower layer has a state after each token, in pages of its own; the upper layer has a window, or reads all.

    Every chunk, step, hand-off, cache hit and verified draft begins with the state that another one left."""
    run_cell(74_000 + cell, Watch(), num_jobs=24, window=(0, 5, 40)[cell % 3], lower_window=STATE)


def test_a_window_shows_in_the_stream() -> None:
    one = job(1, 30, 20)
    plain, windowed = (reference_stream(one.prompt, one.sampling, one.seed, 20, window=w) for w in (0, 17))
    assert plain != windowed
    assert reference_stream(one.prompt, one.sampling, one.seed, 20, window=50) == plain, "it reaches the beginning"


def windowed(rid: int, num_prompt: int, max_tokens: int, window: int = 9):  # noqa: ANN201
    return replace(job(rid, num_prompt, max_tokens), window=window)


def most_active(script: Script, one) -> int:  # noqa: ANN001
    """Run the job; return the most pages that were active after a step."""
    (req,) = script.submit(one)
    most = 0
    while not req.finished:
        script.world.run_until_idle()
        script.step()
        most = max(most, script.core.kv.gauges()["active"])
        script.core.kv.check_integrity()
    return most


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_long_answer_takes_no_more_pages_than_its_window(prefix_cache: bool) -> None:
    script = Script(window=9, num_pages=40, prefix_cache=prefix_cache)
    one = windowed(1, 6, 100)
    most = most_active(script, one)
    assert most <= 5, "three pages of a window, one that is begun and one that a step in flight may begin"
    assert_streams([one], script.outcome)
    assert_whole(script.core)


def test_many_long_answers_fit_where_one_would_be_the_most() -> None:
    """A pool of 30 pages of 4 tokens holds one such sequence, and runs six of them without retracting any."""
    core = make_core(CoreKnobs("inline", page_size=4, num_pages=32, max_running=6, window=9, prefix_cache=False))
    jobs = [windowed(rid, 5, 100) for rid in range(6)]
    outcome = run_local(core, jobs)
    assert_streams(jobs, outcome)
    assert core.queues.counters.retractions == 0
    assert_whole(core)
    core.close()


def grouped(rid: int, num_prompt: int, max_tokens: int, window: int = 9):  # noqa: ANN201
    return replace(windowed(rid, num_prompt, max_tokens, window), lower_window=0)


TIGHT = CoreKnobs("inline", page_size=4, chunk_size=8, num_pages=70, max_running=4, window=9, lower_window=0)


def test_a_long_answer_keeps_a_window_s_pages_and_all_others() -> None:
    """100 tokens are 26 pages of each group. In the windowed group three stay, and one that is begun."""
    script = Script(window=9, lower_window=0, num_pages=80)
    one = grouped(1, 6, 100)
    assert 20 < most_active(script, one) <= 28 + 5
    assert_streams([one], script.outcome)
    assert_whole(script.core)


@pytest.mark.parametrize(("cached", "window"), [(60, 9), (60, 17), (100, 40)])
def test_a_prompt_that_fills_the_pool_may_begin_cached(cached: int, window: int) -> None:
    """The cached pages of its window are among those that the pool has for it."""
    core = make_core(replace(TIGHT, num_pages=112, window=window))
    longest = grouped(1, 200, 4, window)
    assert core.queues.budget.can_ever_hold(longest.request())
    run_local(core, [replace(longest, prompt=longest.prompt[:cached])])
    outcome = run_local(core, [replace(longest, rid=2)], budget=3000)
    assert_streams([replace(longest, rid=2)], outcome)
    assert outcome.ends["r2"].cached_tokens >= cached - 4
    core.close()


@pytest.mark.parametrize("seed", range(6))
def test_long_prompts_with_common_beginnings_share_a_tight_pool(seed: int) -> None:
    rng = random.Random(seed)
    core = make_core(replace(TIGHT, num_pages=rng.choice([110, 130, 160])))
    stem = grouped(0, 190, 4).prompt
    jobs = []
    for rid in range(14):
        own = grouped(rid, rng.randrange(4, 40), rng.randrange(2, 20))
        jobs.append(replace(own, prompt=stem[: rng.randrange(150)] + own.prompt))
    outcome = run_local(core, jobs)
    assert_streams(jobs, outcome)
    assert_whole(core)
    core.close()


def test_pages_that_a_step_in_flight_reads_stay() -> None:
    """The next step is planned before the last one's result is here: it begins where that one will end, the last
    processed one's window is what counts."""
    script = Script(window=5, page_size=1, num_pages=60, prefix_cache=False)
    freed: list[int] = []
    pool = script.core.pool

    def poison(pages) -> None:  # noqa: ANN001
        freed.extend(pages.tolist())
        for page in pages.tolist():
            pool.page_view(page)[:] = 0xA5

    script.core.kv.allocator.on_free = poison
    one = windowed(1, 9, 30, 5)
    (req,) = script.submit(one)
    script.run_until_running(req)
    plan = script.in_flight()
    position = int(plan.seq_lens_cpu[0])
    read = set(plan.layout.page_table[0, position - 4 : position + 1].tolist())
    assert freed and not read & set(freed)
    assert_streams([one], script.finish())


def test_a_cached_prompt_is_found_again_by_what_its_window_needs() -> None:
    core = make_core(CoreKnobs("inline", page_size=4, window=9))
    first = windowed(1, 30, 4)
    again = replace(first, rid=2, seed=9)
    run_local(core, [first])
    outcome = run_local(core, [again])
    assert outcome.streams["r2"] == again.expected()
    assert outcome.ends["r2"].cached_tokens == 28
    core.close()


def test_a_pool_keeps_what_its_widest_layer_reads() -> None:
    narrow, wide, full = (PlaneSpec("kv", (2, 4), HashLM().kv_planes(4)[0].dtype, -1, (w,)) for w in (8, 12, 0))
    assert page_windows((narrow, wide)) == (12,) and page_windows((narrow, full)) == (0,) and page_windows(()) == (0,)
    two = replace(wide, windows=(0, 12))
    assert page_windows((two,)) == page_windows((two, full)) == (0, 12), "a draft head's plane is in the first group"
    assert page_windows((replace(two, windows=(12, 8)), full)) == (0, 8)


def test_nodes_fit_when_they_leave_the_same_pages_behind() -> None:
    """A draft head reads everything, so its node would ask for pages that a node without it has given up."""
    model = HashLM(window=9)
    planes = model.kv_planes(4)
    prefill = make_fingerprint(model.spec, planes, 4, None, "")
    decode = make_fingerprint(model.spec, (*planes, PlaneSpec("draft", (4,), planes[0].dtype)), 4, None, "")
    assert misfit(prefill, prefill) is None and num_page_groups(prefill) == num_page_groups(decode) == 1
    grouped = make_fingerprint(model.spec, HashLM(window=9, lower_window=0).kv_planes(4), 4, None, "")
    assert misfit(prefill, grouped) == "page_layout" and num_page_groups(grouped) == 2
    load = NodeLoad(21, {"free": 21}, 4, {"free": 4}, 0, 0, 1, {}, {}, {}, "")
    rooms = [room_in(load, one, 0, 0, all_say_kept=True).free_tokens for one in (prefill, grouped)]
    assert rooms == [84, 42], "a prompt takes a page of each group"
    assert misfit(prefill, replace_spec(decode)) == "page_layout"


def replace_spec(fingerprint):  # noqa: ANN001, ANN201
    import msgspec

    return msgspec.structs.replace(fingerprint, spec="eagle:1")
