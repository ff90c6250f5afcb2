"""One scene for each slip in the router: parts without sockets, messages made by hand. A scene returns what it saw."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry

from router.dispatch.gateway import Gateway
from router.fleet.breaker import Breaker
from router.requests.effects import Effects, Failure, Update
from router.requests.new_request import NewRequest
from shared.core.sampling_params import SamplingParams
from shared.observe.log import Logger
from shared.observe.metrics import ClusterMetrics
from shared.wire.messages import (
    Abort,
    Drain,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    SequenceEnd,
    TokenRun,
    Tokens,
    Welcome,
)
from shared.wire.peers import Inbound, PeerClosed, Received, WireTotals, peer_name
from tests.support.worlds.router_rig import RouterRig, generates, hello, ids_of, load


def told(effects: Effects) -> str:
    return "; ".join([*sends_in_words(effects.sends), *news_in_words(effects.news)]) or "nothing happens"


def sends_in_words(sends: Iterable[tuple[str, Message]]) -> list[str]:
    """Leave out Aborts, which every end of an attempt brings."""
    return [_send_in_words(peer, message) for peer, message in sends if not isinstance(message, Abort)]


def _send_in_words(peer: str, message: Message) -> str:
    if not isinstance(message, Generate):
        return f"{type(message).__name__} to {peer}"
    target = f" for {message.decode_node}" if message.decode_node else ""
    return f"Generate #{message.key.attempt} to {peer}{target} behind {message.output_ids[0]}"


def news_in_words(news: Iterable[Update | Failure]) -> list[str]:
    return [_one_news_in_words(entry) for entry in news]


def _one_news_in_words(entry: Update | Failure) -> str:
    if isinstance(entry, Failure):
        return f"the client gets {entry.error.code}"
    end = f", end: {entry.end.reason}" if entry.end else ""
    return f"the client gets {list(entry.ids)}{end}"


# ---- dispatcher, journal, placement, breaker


def begun_by_decode_survives_attempt() -> list[str]:
    rig = RouterRig(max_attempts=4)
    p1, d1 = rig.join("prefill", "p1"), rig.join("decode", "d1")
    first = rig.open()[0]
    rig.run(d1, first.key, 0, [10])
    d2 = rig.join("decode", "d2")
    rig.registry.remove(d1)
    second = generates(rig.dispatcher.node_lost(d1, "killed", rig.now))[0]
    rig.join("prefill", "p2")
    rig.registry.remove(p1)
    after = rig.dispatcher.node_lost(p1, "killed", rig.now)
    said = [
        f"d1 begins and dies: Generate #{second.key.attempt} to p1 for {second.decode_node}; p1 dies: {told(after)}"
    ]
    for third in generates(after):
        rig.run(d2, third.key, 1, [11])
        said.append(f"d2 goes on: {told(rig.end(d2, third.key, 2))}")
    if len(rig.journal):
        rig.now = 61.0
        said.append(f"a minute later: {told(rig.dispatcher.tick(rig.now))}")
    return said


def placed_and_still_parked() -> list[str]:
    rig = RouterRig(max_attempts=4, resume_wait_s=30.0)
    d1 = rig.join("decode", "d1")
    key = rig.open()[0].key
    rig.run(d1, key, 0, [10])
    rig.registry.remove(d1)
    rig.dispatcher.node_lost(d1, "killed", rig.now)
    rig.now = 1.0
    d2 = rig.join("decode", "d2")
    sent: list[Generate] = []
    for _ in range(5):
        sent += generates(rig.dispatcher.tick(rig.now))
        rig.now += 0.25
    rig.run(d2, sent[0].key, 1, [11])
    rig.end(d2, sent[0].key, 2)
    left = f"{d2.ours.open_sequences} open sequences, {d2.ours.open_prompt_tokens} prompt tokens"
    return [f"{len(sent)} Generates in 5 ticks; when it has ended, and {len(rig.journal)} are open, d2 has {left}"]


def ahead_of_a_gap_is_kept() -> list[str]:
    rig = RouterRig(max_attempts=4)
    d1 = rig.join("decode", "d1")
    key = rig.open()[0].key
    got = ids_of(rig.run(d1, key, 0, [10]))
    got += ids_of(rig.run(d1, key, 2, [66]))  # position 1 was lost on its way, and d1 is not well
    d2 = rig.join("decode", "d2")
    rig.registry.remove(d1)
    key = generates(rig.dispatcher.node_lost(d1, "killed", rig.now))[0].key
    alarms = []
    for position, token in enumerate([11, 12, 13], 1):
        effects = rig.run(d2, key, position, [token])
        got += ids_of(effects)
        alarms += [alarm.kind for alarm in effects.alarms]
    return [f"d2 says [11, 12, 13] behind [10]; the client reads {got}; alarms: {alarms}"]


def stop_seen_in_the_wrong_place() -> list[str]:
    rig = RouterRig(max_attempts=4)
    d1 = rig.join("decode", "d1")
    sampling = SamplingParams(max_tokens=50, stop_token_ids=(2,))
    _, effects = rig.dispatcher.open([NewRequest([1, 2, 3], 1, sampling, seed=7)], rig.now)
    rig.run(d1, generates(effects)[0].key, 0, [10, 11, 2])
    rig.join("decode", "d2")
    rig.registry.remove(d1)
    return [f"[10, 11, stop] are here, d1 dies: {told(rig.dispatcher.node_lost(d1, 'killed', rig.now))}"]


def all_failed_hands_over_again() -> list[str]:
    rig = RouterRig(max_attempts=3)
    prefill, decode = rig.join("prefill", "p"), rig.join("decode", "d")
    generate, said = rig.open()[0], []
    for _ in range(3):
        if not generate.decode_node:
            rig.run(decode, generate.key, 0, [10])
            said.append(f"d alone: {told(rig.end(decode, generate.key, 1))}")
            break
        effects = rig.end(prefill, generate.key, 0, "error", "handoff_failed")
        said.append(f"hand-off fails: {told(effects)}")
        generate = generates(effects)[0] if generates(effects) else generate
    return said


def breaker_remembers_old_openings() -> list[str]:
    breaker, now = Breaker(), 0.0
    for _ in range(7):  # the morning: three faults, then probes that fail
        breaker.failed(now)
        now += 100.0
    breaker.sent()
    breaker.succeeded()
    now += 3 * 3600.0
    for _ in range(3):
        breaker.failed(now)
    waits = next(s for s in range(100) if breaker.allows(now + s))
    return [f"three faults, hours after it has recovered: shut out for {waits} s"]


# ---- gateway


class LinkThatRefuses:
    """Keeps what the gateway sends; `refuses` some of it, as a full queue does."""

    endpoint = "tcp://router"

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.refuses: Callable[[Message], bool] = lambda message: False

    async def receive(self) -> Sequence[Inbound]:
        return []

    def send(self, peer: str, message: Message) -> bool:
        if self.refuses(message):
            return False
        self.sent.append((peer, message))
        return True

    def take(self) -> list[tuple[str, Message]]:
        sent, self.sent = self.sent, []
        return sent

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for _, message in self.sent)


class GatewayRig:
    """A gateway around the router rig's parts, whose clock it shares."""

    def __init__(self) -> None:
        self.rig = RouterRig(max_attempts=3, resume_wait_s=5.0)
        self.link = LinkThatRefuses()
        parts = (self.rig.registry, self.rig.dispatcher, self.link)
        metrics, log = ClusterMetrics(CollectorRegistry()), Logger("r", io.StringIO())
        self.gateway = Gateway(("r", 9), *parts, metrics, log, lambda: self.rig.now)

    def hear(self, message: Hello | Heartbeat | Tokens | Goodbye) -> None:
        self.gateway.handle(Received(peer_name(message.node_id, message.epoch), message))

    def beat(self, node_id: str, epoch: int = 1, *, draining: bool = False) -> None:
        self.hear(Heartbeat(node_id, epoch, load(), draining))


