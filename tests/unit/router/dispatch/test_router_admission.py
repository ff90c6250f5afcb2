"""The router's queue before its nodes: what starts at once, what waits, and what is refused with a true time."""

from __future__ import annotations

import pytest

from router.fleet.registry import RegisteredNode
from router.queue.pace import MIN_STARTED, Pace
from router.requests.answer_lengths import FIRST_GUESS, AnswerLengths
from router.requests.effects import Failure
from router.requests.journal import OpenRequest
from router.requests.new_request import NewRequest
from router.tenants.tenant import EVERYBODY, Tenant
from shared.core.errors import DeadlineExceeded, DeadlineUnreachable, QueueFull
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Drain, Generate, Heartbeat, Key, NodeLoad
from tests.support.worlds.router_rig import RouterRig, failures, generates

A, B = Tenant("a"), Tenant("b")
URGENT = Tenant("urgent", priority=1)
ROWS = 8


def report(rig: RouterRig, node: RegisteredNode, running: int = 0, waiting: int = 0, waiting_tokens: int = 0) -> None:
    rows = {"free": ROWS - running, "running": running}
    load = NodeLoad(100, {"free": 100}, ROWS, rows, waiting, waiting_tokens, 1, {}, {}, {}, "")
    rig.registry.heartbeat(Heartbeat(node.node_id, node.hello.epoch, load, False), rig.now)


class Queued:
    """A router with one node that has room for so many sequences."""

    def __init__(self, room: int = 0, **limits: int) -> None:
        self.rig = RouterRig(local_tokens=1000, **limits)  # type: ignore[arg-type]
        self.node = self.rig.join("decode", "d")
        self.rig.now = 1.0
        report(self.rig, self.node)
        self.room = ROWS + 2 - room
        self.held = self.open(A, self.room)
        assert len(self.held) == self.room

    def open(
        self, tenant: Tenant = A, num: int = 1, within_s: float | None = None, cost: int = 6, rank: int = 0
    ) -> list[Generate]:
        """Return what starts. Answers end after one token; by default their limit is no higher."""
        started = []
        for _ in range(num):
            started += self.rig.open([1] * 5, max_tokens=cost - 5, tenant=tenant, within_s=within_s, rank=rank)
        return started

    def end(self, key: Key) -> list[Generate]:
        """Return what starts in its place."""
        self.rig.run(self.node, key, 0, [1])
        return generates(self.rig.end(self.node, key, 1))

    def pass_time(self, seconds: float, num_ended: int) -> None:
        """So many requests end, one after the other, in so many seconds."""
        for _ in range(num_ended):
            self.rig.now += seconds / num_ended
            self.held += self.end(self.held.pop(0).key)
            report(self.rig, self.node, running=ROWS, waiting=self.node.ours.open_sequences - ROWS)

    def has_room(self, tenant: Tenant) -> bool:
        try:
            self.rig.dispatcher.check_room(tenant, self.rig.now)
        except QueueFull:
            return False
        return True

    @property
    def waiting(self) -> dict[str, int]:
        return {row.tenant: row.requests for row in self.rig.dispatcher.waiting(self.rig.now)}


def test_a_node_gets_what_its_rows_take_and_a_little_more() -> None:
    queued = Queued()
    assert queued.open(num=3) == [] and queued.waiting == {"a": 3}
    assert queued.node.ours.open_sequences == ROWS + 2


def test_one_starts_for_each_that_ends_at_once() -> None:
    queued = Queued()
    queued.open(num=3)
    for left in (2, 1, 0):
        assert len(queued.end(queued.held.pop().key)) == 1
        assert queued.waiting.get("a", 0) == left
    assert queued.end(queued.held.pop().key) == []


