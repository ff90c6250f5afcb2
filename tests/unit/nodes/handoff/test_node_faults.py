"""Two nodes and what can go wrong between them on any transport: aborts, refusals, senseless messages.

Each test ends with the same two questions: has every request that can still be heard ended once and rightly, and is
every page, row and book of the living nodes as before?
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.requests.faults import can_resume, error_of_end, is_node_fault
from router.text.grammars import of_grammar
from shared.core.errors import InvalidRequest
from shared.core.sampling_params import SamplingParams
from shared.node.loop.node import Node
from shared.node.records.departure import Departure
from shared.node.records.mail import Outgoing
from shared.wire.messages import (
    Abort,
    Failed,
    Generate,
    Grant,
    Installed,
    Key,
    Offer,
    Prebuilt,
    Ready,
    Refuse,
    Tokens,
)
from tests.support.cores.core_rig import CoreKnobs
from tests.support.worlds.faulty_pair import LONG, ends_of, job, linked, pair
from tests.support.worlds.node_pair import ROUTER_ID, Net, assert_clean, expected, make_node, name_of

# ---- the client's own faults


def test_a_grammar_that_fails_at_the_partner_blames_none() -> None:
    """The defect: if the decode node noticed first, the client's fault became a 502, and was tried again elsewhere."""
    net, p, d = linked()
    p.ctx.core.loop._launch_next = lambda: False  # like a node that computes chunks: it looks at no new prompt
    faulty = replace(job(), sampling=replace(LONG, grammar=of_grammar("start: <|nothing_here|>")))
    key = net.generate(p, faulty, d)
    net.run()
    error = error_of_end(net.router.end(key), "p0")
    assert type(error) is InvalidRequest and not is_node_fault(error) and not can_resume(error)
    assert_clean(p, d)


# ---- aborts


@pytest.mark.rule("H40")
def test_an_abort_may_overtake_its_offer() -> None:
    net, p, d = linked()
    net.hold = lambda src, dst, message: isinstance(message, Offer)
    key = net.generate(p, job(), d)
    net.run()
    net.abort(d, key, all_sequences=True)
    net.run()
    net.release_held()
    net.run()
    assert not net.messages(Grant) and len(net.messages(Refuse)) == 1
    assert_clean(p, d)


def test_an_abort_may_overtake_its_generate() -> None:
    net, p, d = linked()
    net.abort(p, Key(ROUTER_ID, 1, "r0", 0, 0), all_sequences=True)
    key = net.generate(p, job(), d, num_sequences=2)
    net.run()
    assert not net.messages(Offer) and not net.router.streams[key]
    retry = net.generate(p, job(), d, attempt=1)
    net.run()
    assert net.router.streams[retry] == expected(job()), "another attempt is another key"
    assert_clean(p, d)


def test_abort_of_all_sequences_behind_their_leader() -> None:
    net, p, d = linked()
    key = net.generate(p, job(), d, num_sequences=3)
    net.on_message = lambda src, dst, m: net.abort(p, key, True) if isinstance(m, Grant) else None
    net.run()
    assert len(net.messages(Offer)) == 1 and not net.router.ends[key]
    assert_clean(p, d)


# ---- refusals


def refused(net: Net, key: Key, words: str, code: str = "handoff_failed") -> None:
    (end,) = net.router.ends[key]
    assert (end.reason, end.error_code) == ("error", code)
    assert words in end.error_message


def replace_struct(struct: object, **changes: object) -> object:
    import msgspec

    return msgspec.structs.replace(struct, **changes)


def test_no_common_transport_is_refused() -> None:
    p = make_node("prefill", "p0", CoreKnobs(), transport="zmq")
    d = make_node("decode", "d0", CoreKnobs(), transport="shm")
    net = Net([p, d])
    key = net.generate(p, job(), d)
    net.run()
    refused(net, key, "no transport")
    assert_clean(p, d)


def test_what_can_never_fit_is_refused_at_once() -> None:
    p = make_node("prefill", "p0", CoreKnobs())
    d = make_node("decode", "d0", CoreKnobs(num_pages=5))
    net = Net([p, d])
    key = net.generate(p, job(), d)
    net.run()
    refused(net, key, "never fit")
    assert_clean(p, d)


def test_a_draining_node_takes_nothing_new_and_finishes_the_rest() -> None:
    net, p, d = linked()
    first = net.generate(p, job(0), d)
    net.run(until=lambda: bool(net.messages(Installed)))
    d.ctx.leaving = Departure()
    second = net.generate(p, job(1), d)
    net.run()
    assert net.router.streams[first] == expected(job(0))
    refused(net, second, "shutting down", "partner_draining")
    p.ctx.leaving = Departure()
    third = net.generate(p, job(2), d)
    net.run()
    assert ends_of(net, third) == [("error", "node_draining")]
    assert_clean(p, d)


