"""Count the prompt tokens that a node with a crowded prefix cache computes, for agents and for people who chat.

    python -m benchmarks.clients.agent_caches [--agents 20] [--chats 1.0] [--pages 4000] [--seconds 300] [--seeds 1,2,3]
                                      [--plain]

Agents are those of `baton load --agents`; people begin `--chats` chats per second and return after 45 s in the mean. A
virtual clock moves, and one node has the real prefix cache and page allocator, but no model: a prompt token takes
`--token-ms`, one prompt after another, and answer tokens take 20 ms each. The orders:

    lru      the longest unused first
    kept     the order of nodes: router/requests/returns.py measures, and shared/kv/leaf_order.py keeps
    odds     what is least likely to be used in the next moment: it knows all statistics of its clients, as the numbers
             below, but no future; no order without it can do much better
    over     what nobody returns to, then the longest unused: it knows who returns, and not when
    known    what is used last, or never again: it knows all returns (Belady)

With `--plain` the agents declare no tools, so an answer does not show whether it ends in a call.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.report import parser_with_json, report
from deploy.tools.traffic.options import AGENTS
from deploy.tools.traffic.workloads.lengths import parse_lengths, parse_pauses
from deploy.tools.traffic.workloads.workload import WORDS, Session, Synthetic
from router.requests.answered import Answered, AnswerKind
from router.requests.returns import EndedAnswer, Returns, page_near_end
from shared.core.page_identity import identities
from shared.kv.cached_page import CachedPage
from shared.kv.leaf_order import GONE, SPENT, LeafOrder
from shared.kv.pages import PageAllocator, PageIds
from shared.kv.prefix_cache import Lock, PrefixCache
from shared.wire.messages import Key

PAGE = 16
ANSWER_TOKEN_S = 0.02
IDS = {word: number for number, word in enumerate(WORDS, 10)}
BEGIN, USER, ANSWER = 1, 2, 3  # tokens
NEVER = math.inf
KEY = Key("bench", 1, "r", 0, 0)
CHAT_S, MOST_TURNS = 45.0, 5  # of chats: the mean until the return, and the most turns
TOOL_S = 0.5, 30.0  # between these agents return, log-uniformly


def lengths(text: str) -> Any:
    return parse_lengths("", text)


def agents(seed: int) -> Iterator[Session]:
    usual = AGENTS
    prompt, output, turns = map(lengths, (usual.prompt_tokens, usual.output_tokens, usual.turns))
    think, fan_out = parse_pauses("", usual.think), lengths(usual.fan_out)
    return Synthetic(prompt, output, turns, think, usual.prefix_tokens, usual.prefix_groups, fan_out).sessions(seed)


def chats(seed: int) -> Iterator[Session]:
    prompt, output, turns = map(lengths, ("mix:30=3,200=2,1500=1", "50-300", f"1-{MOST_TURNS}"))
    return Synthetic(prompt, output, turns, parse_pauses("", f"{CHAT_S:g}"), 200, 4).sessions(seed)


class KnownOrder(LeafOrder):
    """Evict what returns last. `next_use`: of each page, as far as somebody returns to it."""

    def __init__(self, nodes: dict[int, CachedPage]) -> None:
        super().__init__(nodes)
        self.next_use: dict[CachedPage, float] = {}

    def push(self, node: CachedPage) -> None:
        node.used = -round(1000 * min(self.next_use.get(node, NEVER), 1e9))
        super().push(node)

    def returns(self, leaf: CachedPage, at: float) -> None:
        page: CachedPage | None = leaf
        while page is not None:
            before = self.next_use.get(page, NEVER)
            self.next_use[page] = min(before, at) if before > self.now else at
            page = page.parent


class OverOrder(KnownOrder):
    """Evict what nobody returns to, then the longest unused: this order knows who returns, and not when."""

    def push(self, node: CachedPage) -> None:
        if self.next_use.get(node, NEVER) == NEVER:
            node.used = SPENT
        LeafOrder.push(self, node)


@dataclass(eq=False)
class Chance:
    """What statistics say of one return. `share`: of such conversations, those that return."""

    kind: str
    at: float
    share: float
    is_open: bool = True
    is_due: bool = False  # it has come, and waits

    def rate(self, now: float) -> float:
        """Return the chance per second that it comes now, after it has not come until now."""
        if not self.is_open:
            return 0.0
        if self.is_due:
            return NEVER
        age = now - self.at
        if self.kind == "agents":
            age = min(max(age, TOOL_S[0]), 0.999 * TOOL_S[1])
            return self.share / (age * math.log(TOOL_S[1] / age))
        coming = self.share * math.exp(-age / CHAT_S)
        return coming / (coming + 1 - self.share) / CHAT_S


class OddsOrder(LeafOrder):
    """Evict what is least likely to be used in the next moment."""

    def __init__(self, nodes: dict[int, CachedPage]) -> None:
        super().__init__(nodes)
        self._chances: dict[CachedPage, list[Chance]] = {}
        self._open: dict[CachedPage, int] = {}  # leaf -> stamp

    def expect(self, leaf: CachedPage, chance: Chance) -> None:
        page: CachedPage | None = leaf
        while page is not None and page.parent is not None:
            self._chances[page] = [one for one in self._chances.get(page, ()) if one.is_open] + [chance]
            page = page.parent

    def push(self, node: CachedPage) -> None:
        self._open[node] = node.stamp

    def evictable(self) -> set[CachedPage]:
        return {node for node, stamp in self._open.items() if node.refs == 0 and node.stamp == stamp}

    def pop(self) -> CachedPage | None:
        found = self.evictable()
        self._open = {node: node.stamp for node in found}
        if not found:
            return None
        node = min(found, key=lambda leaf: (self._rate(leaf), leaf.used, leaf.page))
        del self._open[node]
        self._chances.pop(node, None)
        node.stamp = GONE
        return node

    def _rate(self, node: CachedPage) -> float:
        return sum(chance.rate(self.now) for chance in self._chances.get(node, ()))


ORDERS: dict[str, type[LeafOrder]] = {
    "lru": LeafOrder,
    "kept": LeafOrder,
    "odds": OddsOrder,
    "over": OverOrder,
    "known": KnownOrder,
}


@dataclass(eq=False)
class Talk:
    kind: str
    session: Session
    history: list[int]
    turn: int = 0
    num_open: int = 0
    chance: Chance | None = None


@dataclass(eq=False)
class Asked:
    """`is_main`: the talk goes on with this one's answer."""

    talk: Talk
    prompt: list[int]
    answer: list[int]
    is_main: bool
    lock: Lock | None = None
    pages: PageIds = field(default_factory=lambda: np.zeros(0, np.int32))