def test_a_lower_rank_of_the_same_tenant_starts_first() -> None:
    queued = Queued()
    for cost, rank in ((6, 0), (7, 1), (8, -1)):
        queued.rig.now += 1
        assert queued.open(cost=cost, rank=rank) == []
    (row,) = queued.rig.dispatcher.waiting(queued.rig.now)
    assert row.oldest_s == 2, "of all that wait, not of the first in turn"
    order = [queued.end(queued.held.pop().key)[0].sampling.max_tokens for _ in range(3)]
    assert order == [3, 1, 2]


def test_one_starts_when_a_client_leaves_or_finds_a_stop_string() -> None:
    queued = Queued()
    queued.open(num=2)
    rig, now = queued.rig, queued.rig.now
    assert len(generates(rig.dispatcher.cancel([queued.held.pop().key.rid], now))) == 1
    assert len(generates(rig.dispatcher.close_sequence(queued.held.pop().key.rid, 0, now))) == 1


def test_a_client_that_hangs_up_in_the_queue_leaves_it() -> None:
    queued = Queued()
    queued.open(num=3)
    rids = [request.rid for request in queued.rig.journal.all() if request.started_at is None]
    effects = queued.rig.dispatcher.cancel(rids[:2], queued.rig.now)
    assert not effects.sends and queued.waiting == {"a": 1}
    queued.rig.dispatcher.cancel([*rids, *(one.key.rid for one in queued.held)], queued.rig.now)
    queued.rig.check_quiet()


def test_a_report_opens_and_closes_the_way() -> None:
    queued = Queued()
    queued.open(num=30)
    rig = queued.rig
    report(rig, queued.node, running=4, waiting=0)
    assert len(generates(rig.beat(queued.node))) == 6
    report(rig, queued.node, running=4, waiting=9)
    assert generates(rig.beat(queued.node)) == []
    queued.end(queued.held.pop().key)
    assert queued.waiting == {"a": 24}, "its memory is full: free rows are of no use"


def test_a_node_always_takes_some_of_ours_despite_other_routers() -> None:
    rig = RouterRig(local_tokens=1000)
    node = rig.join("decode", "d")
    report(rig, node, running=ROWS, waiting=100)
    assert len(rig.open(rounds=5)) == 2


def test_prompts_wait_while_nodes_have_many_before_them() -> None:
    rig = RouterRig()
    prefill, decode = rig.join("prefill", "p"), rig.join("decode", "d")
    report(rig, prefill)
    report(rig, decode)
    assert [len(rig.open([1] * 5000)) for _ in range(3)] == [1, 1, 0]
    request = next(iter(rig.journal.all()))
    assert request.attempt.prefill is prefill and prefill.ours.open_prompt_tokens == 10_000
    keys = [Key("r", 9, one.rid, 0, 0) for one in rig.journal.all()]
    assert len(generates(rig.run(prefill, keys[0], 0, [1]))) == 1, "its first token is here"


def test_without_reports_and_without_nodes_nothing_waits() -> None:
    rig = RouterRig(local_tokens=1000)
    node = rig.join("decode", "d")
    assert len(rig.open(rounds=50)) == 50
    rig.dispatcher.drain(node, Drain("d", "stop"), 60.0, rig.now)
    assert rig.open() == [] and not rig.dispatcher.waiting(rig.now)


def test_nodes_have_only_so_many_at_a_time() -> None:
    rig = RouterRig(local_tokens=1000, max_open=3)
    rig.join("decode", "d")
    assert len(rig.open(rounds=5)) == 3


def test_the_queue_is_as_long_as_it_may_be() -> None:
    queued = Queued(max_queued=2)
    queued.open(num=2)
    with pytest.raises(QueueFull) as full:
        queued.open()
    assert full.value.status == 503 and queued.waiting == {"a": 2}
    with pytest.raises(QueueFull):
        queued.rig.open(rounds=3)


def test_a_lighter_tenant_displaces_the_youngest_of_the_heaviest() -> None:
    queued = Queued(max_queued=4)
    queued.open(A, 4)
    youngest = queued.rig.journal.all()[-1].rid
    assert queued.has_room(B)
    assert queued.open(B) == [] and queued.waiting == {"a": 3, "b": 1}
    (failed,) = [news for news in queued.rig.opened.news if isinstance(news, Failure)]
    assert failed.rid == youngest and failed.error.code == "queue_full"


