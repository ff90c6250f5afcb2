"""Dispatch without sockets: who gets what, what comes back, and that nothing stays behind on any path."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.registry import RegisteredNode
from router.requests.effects import Alarm, Update
from router.requests.journal import SequenceJournal
from router.requests.new_request import NewRequest
from shared.core.errors import NoNodes, QueueFull
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Key, SequenceEnd, TokenLogprob, TokenRun, Tokens
from tests.support.worlds.router_rig import RouterRig, aborts, failures, generates, ids_of, sibling


@pytest.fixture
def rig() -> RouterRig:
    return RouterRig()


def pair(rig: RouterRig) -> tuple[RegisteredNode, RegisteredNode]:
    return rig.join("prefill", "p"), rig.join("decode", "d")


def test_the_first_token_comes_from_prefill_the_rest_from_decode(rig: RouterRig) -> None:
    prefill, decode = pair(rig)
    key = rig.open()[0].key
    assert prefill.ours.open_prompt_tokens == 3
    assert ids_of(rig.run(prefill, key, 0, [10])) == [10]
    assert prefill.ours.open_prompt_tokens == 0
    assert ids_of(rig.run(decode, key, 0, [10, 11])) == [11]
    effects = rig.end(decode, key, 2)
    (update,) = effects.news
    assert isinstance(update, Update) and update.end is not None and not effects.sends
    rig.check_quiet()


def test_an_end_may_overtake_tokens_before_it(rig: RouterRig) -> None:
    """The prefill node's message with the first token is the last to come."""
    prefill, decode = pair(rig)
    key = rig.open()[0].key
    assert not rig.run(decode, key, 1, [11]).news and not rig.end(decode, key, 2).news
    (update,) = rig.run(prefill, key, 0, [10]).news
    assert isinstance(update, Update) and list(update.ids) == [10, 11] and update.end is not None
    assert not rig.end(decode, key, 2).news, "told once"
    rig.check_quiet()


def test_two_nodes_that_disagree_raise_an_alarm(rig: RouterRig) -> None:
    prefill, decode = pair(rig)
    key = rig.open()[0].key
    rig.run(prefill, key, 0, [10])
    effects = rig.run(decode, key, 0, [99, 11])
    assert [alarm.kind for alarm in effects.alarms] == ["two nodes disagree on a token"]
    assert ids_of(effects) == [11]


def test_no_node_and_too_many_requests_change_nothing() -> None:
    rig = RouterRig(max_open=2, max_queued=0)
    with pytest.raises(NoNodes):
        rig.open()
    pair(rig)
    rig.open()
    with pytest.raises(QueueFull):
        rig.open(rounds=2)
    assert len(rig.journal) == 1


def test_a_stop_string_stops_one_sequence_on_both_nodes(rig: RouterRig) -> None:
    _, decode = pair(rig)
    key = rig.open(n=2)[0].key
    rig.run(decode, key, 0, [1, 2])
    effects = rig.dispatcher.close_sequence(key.rid, 0, rig.now)
    assert aborts(effects) == [("p@1", 0, False), ("d@1", 0, False)]
    late = rig.run(decode, key, 2, [3])
    assert not late.news and not late.sends and not late.alarms
    assert aborts(rig.dispatcher.close_sequence(key.rid, 0, rig.now)) == []
    rig.dispatcher.close_sequence(key.rid, 1, rig.now)
    rig.check_quiet()


@pytest.mark.parametrize("phase", [0, 3])
def test_a_client_that_hangs_up_is_forgotten_everywhere(rig: RouterRig, phase: int) -> None:
    prefill, decode = pair(rig)
    key = rig.open()[0].key
    for node, ids in ((prefill, [1]), (decode, [1]), (decode, [1, 2]))[:phase]:
        rig.run(node, key, 0, ids)
    assert aborts(rig.dispatcher.cancel([key.rid], rig.now)) == [("p@1", 0, True), ("d@1", 0, True)]
    assert not rig.dispatcher.cancel([key.rid], rig.now).sends
    after = rig.run(decode, key, 2, [3])
    assert not after.news and not after.sends and not after.alarms
    rig.check_quiet()


def test_work_on_a_request_nobody_has_is_stopped_once(rig: RouterRig) -> None:
    _, decode = pair(rig)
    stranger = Key("r", 9, "zzz", 0, 0)
    assert aborts(rig.run(decode, stranger, 0, [1])) == [("d@1", 0, True)]
    assert aborts(rig.run(decode, stranger, 1, [1])) == []
    assert aborts(rig.run(decode, Key("r", 8, "1", 0, 0), 0, [1])) == [("d@1", 0, True)]  # our own earlier life
    assert aborts(rig.run(decode, Key("other", 9, "1", 0, 0), 0, [1])) == []


