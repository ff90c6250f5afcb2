"""The simulated cluster: times that can be computed by hand, and memory that always comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.profile import PathProfile, Profile
from deploy.tools.plan.sim_cluster import SimCluster
from deploy.tools.plan.simulate import forecast, play_virtual
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.load_plan import LoadPlan
from shared.core.errors import ConfigError
from tests.support.worlds import plan_cases as made


def played(
    layout: ClusterLayout, plan: LoadPlan, profile: Profile | None = None
) -> tuple[list[RequestRecord], SimCluster]:
    records, world = play_virtual(layout, profile or made.profile(), made.tokens(), plan)
    assert all(record.is_whole for record in records), [record.error for record in records]
    for node in world.nodes:
        node.timed.scheduler.queues.budget.kv.check_integrity(idle=True)
        assert not node.timed.scheduler.queues.requests and not node.offers and not node.timed.num_prompt_tokens
        assert node.node.ours.open_sequences == 0 and node.node.ours.open_prompt_tokens == 0
    return records, world


def step(tokens: int) -> float:
    return made.STEP_S + made.TOKEN_S * tokens


def test_one_request_alone_takes_its_steps() -> None:
    (record,), _ = played(made.layout(0, 1), made.one_request(answer=4))
    assert record.ttft == pytest.approx(step(record.prompt_tokens))
    assert record.gaps() == pytest.approx([step(1)] * 3)
    assert record.num_tokens == 4


def test_a_long_prompt_goes_in_chunks() -> None:
    (record,), _ = played(made.layout(0, 1, chunk_size=50), made.one_request(prompt="40", answer=1))
    whole, rest = divmod(record.prompt_tokens, 50)
    assert record.ttft == pytest.approx(whole * step(50) + (step(rest) if rest else 0.0))


def test_a_hand_off_delays_the_second_token_and_not_the_first() -> None:
    path = PathProfile(to_node=0.002, prompt_stretch=1.5, decode_stretch=2.0, handoff=0.005, bytes_per_s=1e5)
    profile = made.profile(path=path)
    (record,), world = played(made.layout(1, 1), made.one_request(answer=4), profile)
    assert record.ttft == pytest.approx(0.002 + 1.5 * step(record.prompt_tokens))
    last_chunk = (record.prompt_tokens - 1) % 256 + 1
    pages_s = last_chunk / profile.page_size * profile.page_bytes / path.bytes_per_s
    after = 2.0 * step(1)
    assert record.gaps()[0] == pytest.approx(0.005 + pages_s + after)
    assert record.gaps()[1:] == pytest.approx([after] * 2)
    assert [node.timed.busy_seconds > 0 for node in world.nodes] == [True, True]


def test_a_pull_follows_the_steps_that_decode_has_launched() -> None:
    flags = ("--arrivals", "constant", "--rate", "2", "--requests", "2", "--prompt-tokens", "20")
    records, _ = played(made.layout(1, 1), made.plan(*flags, "--output-tokens", "100"))
    assert records[0].end > records[1].at[1], "the first one decodes while the second one comes"
    in_flight = records[1].gaps()[0] / step(1)
    assert in_flight > 2, "one step runs, one is launched behind it, and then the row's own"


def test_a_neighbour_that_computes_slows_a_node_down() -> None:
    one = made.plan("--arrivals", "constant", "--rate", "1000", "--requests", "2", "--output-tokens", "200")
    alone, _ = played(made.layout(0, 2, per_host=1), one)
    beside, _ = played(made.layout(0, 2, per_host=2), one)
    assert [record.e2e for record in beside] > [1.5 * record.e2e for record in alone]


def test_rows_decode_together_and_a_chunk_joins_them() -> None:
    flags = ("--arrivals", "constant", "--rate", "20", "--requests", "8", "--output-tokens", "30")
    records, _ = played(made.layout(0, 1, mixed_chunk_size=16), made.plan(*flags, "--prompt-tokens", "30"))
    assert max(max(record.gaps()) for record in records) <= step(16 + 8) + 1e-9
    disaggregated, _ = played(made.layout(1, 1), made.plan(*flags, "--prompt-tokens", "30"))
    assert max(max(record.gaps()[1:]) for record in disaggregated) <= step(8) + 1e-9


def test_a_talk_s_later_turns_come_from_the_prefix_cache() -> None:
    flags = ("--arrivals", "constant", "--rate", "0.2", "--requests", "9", "--turns", "3")
    records, _ = played(made.layout(0, 1), made.plan(*flags, "--output-tokens", "20", "--prompt-tokens", "30"))
    by_turn = {(record.session, record.turn): record for record in records}
    later = [record for record in records if record.turn]
    assert len(later) == 6
    for record in later:
        before = by_turn[record.session, record.turn - 1]
        assert record.cached_tokens >= (before.prompt_tokens + before.num_tokens) // 16 * 16 - 16


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 1), (2, 2)])
def test_little_memory_makes_requests_wait_and_loses_none(prefill: int, decode: int) -> None:
    flags = ("--rate", "30", "--requests", "60", "--prompt-tokens", "25", "--output-tokens", "1-90")
    retractions = []
    for growth_reserve in (0.0, 1.0):
        short = replace(made.profile(num_pages=70, max_running=6), growth_reserve=growth_reserve)
        records, world = played(made.layout(prefill, decode), made.plan(*flags, "--drain", "600"), short)
        assert len(records) == 60
        retractions.append(sum(node.timed.scheduler.queues.counters.retractions for node in world.nodes))
    assert retractions[0] > retractions[1], "the plan reserves as much as its nodes"


def test_the_same_seed_gives_the_same_run() -> None:
    plan = made.plan("--rate", "20", "--requests", "40")
    first, _ = played(made.layout(2, 2), plan)
    second, _ = played(made.layout(2, 2), plan)
    assert [list(record.at) for record in first] == [list(record.at) for record in second]


@pytest.mark.parametrize(
    "flags", [("--rate", "0.001", "--duration", "2"), ("--rate", "1", "--requests", "3", "--warmup", "50")]
)
def test_a_load_of_which_nothing_counts_is_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="none in the judged time"):
        forecast(made.layout(0, 1), made.profile(), made.tokens(), made.plan(*flags))


def test_an_unmeasured_hand_off_is_that_of_smaller_nodes() -> None:
    """A node that is a whole machine has no partner on it to measure a hand-off with."""
    profile = made.profile()
    profile.paths[1] = PathProfile(0.001, handoff=0.5, bytes_per_s=1e6)
    profile.paths[2] = PathProfile(0.003, decode_stretch=1.5)
    assert profile.path(2) == PathProfile(0.003, 1.0, 1.5, 0.5, 1e6) and profile.has_handoff
    (record,), _ = played(made.layout(1, 1, cores=2), made.one_request(), profile)
    assert record.gaps()[0] > 0.5
    profile.paths.pop(1)
    assert profile.path(2).handoff == 0.0 and not profile.has_handoff