def test_room_is_refused_early_only_to_who_gets_none() -> None:
    queued = Queued(max_queued=4)
    queued.open(A, 3)
    assert queued.has_room(A)
    queued.open(A)
    assert [queued.has_room(tenant) for tenant in (A, B, URGENT)] == [False, True, True]
    assert queued.waiting == {"a": 4}, "asking changes nothing"


def test_retry_after_of_a_full_queue_is_when_the_next_has_begun() -> None:
    queued = Queued(max_queued=5)
    queued.open(num=5)
    for _ in range(10):
        queued.pass_time(0.5, 1)
        queued.open()
    with pytest.raises(QueueFull) as full:
        queued.open()
    wait_s = full.value.retry_after_s
    assert wait_s == pytest.approx(0.5, rel=0.25)
    with pytest.raises(QueueFull):
        queued.open()
    queued.pass_time(0.5, 1)
    queued.open()


def test_without_a_measured_pace_the_configured_time_is_told() -> None:
    queued = Queued(max_queued=1)
    queued.open()
    with pytest.raises(QueueFull) as full:
        queued.open()
    assert full.value.retry_after_s is None


# ---- deadlines


def paced() -> Queued:
    """Two requests start a second, and 20 wait: the next one waits for ten seconds. Each takes half of
    a second for a row, and about five from start to end."""
    queued = Queued()
    queued.open(num=20)
    for _ in range(40):
        queued.pass_time(0.5, 1)
        queued.open(num=1)
    return queued


def test_what_can_t_end_in_time_is_refused_at_once() -> None:
    queued = paced()
    with pytest.raises(DeadlineUnreachable) as failed:
        queued.open(within_s=5.0)
    assert failed.value.status == 503 and queued.waiting == {"a": 20}
    late_s = failed.value.retry_after_s
    assert late_s is not None and 9.0 <= late_s <= 12.0
    assert queued.open(within_s=5.0 + late_s + 0.1) == [] and queued.waiting == {"a": 21}


@pytest.mark.parametrize("limit", [100, 32_768])
def test_a_long_limit_is_no_reason_to_refuse(limit: int) -> None:
    """Answers end when they end; a chat without max_tokens may use the rest of the context."""
    queued = Queued()
    queued.open(num=20, cost=100)
    for _ in range(30):
        queued.pass_time(0.625, 1)
        queued.open(cost=100)
    queued.open(B, cost=limit, within_s=60.0)
    assert queued.waiting["b"] == 1


def test_what_was_guessed_before_the_first_answer_ends_nobody() -> None:
    """While it waits the router learns that answers are short."""
    queued = Queued()
    queued.open(num=10)
    queued.open(cost=2048, within_s=60.0)
    request = queued.rig.journal.all()[-1]
    queued.open(num=10)
    for _ in range(12):
        queued.pass_time(0.625, 1)
    assert request.started_at is not None and queued.rig.journal.find(request.rid) is request


def test_a_deadline_that_is_over_is_told_at_once() -> None:
    with pytest.raises(DeadlineExceeded):
        Queued().open(within_s=-0.1)


def test_a_deadline_ends_a_request_in_the_queue_and_on_a_node() -> None:
    queued = Queued(room=1)
    (started,) = queued.open(within_s=3.0)
    assert started.remaining_ms == 3000
    queued.open(within_s=3.0)
    assert not failures(queued.rig.dispatcher.tick(queued.rig.now + 2.9))
    assert failures(queued.rig.dispatcher.tick(queued.rig.now + 3.1)) == ["deadline_exceeded"] * 2