def test_who_goes_on_after_an_abort_is_told_again(rig: RouterRig) -> None:
    """It may have overtaken the request on its way from prefill to decode, or have met a full queue."""
    _, decode = pair(rig)
    key = rig.open(n=2)[0].key
    rig.dispatcher.cancel([key.rid], rig.now)
    for rig.now, told in ((0.5, 0), (1.0, 1), (1.9, 0), (2.1, 1)):
        effects = rig.run(decode, sibling(key, 1), 0, [1])
        assert aborts(effects) == [("d@1", 0, True)] * told and not effects.alarms


@pytest.mark.rule("H20")
def test_keys_that_match_only_in_part_touch_nothing(rig: RouterRig) -> None:
    prefill, decode = pair(rig)
    third = rig.join("decode", "x")
    key = rig.open()[0].key
    runner = decode if decode.ours.open_sequences else third
    bystander = third if runner is decode else decode
    changes = ({"attempt": 1}, {"router_epoch": 8}, {"seq_index": 1}, {"seq_index": -1}, {"rid": "no"})
    wrong = [Key(*[change.get(name, getattr(key, name)) for name in Key.__struct_fields__]) for change in changes]
    for bad in wrong:
        assert not rig.run(runner, bad, 0, [66]).news
    assert not rig.run(bystander, key, 0, [66]).news
    assert ids_of(rig.run(prefill, key, 0, [10])) == [10]


def test_malformed_runs_are_dropped_with_an_alarm(rig: RouterRig) -> None:
    prefill, _ = pair(rig)
    key = rig.open()[0].key
    too_few = rig.run(prefill, key, 0, [1, 2], logprobs=[TokenLogprob(0.0, (), ())])
    for effects in (rig.run(prefill, key, -1, [1]), too_few):
        assert [alarm.kind for alarm in effects.alarms] == ["malformed token run"] and not effects.news
    ghost = Tokens("ghost", 1, [TokenRun(key, 0, [1], [])], [])
    effects = rig.dispatcher.tokens(ghost, 0.0)
    assert effects.alarms == [Alarm("tokens of an unknown node", "ghost")] and not effects.news


ENDS = [("error", "step_failed", "step_failed", 1), ("error", "handoff_failed", "handoff_failed", 1),
        ("error", "invalid_request_error", "invalid_request_error", 0), ("error", "overloaded", "overloaded", 0),
        ("error", "too_large", "too_large", 0), ("error", "deadline_exceeded", "deadline_exceeded", 0),
        ("error", "integrity_error", "integrity_error", 1), ("error", "made_up", "internal_error", 1),
        ("abort", "", "node_lost", 1)]  # fmt: skip


@pytest.mark.parametrize(("reason", "code", "seen", "faults"), ENDS)
def test_a_failed_sequence_fails_its_request(rig: RouterRig, reason: str, code: str, seen: str, faults: int) -> None:
    prefill, _ = pair(rig)
    key = rig.open(n=2)[0].key
    effects = rig.end(prefill, key, 0, reason, code)
    assert failures(effects) == [seen]
    assert ("d@1", 0, True) in aborts(effects)
    assert prefill.breaker._faults == faults
    rig.check_quiet()


def test_a_prefill_node_may_go_once_decode_has_begun(rig: RouterRig) -> None:
    prefill, decode = pair(rig)
    begun, waiting = (generate.key for generate in rig.open(rounds=2))
    rig.run(prefill, begun, 0, [1])
    rig.run(prefill, waiting, 0, [1])
    rig.run(decode, begun, 0, [1])
    rig.registry.remove(prefill)
    effects = rig.dispatcher.node_lost(prefill, "gone", 1.0)
    assert [news.rid for news in effects.news] == [waiting.rid]
    assert ids_of(rig.run(decode, begun, 1, [2])) == [2]


def test_an_attempt_that_never_left_waits_for_nodes() -> None:
    rig = RouterRig(max_attempts=2, resume_wait_s=10.0)
    nodes = [rig.join("decode", name) for name in "de"]
    rig.open(n=1)
    first = next(node for node in nodes if node.ours.open_sequences)
    rig.registry.remove(first)
    (generate,) = generates(rig.dispatcher.node_lost(first, "gone", 0.0))
    (other,) = rig.registry
    rig.dispatcher.send_refused(other.peer, generate, 1.0)
    rig.registry.remove(other)
    assert not rig.dispatcher.node_lost(other, "gone", 1.0).news and not rig.dispatcher.tick(10.5).news
    assert failures(rig.dispatcher.tick(11.0)) == ["no_nodes"]
    rig.check_quiet()


def test_a_second_attempt_goes_on_behind_what_was_emitted() -> None:
    rig = RouterRig(max_attempts=2)
    prefill, decode = pair(rig)
    spare = rig.join("decode", "e")
    key = rig.open(n=1)[0].key
    doomed = decode if decode.ours.open_sequences else spare
    rig.run(prefill, key, 0, [1])
    rig.run(doomed, key, 0, [1, 2])
    rig.run(doomed, key, 4, [99])
    rig.registry.remove(doomed)
    effects = rig.dispatcher.node_lost(doomed, "gone", 1.0)
    (again,) = generates(effects)
    assert again.key.attempt == 1 and again.output_ids == [[1, 2]] and not effects.news
    assert again.decode_node == (spare if doomed is decode else decode).node_id
    assert not rig.run(prefill, key, 0, [1, 66]).news  # the old attempt's voice
    survivor = spare if doomed is decode else decode
    assert ids_of(rig.run(survivor, again.key, 2, [3])) == [3]
    rig.end(survivor, again.key, 3)
    rig.check_quiet()


