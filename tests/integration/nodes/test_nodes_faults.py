"""Real node processes killed, frozen, stopped, or spoken to in nonsense. Others go on; nothing stays behind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from shared.core.sampling_params import SamplingParams
from shared.wire.codec import encode
from shared.wire.messages import Key, Welcome
from tests.support.clusters.procs import NodeProcess, RouterStub
from tests.support.cores.core_rig import Job, draw_jobs
from tests.support.machine.patience import HANG_GUARD_S, SILENCE_S
from tests.support.worlds.node_pair import expected, sibling, welcome_for

ENDLESS = SamplingParams(max_tokens=3000, temperature=0.8)
FAST_SILENCE = ("--silence-s", str(SILENCE_S))
Spawn = Callable[..., NodeProcess]


def job(rid: int, length: int = 70, sampling: SamplingParams = ENDLESS) -> Job:
    rng = random.Random(rid)
    return Job(rid, tuple(rng.randrange(95) for _ in range(length)), sampling, rid + 7)


def short(rid: int) -> Job:
    return job(rid, sampling=SamplingParams(max_tokens=8, temperature=0.0))


@pytest.fixture
def router() -> Iterator[RouterStub]:
    stub = RouterStub()
    yield stub
    stub.close()


@pytest.fixture
def spawn(router: RouterStub, tmp_path: Path) -> Iterator[Spawn]:
    """Start nodes by name (p0, d0, ...) and wait for their Hello."""
    started: list[NodeProcess] = []

    def start(*node_ids: str, flags: tuple[str, ...] = ()) -> list[NodeProcess]:
        new = [
            NodeProcess("prefill" if node_id[0] == "p" else "decode", node_id, router, tmp_path, *flags)
            for node_id in node_ids
        ]
        started.extend(new)
        known = {node_id: router.hellos.get(node_id) for node_id in node_ids}
        router.until(lambda: all(router.hellos.get(i) not in (None, known[i]) for i in node_ids), "Hello of all")
        return new

    yield start
    for node in started:
        node.close()


def started(router: RouterStub, node_id: str, key: Key, tokens: int = 5) -> None:
    router.until(lambda: len(router.book.by_node[node_id, key]) >= tokens, f"{node_id} streams {key.rid}")


def is_draining(router: RouterStub, node_id: str) -> bool:
    """By its newest heartbeat, if one has come yet."""
    beat = router.book.heartbeats.get(node_id)
    return beat is not None and beat.draining


def num_wire_errors(router: RouterStub, node_id: str) -> float:
    beat = router.book.heartbeats.get(node_id)
    return 0.0 if beat is None else beat.load.counters["wire_errors"]


def test_a_killed_decode_node(router: RouterStub, spawn: Spawn) -> None:
    """Its requests are the router's to end; the prefill node hands over to another one, and to a restarted one."""
    p0, d0, d1 = spawn("p0", "d0", "d1")
    first = router.hellos["d0"].epoch
    lost, kept = router.generate("p0", job(0), "d0"), router.generate("p0", job(1), "d1")
    for node_id, key in (("d0", lost), ("d1", kept)):
        started(router, node_id, key)
    d0.kill()
    late = router.generate("p0", short(2), "d0")
    router.wait_ends([late])
    assert router.book.end(late).error_code == "peer_unreachable"
    again = router.generate("p0", short(3), "d1")
    router.wait_ends([again, kept])
    assert router.book.streams[kept] == expected(job(1))
    assert router.book.streams[again] == expected(short(3))
    spawn("d0")
    assert router.hellos["d0"].epoch > first, "another life is another peer"
    back = router.generate("p0", short(4), "d0")
    router.wait_ends([back])
    assert router.book.streams[back] == expected(short(4))
    for node_id in ("p0", "d0", "d1"):
        router.wait_at_rest(node_id)
    assert p0.terminate() == 0 and d1.terminate() == 0


def test_a_killed_prefill_node(router: RouterStub, spawn: Spawn) -> None:
    """Installed requests go on; those on their way are ended by the decode node, and its memory is free."""
    p0, _ = spawn("p0", "d0")
    going = router.generate("p0", job(0), "d0")
    started(router, "d0", going)
    many = [router.generate("p0", job(rid, 2000, SamplingParams(max_tokens=400)), "d0") for rid in range(1, 30)]
    router.until(lambda: bool(router.book.by_node["p0", many[0]]), "the first of many")
    p0.kill()
    router.abort("d0", going)
    router.until(lambda: any(peer.startswith("p0@") for peer in router.closed), "the router sees it at once")
    local = router.generate("d0", short(50))
    router.wait_ends([local])
    assert router.book.streams[local] == expected(short(50))
    for key in many:
        for end in router.book.ends[key]:
            assert end.reason in ("stop", "length") or end.error_code == "peer_unreachable"
    router.wait_at_rest("d0")


def test_a_frozen_prefill_node_counts_as_dead(router: RouterStub, spawn: Spawn) -> None:
    p0, _ = spawn("p0", "d0", flags=FAST_SILENCE)
    many = [router.generate("p0", job(rid, 3000, SamplingParams(max_tokens=4)), "d0") for rid in range(20)]
    router.until(lambda: any(router.book.by_node["p0", key] for key in many), "it computes")
    p0.freeze()
    local = router.generate("d0", short(50))
    router.wait_ends([local])
    router.wait_at_rest("d0")
    p0.thaw()
    assert router.book.streams[local] == expected(short(50))