def test_a_request_that_would_end_too_late_is_not_started() -> None:
    queued = paced()
    rig = queued.rig
    for one in rig.journal.all():
        if one.started_at is None:
            one.deadline = rig.now + 2.0
    effects = rig.dispatcher.cancel([queued.held.pop().key.rid], rig.now + 0.1)
    assert failures(effects) == ["deadline_exceeded"] * 19, "their time is over before their answers"
    assert len(generates(effects)) == 1, "the last one may try: it shows whether that is still so"


# ---- the pace


def test_only_time_while_something_waits_counts() -> None:
    pace = Pace()
    pace.note(0.0, 1000, is_backed_up=False)
    pace.note(50.0, 1000, is_backed_up=True)
    assert pace.seconds(100) is None
    for second in range(51, 61):
        pace.note(float(second), 200, is_backed_up=True)
    assert pace.seconds(100) == pytest.approx(0.5)
    pace.note(500.0, 0, is_backed_up=False)
    pace.note(900.0, 0, is_backed_up=True)
    pace.note(901.0, 200, is_backed_up=True)
    assert pace.seconds(100) is not None


def test_few_starts_tell_no_pace() -> None:
    """While a node was slow, one start in two seconds refused requests that would have ended in ten."""
    pace = Pace()
    pace.note(0.0, 0, is_backed_up=True)
    for second in range(1, MIN_STARTED):
        pace.note(2.0 * second, 100, is_backed_up=True)
        pace.note(2.0 * second + 1.0, 0, is_backed_up=True)
        assert pace.seconds(100) is None
    pace.note(2.0 * MIN_STARTED, 100, is_backed_up=True)
    assert pace.seconds(100) == pytest.approx(2.0, rel=0.1)


def test_durations_count_per_token_that_was_used() -> None:
    """The limits are equal, and so a mean of each request's own ratio would be far too high."""
    pace = Pace()
    for num_used, seconds in ((15, 1.0), (405, 6.0)) * 50:
        sampling = SamplingParams(max_tokens=1000)
        request = OpenRequest("r", NewRequest([1] * 5, 1, sampling, 0), 60.0, started_at=0.0)
        request.sequences[0].ids = [1] * (num_used - 5)
        pace.ended(request, seconds)
    assert pace.service_s(210) == pytest.approx(3.5, rel=0.1)


# ---- how long an answer is expected to be


def ended(tenant: Tenant, *lengths: int) -> OpenRequest:
    asked = NewRequest([1], len(lengths), SamplingParams(max_tokens=1000), 0, tenant=tenant)
    request = OpenRequest("r", asked, 60.0)
    for sequence, length in zip(request.sequences, lengths, strict=True):
        sequence.ids = [1] * length
    return request


def test_a_tenant_s_own_answers_count_or_else_those_of_all() -> None:
    lengths = AnswerLengths()
    assert lengths.expected(A) == FIRST_GUESS
    lengths.ended(ended(A, 50, 150))
    assert lengths.expected(A) == lengths.expected(B) == 100.0
    lengths.ended(ended(B, 1000))
    assert (lengths.expected(A), lengths.expected(B)) == (100.0, 1000.0)
    assert lengths.expected(Tenant("new")) == pytest.approx(190.0)


def test_nodes_can_tell_tenants_apart() -> None:
    rig = RouterRig()
    rig.join("decode", "d")
    numbers = [rig.open(tenant=tenant)[0].tenant for tenant in (A, B, A, EVERYBODY)]
    assert numbers[0] == numbers[2] and len(set(numbers)) == 3 and numbers[3] == 0


def test_a_request_costs_what_its_tenant_s_answers_took() -> None:
    rig = RouterRig()
    node = rig.join("decode", "d")
    (first,) = rig.open(max_tokens=2000)
    assert rig.journal.all()[0].cost == 3 + FIRST_GUESS
    rig.run(node, first.key, 0, [1] * 20)
    rig.end(node, first.key, 20)
    for max_tokens, expected in ((2000, 20), (5, 5)):
        rig.open(n=2, max_tokens=max_tokens)
        assert rig.journal.all()[-1].cost == 3 + 2 * expected