def test_ids_beyond_the_vocabulary_fail_one_request_only() -> None:
    net, p, d = linked()
    bad = net.generate(p, replace(job(0), prompt=(1, 96, 2)), d)
    worse = net.generate(d, job(3, sampling=replace(LONG, logit_bias=((4000, 1.0),))))
    good = net.generate(p, job(1), d)
    net.run()
    assert ends_of(net, bad) == ends_of(net, worse) == [("error", "invalid_request_error")]
    assert net.router.streams[good] == expected(job(1))
    assert_clean(p, d)


def test_too_many_waiting_requests_are_turned_away() -> None:
    p, d = pair()
    for node in (p, d):
        node.ctx.facts = replace(node.ctx.facts, max_waiting=2)
    net = Net([p, d])
    keys = [net.generate(p, job(rid), d) for rid in range(5)]
    net.run()
    codes = [end for key in keys for end in ends_of(net, key)]
    assert codes.count(("error", "overloaded")) == 3
    assert_clean(p, d)


def test_a_decode_node_with_too_many_offers_is_full_not_failing() -> None:
    """No failed hand-off: those count against the prefill node, and clients see a 502 (simulation seed 100082)."""
    p, d = make_node("prefill", "p0", CoreKnobs()), make_node("decode", "d0", CoreKnobs(max_running=1))
    d.ctx.facts = replace(d.ctx.facts, max_waiting=1)
    net = Net([p, d])
    keys = [net.generate(p, job(rid), d) for rid in range(4)]
    net.run()
    codes = [end for key in keys for end in ends_of(net, key)]
    assert sorted(codes) == [("error", "partner_overloaded")] * 3 + [("length", "")]
    assert_clean(p, d)


@pytest.mark.parametrize("name", ["d0@7", "@"])
def test_an_impossible_decode_node_name_is_its_request_s_error(name: str) -> None:
    net, p, d = linked()
    net.run()
    good = to_generate(net, p, d)
    wanted = replace_struct(good, decode_node=name)
    net.to_node(name_of(p), wanted)
    net.run()
    assert [end.reason for end in net.router.ends[good.key]] == ["error"]
    assert_clean(p, d)


def to_generate(net: Net, p: Node, d: Node) -> Generate:
    """What a router would send, taken back before it arrives."""
    net.generate(p, job(), d)
    message = net.inboxes[name_of(p)].pop().message
    assert isinstance(message, Generate)
    return message


# ---- failures of the transfer


def test_an_answer_of_one_token_is_no_failed_hand_off() -> None:
    """Its pages are free at the prefill node before they are pulled. Only that node knows why, and what the decode node
    said of it came first (simulation seed 90325)."""
    p = make_node("prefill", "p0", CoreKnobs(chunk_size=32, prefix_cache=False), transport="shm")
    d = make_node("decode", "d0", CoreKnobs(), transport="shm")
    net = Net([p, d])
    net.hold = lambda src, dst, message: src == name_of(p) and isinstance(message, Ready | Abort | Tokens)
    one = job(sampling=SamplingParams(max_tokens=1, temperature=0.0))
    key = net.generate(p, one, d)
    net.run()
    late = [entry for entry in net.kept if not isinstance(entry[2].message, Ready)]
    net.kept = [entry for entry in net.kept if entry not in late]
    net.let_go()
    net.run()
    assert not net.router.ends[key]
    assert "generation" in net.messages(Failed)[0].reason
    net.kept = late
    net.release_held()
    net.run()
    assert ends_of(net, key) == [("length", "")] and net.router.streams[key] == expected(one)
    assert_clean(p, d)
    p.ctx.core.close()
    d.ctx.core.close()


def change_first(net: Net, kind: type, changes: dict[str, object]) -> None:
    """Change the first message of this kind on its way."""
    plain, waits = net.deliver, [kind]

    def lie(source: str, action: Outgoing) -> None:
        if type(action.message) in waits:
            waits.clear()
            action = replace(action, message=replace_struct(action.message, **changes))
        plain(source, action)

    net.deliver = lie  # type: ignore[method-assign]


SENSELESS = [
    (Ready, {"first_page": 40}),
    (Ready, {"first_page": 1}),
    (Prebuilt, {"committed": 69}),
    (Prebuilt, {"token": 96}),
    (Prebuilt, {"draft_state": b"123"}),
    (Grant, {"cached_prefix_len": 7}),
    (Grant, {"cached_prefix_len": 80}),
    (Grant, {"transport": "pigeon"}),
]


@pytest.mark.parametrize(("kind", "changes"), SENSELESS)
def test_a_senseless_message_fails_its_request(kind: type, changes: dict[str, object]) -> None:
    net, p, d = linked(width=4)
    change_first(net, kind, changes)
    key = net.generate(p, job(), d)
    net.run()
    assert ("error", "handoff_failed") in ends_of(net, key)
    assert_clean(p, d)