def test_stopping_fails_what_is_open(rig: RouterRig) -> None:
    pair(rig)
    rig.open(rounds=3)
    assert failures(rig.dispatcher.fail_all(NoNodes("bye"), rig.now)) == ["no_nodes"] * 3
    rig.check_quiet()


@pytest.mark.parametrize("seed", range(30))
def test_random_lives_leave_nothing_behind(seed: int) -> None:
    """Tokens in any order, hang-ups, stops, lost and returning nodes: streams are right and counts return to zero."""
    rng = random.Random(seed)
    rig = RouterRig(max_attempts=rng.choice([1, 3]))
    epochs = {"p": 1, "d": 1, "e": 1}
    roles = {"p": "prefill", "d": "decode", "e": "decode"}
    nodes = {name: rig.join(roles[name], name) for name in epochs}
    seen: dict[tuple[str, int], list[int]] = {}
    for _ in range(300):
        rig.now += 0.01
        open_requests = rig.journal.all()
        action = rng.random()
        effects = None
        if action < 0.2 or not open_requests:
            new = NewRequest([1] * rng.randint(1, 9), rng.randint(1, 3), SamplingParams(max_tokens=6), 0)
            effects = rig.dispatcher.open([new], rig.now)[1]
        else:
            request = rng.choice(open_requests)
            index = rng.randrange(len(request.sequences))
            if action < 0.25:
                effects = rig.dispatcher.cancel([request.rid], rig.now)
            elif action < 0.3:
                effects = rig.dispatcher.close_sequence(request.rid, index, rig.now)
            elif action < 0.34:
                name = rng.choice(list(nodes))
                epochs[name] += 1
                replaced, nodes[name] = nodes[name], rig.join(roles[name], name, epochs[name])
                effects = rig.dispatcher.node_lost(replaced, "restarted", rig.now)
            else:
                key = Key("r", 9, request.rid, request.attempt.number - rng.choice([0, 0, 0, 1]), index)
                first = rng.randint(0, 5)
                run = TokenRun(key, first, [pos * 10 for pos in range(first, rng.randint(first, 6))], [])
                ends = [SequenceEnd(key, "length", 6, 0, "", "")] if rng.random() < 0.3 else []
                node = rng.choice([*request.attempt.nodes, *nodes.values()])
                effects = rig.dispatcher.tokens(Tokens(node.node_id, node.hello.epoch, [run], ends), rig.now)
        assert not any(alarm.kind.startswith("two nodes") for alarm in effects.alarms)
        for news in effects.news:
            if isinstance(news, Update):
                seen.setdefault((news.rid, news.seq_index), []).extend(news.ids)
        assert not any(request.is_done for request in rig.journal.all())
    assert all(ids == [pos * 10 for pos in range(len(ids))] for ids in seen.values())
    rig.dispatcher.cancel([request.rid for request in rig.journal.all()], rig.now)
    rig.check_quiet()
    assert all(node.ours.open_sequences == 0 and node.ours.open_prompt_tokens == 0 for node in nodes.values())


# ---- the position rule


def end_of(count: int) -> SequenceEnd:
    return SequenceEnd(Key("r", 1, "x", 0, 0), "length", count, 0, "", "")


def test_tokens_beyond_the_request_are_not_taken() -> None:
    journal = SequenceJournal(max_tokens=2)
    assert list(journal.take_tokens(0, [1, 2, 3], []).ids) == [1, 2]
    assert journal.take_tokens(1, [2, 3], []).ids == []
    assert journal.take_tokens(1000, [3], []).ids == [] and journal.ids == [1, 2]


@settings(max_examples=300)
@given(st.data())
def test_any_order_of_runs_gives_the_stream(data: st.DataObject) -> None:
    stream = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=20))
    wants_logprobs = data.draw(st.booleans())
    spans = st.tuples(st.integers(0, len(stream)), st.integers(0, len(stream)))
    cuts = [(min(s), max(s)) for s in data.draw(st.lists(spans, max_size=15))]
    journal = SequenceJournal(max_tokens=len(stream))
    got: list[int] = []
    got_logprobs: list[float] = []
    for first, last in [*cuts, (0, len(stream))]:
        logprobs = [TokenLogprob(float(i), (), ()) for i in range(first, last)] if wants_logprobs else []
        taken = journal.take_tokens(first, stream[first:last], logprobs)
        assert not taken.conflict
        got += taken.ids
        got_logprobs += [entry.logprob for entry in taken.logprobs]
        assert got == stream[: len(got)] == journal.ids
    assert got == stream
    assert got_logprobs == ([float(i) for i in range(len(stream))] if wants_logprobs else [])
