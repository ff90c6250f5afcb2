"""One scene for each slip in the nodes: a prefill and a decode node back to back. A scene returns what it saw."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from decode_node.side import DecodeSide
from prefill_node.side import PrefillSide
from shared.core.errors import HandoffFailed, StepFailed
from shared.core.keys import sequence_seed
from shared.core.sampling_params import SamplingParams
from shared.engine.plan import RowId
from shared.node.loop.node import Node
from shared.transfer.interface import Frames, PageList
from shared.wire.codec import key_of, to_wire
from shared.wire.messages import (
    Drain,
    Generate,
    Grant,
    Installed,
    Key,
    Offer,
    Ready,
    Refuse,
    SequenceEnd,
    Wait,
    Welcome,
)
from shared.wire.peers import PeerClosed, PeerUp, Received
from tests.support.cores.core_rig import CoreKnobs, Job, Outcome, make_core
from tests.support.worlds.node_pair import ROUTER, ROUTER_EPOCH, ROUTER_ID, Net, make_node, name_of, sibling

PLAIN = CoreKnobs(width=1, prefix_cache=False)
OTHER_ROUTER = "tcp://127.0.0.1:7002"


def job(rid: int, num_prompt: int, max_tokens: int) -> Job:
    prompt = tuple((7 * rid + 3 * i * i + i) % 90 for i in range(num_prompt))
    return Job(rid, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), seed=rid)


def make_pair(prefill: CoreKnobs = PLAIN, decode: CoreKnobs = PLAIN) -> tuple[Net, Node, Node]:
    nodes = make_node("prefill", "p", prefill), make_node("decode", "d", decode)
    return Net(nodes), *nodes


def outcome(net: Net, key: Key, what: Job) -> str:
    return compared(net.router.streams[key], what.expected(), net.router.ends[key])


def compared(tokens: Sequence[int], expected: Sequence[int], ends: Sequence[SequenceEnd]) -> str:
    """How a request went, as its router knows it."""
    right = "right" if list(tokens) == list(expected[: len(tokens)]) else "WRONG"
    words = [f"{end.reason} {end.error_code} {end.error_message}".strip() for end in ends]
    return f"{len(tokens)} of {len(expected)} tokens, {right}; end: {', '.join(words) or 'none'}"


def rows_in_words(node: Node) -> str:
    return ", ".join(f"{number} {state}" for state, number in node.ctx.core.kv.row_gauges().items() if number)


def wait(net: Net, rounds: int, seconds: float) -> None:
    """Let time pass in rounds, in each of which every node has one tick: what is under way goes on slowly."""
    for _ in range(rounds):
        net.at(seconds)
        for name in net.nodes:
            net.tick(name)


# ---- books of both nodes


def expiry_takes_the_newest() -> list[str]:
    net, p, d = make_pair()
    net.generate(p, job(1, 40, 3), d)
    net.run()  # leaves a tombstone at 0 s
    net.at(50)
    net.hold = lambda source, target, message: isinstance(message, Offer)
    key = net.generate(p, job(2, 40, 30), d)
    net.run()
    net.abort(d, key, all_sequences=True)  # the prefill node's Abort met a full queue
    net.run()
    net.at(11)
    net.run()
    net.hold = lambda source, target, message: False
    net.release_held()
    net.run()
    num_run = len(net.router.by_node["d", key])
    return [f"the Offer comes 11 s behind the Abort: the decode node runs {num_run} tokens for nobody"]


def newer_router_is_over() -> list[str]:
    net, p, d = make_pair()
    net.run()
    what = job(1, 40, 8)
    restart_router(net, p)
    old = net.generate(p, what, d)
    key = to_wire(key_of(old)._replace(router_epoch=2))
    received = net.inboxes[name_of(p)].pop()
    assert isinstance(received, Received) and isinstance(received.message, Generate)
    net.to_node(name_of(p), msgspec.structs.replace(received.message, key=key))
    net.run()
    restart_router(net, d)
    net.run()
    refused = [message.reason for message in net.messages(Refuse)]
    return [f"refused: {refused}; {outcome(net, key, what)}"]


def restart_router(net: Net, node: Node) -> None:
    """As this node sees it."""
    net.inboxes[name_of(node)] += [PeerClosed(ROUTER), PeerUp(ROUTER)]
    net.to_node(name_of(node), Welcome(ROUTER_ID, 2, connection=2))


def idle_with_offers_waiting() -> list[str]:
    net, p, d = make_pair()
    name = name_of(d)
    welcome_by_another_router(net, d)
    net.inboxes[name].append(PeerClosed(ROUTER))  # for a moment
    net.run()
    what = job(1, 40, 8)
    key = net.generate(p, what, d)
    net.run()
    said = f"{len(d.side.outside())} Offer waits for its router's Welcome, and another router drains the node: "
    net.to_node(name, Drain("d", "stop"), source=OTHER_ROUTER)
    net.run()
    if has_ended(d):
        said += "it ends"
        net.kill(d)
    else:
        said += "it stays"
        net.inboxes[name].append(PeerUp(ROUTER))
        net.to_node(name, Welcome(ROUTER_ID, ROUTER_EPOCH, connection=2))
    net.run()
    return [f"{said}; {outcome(net, key, what)}; ended in the end: {has_ended(d)}"]


def welcome_by_another_router(net: Net, node: Node) -> None:
    node.ctx.routers.add_router(OTHER_ROUTER)
    net.inboxes[OTHER_ROUTER] = deque()
    net.inboxes[name_of(node)].append(PeerUp(OTHER_ROUTER))
    net.to_node(name_of(node), Welcome("other", 1, connection=1), source=OTHER_ROUTER)
    net.run()


def has_ended(node: Node) -> bool:
    """The rule of the daemon, for a node that was told to drain."""
    return node.ctx.leaving is not None and node.ctx.leaving.is_over(0.0, is_idle=node.idle)


# ---- decode node


def oldest_offer_stays() -> list[str]:
    net, p, d = make_pair(decode=replace(PLAIN, num_pages=12))
    long, large, short = job(1, 64, 60), job(2, 120, 20), job(3, 20, 10)
    first = net.generate(d, long)
    net.run(until=lambda: len(net.router.streams[first]) > 3)
    waiting = net.generate(p, large, d)
    net.run(until=lambda: bool(net.messages(Wait)))
    net.abort(p, waiting, all_sequences=True)
    net.run(until=lambda: not d.side.outside())
    last = net.generate(d, short)
    net.run()
    return [
        f"behind an Offer that was taken back: {outcome(net, last, short)}",
        f"the node's rows then: {rows_in_words(d)}",
    ]


def failed_pull_never_over() -> list[str]:
    net, p, d = make_pair(decode=replace(PLAIN, num_pages=24, max_running=4))
    assert isinstance(d.side, DecodeSide)
    receiver = d.side.transfers.copies.receivers["zmq"]

    def torn(ready: Ready, frames: Frames, dst_pages: PageList) -> None:
        raise HandoffFailed("page 3: its digest differs from the one announced")

    receiver.pull, pull = torn, receiver.pull
    for rid in range(1, 4):
        net.generate(p, job(rid, 100, 5), d)
        net.run()
    receiver.pull = pull
    what = job(9, 100, 5)
    key = net.generate(p, what, d)
    net.run()
    kv = d.ctx.core.kv
    return [
        f"three pulls failed; rows: {rows_in_words(d)}; pages free: {kv.num_available} of {kv.allocator.num_total}",
        f"the next request: {outcome(net, key, what)}",
    ]


def late_abort_ends_running() -> list[str]:
    net, p, d = make_pair()
    what = job(1, 40, 40)
    net.hold = lambda source, target, message: isinstance(message, Installed)
    key = net.generate(p, what, d)
    net.run(until=lambda: len(net.router.by_node["d", key]) > 5)
    net.inboxes[name_of(p)].append(PeerClosed(ROUTER))
    net.run()
    return [f"the prefill node lost its router, Installed is under way: {outcome(net, key, what)}"]


# ---- prefill node


def sibling_offered_since_birth() -> list[str]:
    cached = replace(PLAIN, prefix_cache=True)
    net, p, d = make_pair(cached, replace(cached, num_pages=24))
    holder, what = job(1, 200, 150), job(2, 200, 6)
    first = net.generate(d, holder)
    net.run(until=lambda: len(net.router.streams[first]) > 1)
    key = net.generate(p, what, d, num_sequences=2)
    wait(net, 15, 5.0)
    assert not net.router.ends[first] and not net.router.ends[key]
    net.abort(d, first)
    net.run()
    second = sibling(key, 1)
    expected = what.expected_of(sequence_seed(what.seed, 1))
    said = compared(net.router.streams[second], expected, net.router.ends[second])
    return [f"first sequence: {outcome(net, key, what)}", f"second: {said}"]


def unpinned_keeps_its_record() -> list[str]:
    net, p, d = make_pair(replace(PLAIN, num_pages=12, chunk_size=5))
    assert isinstance(p.side, PrefillSide)
    what = job(1, 100, 8)
    net.hold = lambda source, target, message: isinstance(message, Grant)
    key = net.generate(p, what, d)
    net.run()
    handoff = p.side.bootstrap.find_handoff(key_of(key))
    assert handoff is not None and handoff.record is not None
    net.generate(p, job(2, 90, 3))

    def is_half_way() -> bool:  # a page is begun, and far from full
        return handoff.request.incarnation == 1 and handoff.num_final_tokens in (5, 20, 25, 40)

    net.run(until=is_half_way)
    assert is_half_way()
    net.hold = lambda source, target, message: False
    net.release_held()
    net.run()
    return [outcome(net, key, what)]


def waiting_prompt_counts_as_sent() -> list[str]:
    net, p, d = make_pair(replace(PLAIN, num_pages=13))
    what = job(2, 100, 8)
    first = net.generate(p, job(1, 100, 70))
    net.run(until=lambda: len(net.router.streams[first]) > 1)
    key = net.generate(p, what, d)
    wait(net, 10, 10.0)
    assert not net.router.ends[first]
    renewals = sum(not ready.pages for ready in net.messages(Ready))
    net.run()
    return [f"granted, and 100 s behind another prompt: {renewals} renewals; {outcome(net, key, what)}"]


# ---- scheduler


def former_life_fails_the_next() -> list[str]:
    core, seen, what = make_core(PLAIN), Outcome(), job(1, 40, 12)
    req = what.request()
    core.scheduler.intake.submit(req)
    while len(req.output_ids) < 4:
        core.loop.step(block=True)
    before = RowId(req.key, req.incarnation)
    core.queues.retract(req)  # for memory, with a step in flight
    for step in (9, 10):  # once makes a suspect of whom it names, twice ends him
        core.scheduler.results.step_failed((before,), (), StepFailed(f"step {step}: out of memory"))
    while core.queues.requests or not core.loop.idle:
        core.loop.step(block=True)
    seen.take(core)
    end, tokens, expected = seen.ends["r1"], seen.streams["r1"], what.expected()
    right = "right" if tokens == expected[: len(tokens)] else "WRONG"
    return [f"{len(tokens)} of {len(expected)} tokens, {right}; end: {end.reason.value} {end.error or ''}".strip()]


CASES = (
    expiry_takes_the_newest,
    newer_router_is_over,
    idle_with_offers_waiting,
    oldest_offer_stays,
    failed_pull_never_over,
    late_abort_ends_running,
    sibling_offered_since_birth,
    unpinned_keeps_its_record,
    waiting_prompt_counts_as_sent,
    former_life_fails_the_next,
)