def reconnect_compared_with_itself() -> list[str]:
    rig = GatewayRig()
    rig.hear(hello("decode", "d"))
    mailbox = rig.gateway.open([new_request()])
    rig.link.take()
    rig.rig.now = 1.0
    rig.hear(hello("decode", "d", connection=2))  # d saw the first one break, and dropped the request
    sent = rig.link.take()
    for _, message in sent:
        if isinstance(message, Generate):  # the only one that d knows of
            end = SequenceEnd(message.key, "stop", 1, 0, "", "")
            rig.hear(Tokens("d", 1, [TokenRun(message.key, 0, [10], [])], [end]))
    while rig.rig.now < 61.0:
        rig.rig.now += 0.25
        rig.beat("d")
        rig.gateway.tick()
    said = [*sends_in_words(sent), *news_in_words(mailbox._news)]
    return [f"Hello on a second connection, and a minute: {'; '.join(said)}"]


def drain_believed_to_be_heard() -> list[str]:
    rig = GatewayRig()
    for node_id in ("d1", "d2"):
        rig.hear(hello("decode", node_id))
    node = rig.rig.registry.named("d1")
    assert node is not None
    rig.link.refuses = lambda message: isinstance(message, Drain)
    rig.gateway.drain(node, Drain("d1", "restart"), 5.0)
    rig.link.refuses = lambda message: False
    rig.link.take()
    while rig.rig.now < 60.0:
        rig.rig.now += 0.5
        rig.beat("d1", draining=rig.link.count(Drain) > 0)
        rig.beat("d2")
        rig.gateway.tick()
    state = "draining" if node.is_draining else "serving"
    num = rig.link.count(Drain)
    return [f"the Drain met a full queue; in the next minute it is said {num} more times; state shown: {state}"]


