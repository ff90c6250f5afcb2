"""The simulated cluster where memory is short: whatever waits is woken, nothing goes round in no time, and what can
never be served is refused as the router refuses it."""

from __future__ import annotations

import pytest

from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.profile import PathProfile, Profile
from deploy.tools.plan.sim_cluster import SimCluster
from deploy.tools.plan.simulate import play_virtual
from deploy.tools.plan.timed_node import TimedNode
from deploy.tools.traffic.figures.record import UNFINISHED, RequestRecord
from tests.support.worlds import plan_cases as made

TURNS_OF_A_RUN = 20_000  # some 5,000 are needed


def played_to_the_end(
    layout: ClusterLayout, profile: Profile, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[RequestRecord], SimCluster]:
    turn, num_turns = TimedNode.turn, 0

    def counted(node: TimedNode) -> None:
        nonlocal num_turns
        num_turns += 1
        assert num_turns < TURNS_OF_A_RUN, "the nodes go round and round"
        turn(node)

    monkeypatch.setattr(TimedNode, "turn", counted)
    records, world = play_virtual(layout, profile, made.tokens(), made.plan("--drain", "100000", *flags))
    for node in world.nodes:
        node.timed.scheduler.queues.budget.kv.check_integrity(idle=True)
        assert not node.timed.scheduler.queues.requests and not node.offers and not node.timed.num_prompt_tokens
        assert node.node.ours.open_sequences == 0 and node.node.ours.open_prompt_tokens == 0
    return records, world


def test_a_grant_wakes_the_node_whose_cap_it_empties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts wait for places among the ungranted ones, and it has no step in flight that would wake it."""
    flags = ("--rate", "30", "--requests", "40", "--prompt-tokens", "1-50", "--output-tokens", "30-150")
    more = ("--seed", "59", "--turns", "1-2")
    layout = made.layout(1, 1, mixed_chunk_size=16, local_tokens=120)
    records, _ = played_to_the_end(layout, made.profile(num_pages=40, max_running=16), flags + more, monkeypatch)
    assert UNFINISHED not in [record.error for record in records]


def test_what_gives_way_in_vain_does_not_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt without a grant is admitted, gives way to an older one that even so does not fit, and is admitted."""
    flags = ("--rate", "300", "--requests", "40", "--prompt-tokens", "40-60", "--output-tokens", "1-90")
    path = PathProfile(0.003, bytes_per_s=1e4)
    profile = made.profile(num_pages=40, max_running=2, path=path)
    layout = made.layout(1, 3, mixed_chunk_size=16)
    records, _ = played_to_the_end(layout, profile, (*flags, "--seed", "140", "--turns", "1-2"), monkeypatch)
    assert UNFINISHED not in [record.error for record in records]


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 1)])
def test_what_is_longer_than_the_context_is_refused(prefill: int, decode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--rate", "5", "--requests", "6", "--prompt-tokens", "mix:900=1,20=1", "--output-tokens", "8")
    layout = made.layout(prefill, decode)
    records, _ = played_to_the_end(layout, made.profile(), flags, monkeypatch)
    errors = [record.error for record in records]
    assert {bool(error) for error in errors} == {True, False}
    for record in records:
        assert record.is_whole == (record.prompt_tokens < 4000)
        assert record.is_whole or "context of 4,096 tokens" in record.error


def test_a_closed_loop_goes_on_behind_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--concurrency", "1", "--requests", "5", "--prompt-tokens", "900", "--output-tokens", "8")
    records, _ = played_to_the_end(made.layout(1, 1), made.profile(), flags, monkeypatch)
    assert len(records) == 5 and not any(record.is_whole for record in records)


def test_a_request_still_on_its_way_at_the_end_has_failed() -> None:
    profile = made.profile(path=PathProfile(to_node=5.0))
    plan = made.plan("--concurrency", "1", "--duration", "2", "--drain", "1")
    records, _ = play_virtual(made.layout(0, 1), profile, made.tokens(), plan)
    assert [record.error for record in records] == [UNFINISHED]
