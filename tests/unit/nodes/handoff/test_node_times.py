"""What a node's metrics say of one hand-off, on a clock that the test moves: each stage once, with the time it took."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Grant, Heartbeat, Installed, Message, Offer, Prebuilt, Ready
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.worlds.node_pair import Net, expected, make_node, name_of

PAGE_SIZE = 16
KNOBS = CoreKnobs(page_size=PAGE_SIZE, chunk_size=32, num_pages=13, prefix_cache=False)


def job(rid: int, length: int, max_tokens: int) -> Job:
    return Job(rid, tuple(n % 90 for n in range(length)), SamplingParams(max_tokens=max_tokens, temperature=0.0), rid)


class Clockwork:
    """Rounds of one second: first the prefill node, then the decode node, so an answer is heard a round later."""

    def __init__(self, knobs: CoreKnobs = KNOBS) -> None:
        self.prefill, self.decode = make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs)
        self.net = Net([self.prefill, self.decode])
        self.sent: dict[type, float] = {}
        self.net.on_message = self._note

    def _note(self, src: str, dst: str, message: Message) -> None:
        self.sent[type(message)] = self.net.now

    def round(self) -> None:
        self.net.at(1.0)
        for node in (self.prefill, self.decode):
            self.net.tick(name_of(node))

    def observations(self, node_id: str) -> dict[str, list[float]]:
        found: dict[str, list[float]] = defaultdict(list)
        for message in self.net.messages(Heartbeat):
            if message.node_id == node_id:
                for name, values in message.load.observations.items():
                    found[name] += values
        return found


def test_every_stage_of_a_hand_off_is_timed_once() -> None:
    clock = Clockwork()
    net, sent = clock.net, clock.sent
    net.generate(clock.decode, job(0, 80, 40))  # 6 pages of 12, and it grows: the offer has to wait
    clock.round()
    key = net.generate(clock.prefill, job(1, 120, 4), clock.decode)
    begin = net.now + 1
    net.hold = lambda src, dst, message: isinstance(message, Prebuilt)
    while not net.router.ends[key]:
        clock.round()
        if net.now >= sent.get(Prebuilt, net.now) + 3:
            net.release_held()
        assert net.now < 500
    clock.round()
    assert net.router.streams[key] == expected(job(1, 120, 4))
    out, into = clock.observations("p0"), clock.observations("d0")
    heard_grant, heard_installed = sent[Grant] + 1, sent[Installed] + 1
    assert sent[Grant] > sent[Offer] == begin and sent[Installed] > sent[Ready]
    assert out["queue_seconds.bootstrap"] == [heard_grant - begin]
    assert out["queue_seconds.inflight"] == [heard_installed - heard_grant]
    assert out["queue_seconds.waiting"] == [0.0], "seen in the round in which it started"
    assert 0 < out["handoff_seconds"][0] <= heard_installed - begin and len(out["handoff_seconds"]) == 1
    assert into["queue_seconds.prealloc"] == [sent[Grant] - begin]
    assert len(into["queue_seconds.transfer"]) == len(into["queue_seconds.prebuilt"]) == 1
    stages = into["queue_seconds.transfer"] + into["queue_seconds.prebuilt"]
    assert min(stages) >= 0 and sum(stages) == sent[Installed] - sent[Grant]
    assert not {name for name in out if "prealloc" in name} and not {name for name in into if "bootstrap" in name}


def test_a_wait_for_memory_is_no_cost_of_a_hand_off() -> None:
    """The prompt is computed long before its decode node has room."""
    clock = Clockwork()
    net, sent = clock.net, clock.sent
    net.generate(clock.decode, job(0, 80, 40))
    clock.round()
    key = net.generate(clock.prefill, job(1, 120, 4), clock.decode)
    while not net.router.ends[key]:
        clock.round()
        assert net.now < 500
    clock.round()
    out = clock.observations("p0")
    heard_grant, heard_installed = sent[Grant] + 1, sent[Installed] + 1
    assert out["handoff_cost_seconds"] == [heard_installed - heard_grant]
    assert out["handoff_seconds"][0] > heard_installed - heard_grant


def test_what_pages_take_longer_than_their_record_is_the_tail() -> None:
    clock = Clockwork()
    net, sent = clock.net, clock.sent
    key = net.generate(clock.prefill, job(1, 120, 4), clock.decode)
    net.hold = lambda src, dst, message: isinstance(message, Ready)
    while not net.router.ends[key]:
        clock.round()
        if net.now >= sent.get(Prebuilt, net.now) + 5:
            net.release_held()
        assert net.now < 500
    clock.round()
    (tail,) = clock.observations("d0")["handoff_tail_seconds"]
    assert tail == sent[Installed] - sent[Prebuilt] >= 5, "the decode node's turn comes behind the prefill node's"


def test_a_hand_off_is_counted_with_its_bytes() -> None:
    clock = Clockwork()
    key = clock.net.generate(clock.prefill, job(1, 120, 4), clock.decode)
    while not clock.net.router.ends[key]:
        clock.round()
    counts = clock.decode.ctx.metrics.counters()
    num_pages = -(-120 // PAGE_SIZE)
    assert counts["handoffs"] == 1 and counts["handoff_bytes"] == num_pages * clock.decode.ctx.core.pool.page_bytes
    assert clock.prefill.ctx.metrics.counters()["handoffs"] == 0


def test_tokens_are_counted_where_they_are_computed() -> None:
    """The prompt on the prefill node, what was sampled where it was sampled, and the cache's share apart."""
    clock = Clockwork(replace(KNOBS, prefix_cache=True))
    for rid in (1, 2):
        key = clock.net.generate(clock.prefill, job(rid, 100, 4), clock.decode)
        while not clock.net.router.ends[key]:
            clock.round()
    out, into = (node.ctx.core.queues.counters for node in (clock.prefill, clock.decode))
    cached = 100 // PAGE_SIZE * PAGE_SIZE  # of the second prompt, which is equal to the first
    assert out.cached_prompt_tokens == cached and out.prompt_tokens == 100 + 100 - cached
    assert out.output_tokens == 2 and into.output_tokens == 2 * 3
    assert into.prompt_tokens == into.cached_prompt_tokens == 0 and out.retractions == into.retractions == 0


def test_what_the_links_had_to_drop_is_counted_once() -> None:
    clock = Clockwork()
    counts, told = clock.decode.ctx.wire_counts, list[float]()
    for dropped in (3, 0, 2):
        counts["wire_dropped"] += dropped
        clock.round()
        told.append(clock.net.router.heartbeats["d0"].load.counters["wire_errors"])
    assert told == [3, 3, 5]