def test_sigterm_drains(router: RouterStub, spawn: Spawn) -> None:
    """What runs is finished, new requests are turned away, then Goodbye and exit code 0."""
    p0, d0 = spawn("p0", "d0", flags=("--drain-s", str(HANG_GUARD_S)))
    running = job(0, sampling=SamplingParams(max_tokens=800, temperature=0.8))
    key = router.generate("p0", running, "d0")
    started(router, "d0", key)
    d0.process.terminate()
    router.until(lambda: is_draining(router, "d0"), "it says that it drains")
    late = router.generate("d0", short(1))
    router.wait_ends([key, late])
    assert router.book.streams[key] == expected(running)
    assert router.book.end(late).error_code == "node_draining"
    router.until(lambda: "d0" in router.book.goodbyes, "Goodbye")
    assert d0.process.wait(HANG_GUARD_S) == 0, d0.log
    router.wait_at_rest("p0")
    assert p0.terminate() == 0


def test_a_drain_has_an_end(router: RouterStub, spawn: Spawn) -> None:
    """By message the node only turns new requests away; by signal it gives up the rest after its time."""
    (d0,) = spawn("d0", flags=("--drain-s", "0"))
    key = router.generate("d0", job(0))
    started(router, "d0", key)
    router.drain("d0")
    router.until(lambda: is_draining(router, "d0"), "it says that it drains")
    assert d0.process.poll() is None and not router.book.ends[key]
    d0.process.terminate()
    router.wait_ends([key])
    assert router.book.end(key).error_code == "node_draining"
    assert d0.process.wait(HANG_GUARD_S) == 0, d0.log
    assert "add up" not in d0.log


def test_a_killed_router_leaves_no_work_behind(router: RouterStub, spawn: Spawn) -> None:
    spawn("p0", "d0")
    key = router.generate("p0", job(0), "d0")
    started(router, "d0", key)
    endpoint = router.endpoint
    router.close()
    second = RouterStub(epoch=2, endpoint=endpoint)
    try:
        second.until(lambda: {"p0", "d0"} <= set(second.hellos), "the nodes dial again")
        for node_id in ("p0", "d0"):
            second.wait_at_rest(node_id)
        fresh = second.generate("p0", short(1), "d0")
        second.wait_ends([fresh])
        assert second.book.streams[fresh] == expected(short(1))
    finally:
        second.close()


def test_nonsense_and_another_life_of_the_router(router: RouterStub, spawn: Spawn) -> None:
    _, d0 = spawn("p0", "d0")
    send_nonsense(router)
    assert d0.process.poll() is None
    change_epoch(router)


def send_nonsense(router: RouterStub) -> None:
    """On both sockets: dropped and counted, and the next request is served."""
    peer = router.socket._routes[router.peers["d0"]]
    good = encode(Welcome("test", 1, 1))
    for bad in (b"", b"\xc1", good[:-2], b"\x81\xa1t\xa4Nope", encode(Welcome("test", 1, 1)) + b"x", b"\x91" * 5000):
        router.socket.socket.send_multipart([peer, bad])
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.setsockopt(zmq.METADATA, b"X-Peer:who?")
    stranger.connect(router.hellos["d0"].node_endpoint)
    stranger.send_multipart([good])
    router.until(lambda: num_wire_errors(router, "d0") >= 7, "all counted")
    stranger.close()
    context.term()
    fine = router.generate("p0", short(1), "d0")
    router.wait_ends([fine])
    assert router.book.streams[fine] == expected(short(1))


def change_epoch(router: RouterStub) -> None:
    """Requests of the router's former life are aborted, late messages of it dropped."""
    key = router.generate("p0", job(0), "d0")
    started(router, "d0", key)
    for node_id in ("p0", "d0"):
        peer = router.peers[node_id]
        router.socket.send(peer, welcome_for(peer, Welcome("test", 2, 1), time.monotonic()))
    for node_id in ("p0", "d0"):
        router.wait_at_rest(node_id)
    assert not router.book.ends[key]
    stale = router.generate("p0", short(11), "d0")
    router.epoch = 2
    fresh = router.generate("p0", short(12), "d0")
    router.wait_ends([fresh])
    assert router.book.streams[fresh] == expected(short(12)) and not router.book.streams[stale]


def test_aborts_at_random_leave_nothing(router: RouterStub, spawn: Spawn) -> None:
    nodes = spawn("p0", "d0", flags=("--kv-bytes", "512KiB", "--max-running", "8"))
    rng = random.Random(5)
    jobs = [one for one in draw_jobs(rng, 60)]
    keys = []
    aborted = set()
    for one in jobs:
        where = rng.choice(["p0", "p0", "p0", "d0"])
        keys.append(router.generate(where, one, "d0" if where == "p0" else "", n=rng.choice([1, 1, 2])))
        router.pump(0.002)
        if rng.random() < 0.5:
            victim = rng.choice(keys)
            aborted.add(victim)
            for node_id in ("p0", "d0"):
                router.abort(node_id, victim)
    router.wait_ends([key for key in keys if key not in aborted])
    for node in nodes:
        router.wait_at_rest(node.node_id)
        assert node.terminate() == 0
        assert "add up" not in node.log, node.log
    for one, key in zip(jobs, keys, strict=True):
        got = router.book.streams[key]
        assert got == expected(one)[: len(got)]
        assert key in aborted or got == expected(one)
        if key not in aborted and router.book.streams[sibling(key, 1)]:
            assert router.book.streams[sibling(key, 1)] == expected(one, 1)
