"""Router parts without sockets: nodes made of a Hello, messages made by hand, a clock that is a number."""

from __future__ import annotations

from collections.abc import Sequence

from router.dispatch.dispatcher import Dispatcher, DispatchLimits
from router.fleet.registry import RegisteredNode, Registry
from router.policy.placement import Placer
from router.policy.policies import make_policy
from router.requests.effects import Effects, Failure, Update
from router.requests.journal import Journal
from router.requests.new_request import NewRequest
from router.tenants.tenant import EVERYBODY, Tenant
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Fingerprint,
    Generate,
    Hello,
    Key,
    NodeLoad,
    SequenceEnd,
    TokenLogprob,
    TokenRun,
    Tokens,
)
from shared.wire.parts import Taken
from shared.wire.peers import peer_name

FINGERPRINT = Fingerprint(PROTOCOL_VERSION, 1, "m", "w", "int", 16, "paged", "none", "build", "llguidance")


def hello(
    role: str,
    node_id: str,
    epoch: int = 1,
    fingerprint: Fingerprint = FINGERPRINT,
    context: int = 100,
    connection: int = 1,
) -> Hello:
    return Hello(role, node_id, epoch, f"tcp://{node_id}", fingerprint, context, 8, "host", ["zmq"], connection, [])


def load(**rows: int) -> NodeLoad:
    return NodeLoad(10, {"free": 10}, 8, rows, 0, 0, 1, {}, {}, {}, "")


class RouterRig:
    """Dispatcher, journal and registry, with short ways to speak as a node."""

    def __init__(
        self,
        *,
        max_open: int = 100,
        max_queued: int = 100,
        max_attempts: int = 1,
        local_tokens: int = 0,
        resume_wait_s: float = 0.0,
        identity: tuple[str, int] = ("r", 9),
        router_id: str = "",
        policy: str = "least_load",
        silence_s: float = 5.0,
    ) -> None:
        chosen = make_policy(policy)
        self.registry = Registry(silence_s, router_id=router_id, follows_caches=chosen.reads_caches)
        self.journal = Journal(lambda: "n")
        placer = Placer(self.registry, chosen, local_tokens)
        limits = DispatchLimits(max_open, max_attempts, 60.0, resume_wait_s, max_queued)
        self.dispatcher = Dispatcher(identity, self.registry, placer, self.journal, limits)
        self.now = 0.0
        self.opened = Effects(0.0)  # of the last `open`

    def join(self, role: str, node_id: str, epoch: int = 1, fingerprint: Fingerprint = FINGERPRINT) -> RegisteredNode:
        node, _ = self.registry.hello(peer_name(node_id, epoch), hello(role, node_id, epoch, fingerprint), self.now)
        assert node is not None
        return node

    def open(
        self,
        prompt: Sequence[int] = (1, 2, 3),
        n: int = 1,
        max_tokens: int = 5,
        rounds: int = 1,
        sampling: SamplingParams | None = None,
        tenant: Tenant = EVERYBODY,
        within_s: float | None = None,
        rank: int = 0,
    ) -> list[Generate]:
        """The Generates of `rounds` new requests."""
        sampling = sampling or SamplingParams(max_tokens=max_tokens)
        new = NewRequest(list(prompt), n, sampling, seed=7, tenant=tenant, within_s=within_s, rank=rank)
        _, self.opened = self.dispatcher.open([new] * rounds, self.now)
        return generates(self.opened)

    def run(
        self, node: RegisteredNode, key: Key, first: int, ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] = ()
    ) -> Effects:
        run = TokenRun(key, first, list(ids), list(logprobs))
        return self.dispatcher.tokens(Tokens(node.node_id, node.hello.epoch, [run], []), self.now)

    def end(self, node: RegisteredNode, key: Key, count: int, reason: str = "stop", code: str = "") -> Effects:
        end = SequenceEnd(key, reason, count, 0, code, "")
        return self.dispatcher.tokens(Tokens(node.node_id, node.hello.epoch, [], [end]), self.now)

    def beat(self, node: RegisteredNode, *keys: Key, clock_ms: int = 0) -> Effects:
        """A heartbeat. `clock_ms`: of the newest Welcome that the node has read; `keys`: of what it took since."""
        return self.dispatcher.reported(node, Taken(clock_ms, list(keys)), self.now)

    def check_quiet(self) -> None:
        """Nothing is open, and no node seems to have work."""
        assert len(self.journal) == 0 and not self.dispatcher.waiting(self.now)
        assert all(node.ours.open_sequences == 0 and node.ours.open_prompt_tokens == 0 for node in self.registry)
        assert not any(len(node.pages.computing) or len(node.pages.arriving) for node in self.registry)


def generates(effects: Effects) -> list[Generate]:
    return [message for _, message in effects.sends if isinstance(message, Generate)]


def aborts(effects: Effects) -> list[tuple[str, int, bool]]:
    """(peer, sequence, all of them) of every Abort."""
    return [(p, m.key.seq_index, m.all_sequences) for p, m in effects.sends if isinstance(m, Abort)]


def ids_of(effects: Effects) -> list[int]:
    return [i for news in effects.news if isinstance(news, Update) for i in news.ids]


def failures(effects: Effects) -> list[str]:
    return [news.error.code for news in effects.news if isinstance(news, Failure)]


def sibling(key: Key, seq_index: int) -> Key:
    return Key(key.router_id, key.router_epoch, key.rid, key.attempt, seq_index)
