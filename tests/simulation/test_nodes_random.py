"""Random lives of two prefill and two decode nodes: small pools, late messages, aborts, deaths, restarts.

A router in the test keeps a journal and begins another attempt (prompt + what was said) whenever one fails. So every
request that is not aborted must end with the reference's stream, whoever died meanwhile, and all nodes must be clean.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from shared.node.loop.node import Node
from shared.node.records.mail import Outgoing
from shared.wire.codec import decode, encode, to_wire
from shared.wire.messages import Abort, Generate, Key, Message, Tokens, Welcome
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received
from tests.support.cores.core_rig import CoreKnobs, Job, draw_jobs
from tests.support.worlds.node_pair import ROUTER, ROUTER_ID, assert_clean, make_node, name_of, ticket_for, welcome_for

ROUNDS = 6000


@dataclass
class Open:
    """The router's journal of one request."""

    job: Job
    said: list[int] = field(default_factory=list)
    attempt: int = -1
    where: tuple[str, ...] = ()  # link names of the nodes that the attempt uses
    done: bool = False
    aborted: bool = False


class Cluster:
    """Channels are FIFO, their speeds are not equal. Everything is drawn from one generator."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.knobs = CoreKnobs(
            chunk_size=self.rng.choice([8, 32, 64]),
            page_size=self.rng.choice([4, 16]),
            prefix_cache=self.rng.random() < 0.7,
            width=self.rng.choice([1, 4]),
            overlap=self.rng.random() < 0.7,
            mix=self.rng.random() < 0.7,
            max_running=self.rng.choice([3, 8]),
        )
        self.transport = "zmq"
        self.nodes: dict[str, Node] = {}
        self.channels: dict[tuple[str, str], deque[Inbound]] = {}
        self.epochs = 0
        self.deaths = 0
        for slot in ("p0", "p1", "d0", "d1"):
            self.start(slot)
        self.requests = {job.rid: Open(job) for job in draw_jobs(self.rng, 14, max_prompt=90)}

    def start(self, slot: str) -> None:
        self.epochs += 1
        tokens = self.rng.choice([260, 400, 1600])
        knobs = self.knobs.__class__(**{**self.knobs.__dict__, "num_pages": 1 + tokens // self.knobs.page_size})
        node = make_node("prefill" if slot[0] == "p" else "decode", slot, knobs, epoch=self.epochs)
        self.nodes[name_of(node)] = node
        self.channel(ROUTER, name_of(node)).extend(
            [PeerUp(ROUTER), Received(ROUTER, welcome_for(name_of(node), Welcome(ROUTER_ID, 1, 1), 0.0))]
        )

    def channel(self, src: str, dst: str) -> deque[Inbound]:
        return self.channels.setdefault((src, dst), deque())

    # ---- nodes

    def round(self) -> None:
        for (_, dst), queue in list(self.channels.items()):
            if dst in self.nodes and queue and self.rng.random() < 0.6:
                self.tick(dst, [queue.popleft() for _ in range(self.rng.randint(1, len(queue)))])
        for name in list(self.nodes):
            if self.rng.random() < 0.6:
                self.tick(name, [])

    def tick(self, name: str, inbox: list[Inbound]) -> None:
        for action in self.nodes[name].tick(inbox, 0.0):
            if not isinstance(action, Outgoing):
                continue
            if action.peer == ROUTER:
                self.hear(name, action.message)
            elif action.peer in self.nodes:
                frames = tuple(bytes(frame) for frame in action.frames)
                self.channel(name, action.peer).append(Received(name, decode(encode(action.message)), frames))

    def kill(self, name: str) -> None:
        """What it has sent arrives, then the closed connection is seen."""
        self.deaths += 1
        node = self.nodes.pop(name)
        for other in self.nodes:
            self.channel(name, other).append(PeerClosed(name))
        for one in self.requests.values():
            if name in one.where and not one.done:
                self.begin(one)
        self.start(node.ctx.facts.node_id)

    # ---- router

    def send(self, name: str, message: Message) -> None:
        self.channel(ROUTER, name).append(Received(ROUTER, decode(encode(message))))

    def begin(self, one: Open) -> None:
        """Another attempt, elsewhere; what is left of the one before is aborted."""
        self.abort(one)
        one.attempt += 1
        prefills = [name for name in self.nodes if name[0] == "p"]
        decodes = [name for name in self.nodes if name[0] == "d"]
        first, second = self.rng.choice(prefills), self.rng.choice(decodes)
        one.where = (first, second)
        if self.rng.random() < 0.2:
            first = self.rng.choice(prefills + decodes)
            one.where = (first,)
        facts = self.nodes[second].ctx.facts
        relayed = len(one.where) == 2
        self.send(
            first,
            Generate(
                key=self.key(one),
                prompt_ids=list(one.job.prompt),
                output_ids=[list(one.said)],
                num_sequences=1,
                sampling=to_wire(one.job.sampling),
                seed=one.job.seed,
                decode_node=facts.node_id if relayed else "",
                decode_epoch=facts.epoch if relayed else 0,
                decode_endpoint=facts.endpoint if relayed else "",
                remaining_ms=3_600_000,
                ended=[],
                adapter=one.job.adapter,
                scored=1,
                cache_salt=one.job.cache_salt,
                ticket=ticket_for(self.key(one), first, second, one.job) if relayed else None,
            ),
        )

    def key(self, one: Open) -> Key:
        return Key(ROUTER_ID, 1, f"r{one.job.rid}", one.attempt, 0)

    def abort(self, one: Open) -> None:
        for name in one.where:
            if name in self.nodes:
                self.send(name, Abort(self.key(one), all_sequences=True))

    def hear(self, name: str, message: Message) -> None:
        if not isinstance(message, Tokens):
            return
        for run in message.runs:
            one = self.requests[int(run.key.rid[1:])]
            if run.key.attempt == one.attempt and not one.done:
                known = one.said[run.first_pos : run.first_pos + len(run.ids)]
                assert run.ids[: len(known)] == known, f"{name} says other tokens of {run.key}"
                assert run.first_pos <= len(one.said), f"{name} leaves a gap in {run.key}"
                one.said.extend(run.ids[len(known) :])
        for end in message.ends:
            one = self.requests[int(end.key.rid[1:])]
            if end.key.attempt != one.attempt or one.done:
                continue
            if end.reason == "error":
                assert end.error_code in ("peer_unreachable", "handoff_failed"), end
                self.begin(one)
            else:
                assert end.num_output_tokens == len(one.said)
                one.done = True

    def disturb(self) -> None:
        draw = self.rng.random()
        if draw < 0.01 and self.deaths < 6:
            self.kill(self.rng.choice(list(self.nodes)))
        elif draw < 0.02:
            one = self.rng.choice(list(self.requests.values()))
            if one.attempt >= 0 and not one.done:
                one.done = one.aborted = True
                self.abort(one)
        elif draw < 0.06:
            node = self.rng.choice(list(self.nodes.values()))
            holders = node.ctx.core.queues.granted.values()
            if holders and node.ctx.core.queues.counters.retractions < 20:
                node.ctx.core.queues.retract(self.rng.choice(list(holders)))

    def live(self) -> None:
        for _ in range(ROUNDS):
            fresh = [one for one in self.requests.values() if one.attempt < 0]
            if fresh and self.rng.random() < 0.2:
                self.begin(fresh[0])
            self.round()
            self.disturb()
            if all(one.done for one in self.requests.values()):
                break
        else:
            raise AssertionError(f"no end: {[one for one in self.requests.values() if not one.done]}")
        while any(queue for (_, dst), queue in self.channels.items() if dst in self.nodes) or not self.at_rest():
            self.round()

    def at_rest(self) -> bool:
        return all(node.idle for node in self.nodes.values())


def finished_stream(one: Open) -> list[int]:
    return one.job.expected()


@pytest.mark.rule("H30", "I7")
@pytest.mark.parametrize("seed", range(40))
def test_random_lives(seed: int) -> None:
    cluster = Cluster(seed)
    cluster.live()
    for one in cluster.requests.values():
        full = finished_stream(one)
        assert one.said == full if not one.aborted else one.said == full[: len(one.said)]
    assert_clean(*cluster.nodes.values())