def old_life_takes_the_new_along() -> list[str]:
    rig = GatewayRig()
    rig.hear(hello("decode", "d", epoch=1))
    rig.rig.now = 1.0
    rig.hear(hello("decode", "d", epoch=2))  # it was started anew; its former connection lingers half open
    rig.gateway.open([new_request()])
    rig.link.take()
    rig.rig.now = 4.0
    rig.beat("d", epoch=2)
    rig.gateway.handle(PeerClosed("d@1"))
    known = "known" if rig.rig.registry.named("d") else "forgotten"
    rig.rig.now = 4.5
    rig.beat("d", epoch=2)
    if rig.link.count(Welcome):
        rig.rig.now = 6.5
        rig.hear(hello("decode", "d", epoch=2))  # as it does two seconds after a Welcome to nobody
        rig.gateway.tick()
    sent = "; ".join(sends_in_words(rig.link.take())) or "nothing"
    return [f"the former connection closes: d@2 is {known}; its next heartbeat brings: {sent}"]


def new_request() -> NewRequest:
    return NewRequest([1, 2, 3], 1, SamplingParams(max_tokens=5), seed=7)


# ---- counts of the wire


def counts_taken_by_reference() -> list[str]:
    totals, reported = WireTotals(), []
    counts: Counter[str] = Counter()
    for amount in (3, 4, 50):
        counts["wire_dropped"] += amount
        counts["wire_refused.key"] += amount
        reported.append(totals.take(counts).get("wire_errors", 0))
    return [f"3, 4 and 50 frames dropped before three heartbeats; reported: {reported}"]


CASES = (
    begun_by_decode_survives_attempt,
    placed_and_still_parked,
    reconnect_compared_with_itself,
    ahead_of_a_gap_is_kept,
    stop_seen_in_the_wrong_place,
    all_failed_hands_over_again,
    breaker_remembers_old_openings,
    drain_believed_to_be_heard,
    old_life_takes_the_new_along,
    counts_taken_by_reference,
)
