"""What a node tells each router of the others' load, and what a router makes of it."""

from __future__ import annotations

import msgspec
import numpy as np

from router.fleet.registry import RegisteredNode
from router.policy.interface import Wanted
from router.policy.least_load import LeastLoad
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.node.routers.lives import RouterLife
from shared.node.routers.load_shares import LoadShares
from shared.wire.codec import key_of
from shared.wire.messages import CacheEvents, Heartbeat
from shared.wire.parts import OthersLoad
from tests.support.cores.core_rig import CoreKnobs, make_core
from tests.support.worlds.router_rig import FINGERPRINT, RouterRig, load
from tests.support.worlds.two_routers import A, B, Site, job
from tests.unit.router.fleet.test_prefix_index import PROMPT, names_of

MINE, THEIRS, THIRD = RouterLife("mine", 1), RouterLife("theirs", 1), RouterLife("third", 1)


def request(life: RouterLife, number: int, num_tokens: int) -> Request:
    key = RequestKey(life.router_id, life.epoch, str(number), 0, 0)
    return Request(key, NodeAsk(np.asarray([1] * num_tokens, np.int64), SamplingParams(max_tokens=5), 0), number)


def test_a_router_is_told_what_is_not_its_own() -> None:
    core = make_core(CoreKnobs(num_pages=40, max_running=4))
    granted, waiting = request(THEIRS, 1, 40), request(THEIRS, 2, 20)
    core.scheduler.grants.grant(granted, "p")
    core.submit(waiting)
    shares = LoadShares(core, [request(THIRD, 3, 7), request(MINE, 4, 500)])
    assert shares.beside(MINE) == OthersLoad(routers=2, sequences=3, pages=3, waiting_tokens=27)
    assert shares.beside(THEIRS) == OthersLoad(routers=2, sequences=2, pages=0, waiting_tokens=507)
    assert shares.beside(RouterLife("mine", 2)).sequences == 4, "its former life is another router"


def test_each_router_hears_of_the_other_by_heartbeat() -> None:
    site = Site()
    first, second = site.router(A, "a", 1), site.router(B, "b", 1)
    site.node("decode", "d0")
    site.run(1.0)
    for number in range(3):
        first.open(job(number))
    site.run(1.0)
    told = {router.rig.registry.named("d0").report.others for router in (first, second)}  # type: ignore[union-attr]
    assert {(one.routers, one.sequences) for one in told} == {(0, 0), (1, 3)}


def test_others_streams_count_beside_our_own() -> None:
    """The larger of what we sent and what the node reports: five of ours and five of another's counted as five."""
    rig = RouterRig()
    shared, busy = rig.join("decode", "a"), rig.join("decode", "b")
    shared.ours.open_sequences, busy.ours.open_sequences = 5, 6
    rig.registry.heartbeat(Heartbeat("a", 1, load(running=5), False, others=OthersLoad(1, 5, 5, 0)), 0.0)
    assert LeastLoad().pick([shared, busy], Wanted()).node is busy
    x, y = rig.join("prefill", "x"), rig.join("prefill", "y")
    for node, num_tokens in ((x, 100), (y, 150)):
        node.ours.open_prompt_tokens = node.ours.open_prompt_work = num_tokens
    waiting = msgspec.structs.replace(load(), waiting_tokens=100)
    rig.registry.heartbeat(Heartbeat("x", 1, waiting, False, others=OthersLoad(1, 1, 0, 100)), 0.0)
    assert LeastLoad().pick([x, y], Wanted()).node is y


def test_other_routers_are_taken_to_send_as_much_as_we_do() -> None:
    """Until the next heartbeat they fill the same gap, each for itself."""
    rig = RouterRig()
    empty, busy = rig.join("decode", "a"), rig.join("decode", "b")
    others = OthersLoad(2, 0, 0, 0)
    rig.registry.heartbeat(Heartbeat("a", 1, load(), False, others=others), 0.0)
    busy.ours.open_sequences = 5
    picks = []
    for _ in range(3):
        picks.append(LeastLoad().pick([empty, busy], Wanted()).node)
        picks[-1].ours.open_sequences += 1
        picks[-1].ours.sent_sequences += 1
    assert picks == [empty, empty, busy]
    rig.registry.heartbeat(Heartbeat("a", 1, load(running=2), False, others=others), 0.5)
    busy.ours.open_sequences = 5
    assert LeastLoad().pick([empty, busy], Wanted()).node is empty, "what it reports is what they sent"


def test_routers_begin_with_different_nodes() -> None:
    """Each began with the first by name, which got three times its share of whatever came at once."""
    firsts = set()
    for number in range(12):
        rig = RouterRig(router_id=f"router-{number}")
        nodes = [rig.join("decode", name) for name in "abc"]
        firsts.add(LeastLoad().pick(nodes, Wanted()).node.node_id)
    assert firsts == {"a", "b", "c"}


# ---- prompts


NUM_CACHED = 4
NEW_TOKENS = len(PROMPT) - NUM_CACHED * FINGERPRINT.page_size


class CachingRig(RouterRig):
    """Two prefill nodes. `a` has most of a prompt in cache."""

    def __init__(self) -> None:
        super().__init__(policy="prefix_aware")
        self.a, self.b = self.join("prefill", "a"), self.join("prefill", "b")
        self.stores(NUM_CACHED)

    def stores(self, num_pages: int) -> None:
        names = names_of(PROMPT)[:num_pages]
        self.registry.cache_events(self.a.peer, CacheEvents("a", 1, self.a.pages.seq + 1, True, [], names))


def work_of(node: RegisteredNode) -> tuple[int, int]:
    return node.ours.open_prompt_work, node.ours.sent_prompt_work


def test_cached_tokens_are_no_work() -> None:
    rig = CachingRig()
    rig.open(PROMPT)
    assert (work_of(rig.a), work_of(rig.b)) == ((NEW_TOKENS, NEW_TOKENS), (0, 0))
    rig.open(PROMPT[::-1])
    assert work_of(rig.b) == (len(PROMPT), len(PROMPT))


def test_prompts_don_t_leave_a_node_that_has_them() -> None:
    """As many as it computes in the time that the other node takes for one."""
    rig = CachingRig()
    rig.open(PROMPT, rounds=3)
    assert rig.b.ours.dispatched == 0


def test_what_a_prompt_added_is_taken_off() -> None:
    """Though the cache changes meanwhile."""
    rig = CachingRig()
    key = rig.open(PROMPT)[0].key
    rig.stores(0)
    rig.run(rig.a, key, 0, [1])
    assert (rig.a.ours.open_prompt_tokens, rig.a.ours.open_prompt_work) == (0, 0)
    rig.dispatcher.cancel([key_of(key).rid], rig.now)
    rig.check_quiet()


def test_a_report_of_whole_prompts_adds_no_work() -> None:
    """Nodes report waiting prompts whole, and the room for more follows these reports."""
    rig = CachingRig()
    rig.open(PROMPT)
    assert rig.a.ours.open_prompt_tokens == len(PROMPT)
    rig.a.report.waiting_tokens = len(PROMPT)
    assert rig.a.prompt_tokens == NEW_TOKENS
    rig.a.report.waiting_tokens += 100
    assert rig.a.prompt_tokens == NEW_TOKENS + 100