class Study:
    """One node with one cache, and its clients."""

    def __init__(self, order: str, seed: int, args: argparse.Namespace) -> None:
        self.now, self._order, self._args = 0.0, order, args
        self._cache, self._allocator = PrefixCache(PAGE), PageAllocator(args.pages + 1)
        self._cache.leaves = ORDERS[order](self._cache._nodes)
        self._cache.leaves.num_total = args.pages
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._waiting: deque[Asked] = deque()
        self._free_at = 0.0  # when the prompts that wait are computed
        self._rng = random.Random(f"{seed} answers")
        self.computed: Counter[str] = Counter()
        self.prompt: Counter[str] = Counter()
        self._sources = {"agents": agents(seed), "chats": chats(seed + 1)}
        for _ in range(args.agents):
            self._at(0.0, self._begin, "agents")
        arrivals, at = random.Random(f"{seed} arrivals"), 0.0
        while args.chats and (at := at + arrivals.expovariate(args.chats)) < args.seconds:
            self._at(at, self._begin, "chats")
        self._returns = Returns()

    def _at(self, when: float, do: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), do, args))

    def run(self) -> None:
        while self._events:
            self.now, _, do, args = heapq.heappop(self._events)
            self._cache.leaves.now = self.now
            do(*args)

    def _begin(self, kind: str) -> None:
        if self.now < self._args.seconds:
            session = next(self._sources[kind])
            opening = [IDS[word] for _, text in session.opening for word in text.split()]
            self._ask(Talk(kind, session, [BEGIN, *opening]))

    def _ask(self, talk: Talk) -> None:
        turn = talk.session.turns[talk.turn]
        talk.num_open = len(turn.texts)
        if talk.chance is not None:
            talk.chance.is_due = True
        for index, text in enumerate(turn.texts):
            prompt = [*talk.history, USER, *(IDS[word] for word in text.split()), ANSWER]
            answer = [self._rng.randrange(1 << 20, 1 << 40) for _ in range(turn.max_tokens)]
            self._returns.came(names_of(np.asarray(prompt, np.int64)), self.now)
            self._waiting.append(Asked(talk, prompt, answer, is_main=not index))
        self._start_next()

    def _start_next(self) -> None:
        while self._waiting and self._start(self._waiting[0]):
            self._waiting.popleft()

    def _start(self, asked: Asked) -> bool:
        cache, keys = self._cache, np.asarray(asked.prompt, np.int64)
        found = cache.find(keys, len(keys) - 1)
        lacking = -(-(len(asked.prompt) + len(asked.answer)) // PAGE) - len(found.pages)
        if lacking > self._allocator.num_free + cache.num_evictable - found.num_evictable:
            return False
        match = cache.lock(found, "")
        self._allocator.free(cache.evict(max(0, lacking - self._allocator.num_free)))
        fresh = self._allocator.alloc(lacking)
        assert fresh is not None
        asked.pages = np.concatenate([match.pages, fresh])
        if asked.talk.chance is not None:
            asked.talk.chance.is_open = False
        self._offer(asked, keys, match.lock)
        num_computed = len(keys) - match.num_tokens
        self.computed[asked.talk.kind] += num_computed
        self.prompt[asked.talk.kind] += len(keys)
        self._free_at = max(self.now, self._free_at) + num_computed * self._args.token_ms / 1000
        self._at(self._free_at + len(asked.answer) * ANSWER_TOKEN_S, self._end, asked)
        return True

    def _offer(self, asked: Asked, keys: Any, lock: Lock) -> None:
        """Cache the full pages; pages that the cache has already are freed when the request ends."""
        asked.lock, _ = self._cache.insert(keys, asked.pages[: len(keys) // PAGE], lock)

    def _end(self, asked: Asked) -> None:
        talk, cache = asked.talk, self._cache
        assert asked.lock is not None
        whole = [*asked.prompt, *asked.answer]
        self._offer(asked, np.asarray(whole[:-1], np.int64), asked.lock)
        self._tell(asked, asked.lock)
        cache.unlock(asked.lock)
        self._allocator.free(np.asarray([page for page in asked.pages.tolist() if page not in cache._nodes], np.int32))
        self._expect(asked, asked.lock)
        talk.num_open -= 1
        if asked.is_main:
            talk.history = whole
        if not talk.num_open:
            self._go_on(talk)
        self._start_next()

    def _go_on(self, talk: Talk) -> None:
        talk.turn += 1
        if talk.turn < len(talk.session.turns):
            self._at(self.now + talk.session.turns[talk.turn].think_s, self._ask, talk)
        elif talk.kind == "agents":
            self._begin(talk.kind)

    def _tell(self, asked: Asked, lock: Lock) -> None:
        """Tell the orders that know something, while the page is locked."""
        turns, number = asked.talk.session.turns, asked.talk.turn + 1
        leaves = self._cache.leaves
        if isinstance(leaves, KnownOrder) and lock.node is not None:
            returns = asked.is_main and number < len(turns)
            leaves.returns(lock.node, self.now + turns[number].think_s if returns else NEVER)
        if isinstance(leaves, OddsOrder) and lock.node is not None and asked.is_main:
            asked.talk.chance = Chance(asked.talk.kind, self.now, self._share(asked.talk))
            leaves.expect(lock.node, asked.talk.chance)

    @staticmethod
    def _share(talk: Talk) -> float:
        """Return the share that returns: an agent's answer shows whether it ends in a call, a chat has 1 to 5 turns."""
        if talk.kind == "agents":
            return float(talk.turn + 1 < len(talk.session.turns))
        return 1 - 1 / (MOST_TURNS - talk.turn)

    def _expect(self, asked: Asked, lock: Lock) -> None:
        """Do what the router and the node do when an answer has ended."""
        if self._order != "kept":
            return
        rid = str(next(self._numbers))
        names = names_of(np.asarray(asked.prompt, np.int64))
        self._returns.ended(rid, EndedAnswer(KEY, ("node",), page_near_end(names), 0, self.now), names)
        for _, word in self._returns.over(Answered(rid, self._kind(asked))):
            if word.keep_ms:
                self._cache.keep(lock, self.now + word.keep_ms / 1000, 0, len(asked.prompt) // PAGE)
            else:
                self._cache.spend(lock)

    def _kind(self, asked: Asked) -> AnswerKind:
        talk = asked.talk
        if talk.kind == "chats" or self._args.plain:
            return AnswerKind.PLAIN
        calls = asked.is_main and talk.turn + 1 < len(talk.session.turns)
        return AnswerKind.CALLS if calls else AnswerKind.AFTER_TOOLS

    def row(self) -> dict[str, Any]:
        return {
            "order": self._order,
            "computed": dict(self.computed),
            "prompt": dict(self.prompt),
            "saved": self._cache.leaves.num_saved * PAGE,
        }


def names_of(keys: Any) -> list[bytes]:
    """Return the names of all full pages, last first."""
    return list(identities(keys[: len(keys) // PAGE * PAGE].tobytes(), PAGE))[::-1]


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--agents", type=int, default=20)
    parser.add_argument("--chats", type=float, default=1.0, help="chats that begin per second")
    parser.add_argument("--pages", type=int, default=4000, help=f"of {PAGE} tokens, in the node's pool")
    parser.add_argument("--seconds", type=float, default=300.0, help="in which sessions begin")
    parser.add_argument("--token-ms", type=float, default=0.05)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--plain", action="store_true", help="agents that declare no tools")
    args = parser.parse_args()
    rows = []
    for seed, order in itertools.product(map(int, args.seeds.split(",")), args.orders.split(",")):
        study = Study(order, seed, args)
        study.run()
        rows.append({"seed": seed, **study.row()})
        print(rows[-1], file=sys.stderr, flush=True)
    report({"rows": rows}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
