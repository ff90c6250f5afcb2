"""What a prompt adds to its node's load, by which policies choose: the tokens that the node has yet to compute."""

from __future__ import annotations

from router.fleet.registry import RegisteredNode
from shared.wire.codec import key_of
from shared.wire.messages import CacheEvents
from tests.support.worlds.router_rig import FINGERPRINT, RouterRig
from tests.unit.router.fleet.test_prefix_index import PROMPT, names_of

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
