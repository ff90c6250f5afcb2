"""Name another prefill node from which a prefill node may copy a prompt's cached pages. Sans-IO.

    pages cached at P  | 0 .. 3 |
    at S               | 0 ................ 11 |        S has 8 more: they are copied if that is faster than computing
    of the prompt      | 0 ............................ 17 |

The prefill node asks only this source, and waits at most as long as computing the pages takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from router.fleet.registry import RegisteredNode, Registry
from router.requests.effects import Effects
from router.requests.journal import OpenRequest
from router.requests.tickets import PageSpan, Tickets
from shared.config.settings.endpoints import KEY_MARK, is_loopback, same_host
from shared.core.keys import RequestKey
from shared.wire.messages import Hello, PrefixSource
from shared.wire.ranges import MAX_PULL_TOKENS

LEAST_TOKENS = 64  # copying fewer tokens is not worth the messages
SHORTEST_S = 0.004  # pages computed in less time are not worth the messages
LONGEST_S = 10.0
FIRST_LENDER = 15  # nodes of earlier protocols lend only to their own protocol


class PrefixSources:
    """`assumed_token_s`: see DispatchLimits."""

    def __init__(self, registry: Registry, tickets: Tickets, assumed_token_s: float | None = None) -> None:
        self._registry = registry
        self._tickets = tickets
        self._assumed_token_s = assumed_token_s

    def choose(self, request: OpenRequest, key: RequestKey, effects: Effects) -> PrefixSource | None:
        prefill, pages = request.attempt.prefill, request.pages
        if prefill is None or pages is None or request.asked.wants_scores:
            return None
        page_size = prefill.hello.fingerprint.page_size
        most = min(len(request.asked.prompt_ids) - 1, MAX_PULL_TOKENS) // page_size if page_size else 0
        least = max(1, -(-LEAST_TOKENS // page_size)) if page_size else 1
        names = pages.names(prefill.hello)[-most:] if most else []  # the others name pages alike
        own = num_cached(prefill, names)
        if most - own < least:
            return None
        found = {node: num_cached(node, names) for node in self._others(request, prefill)}
        source = max(found, key=lambda node: (found[node], -node.sequences, node.node_id), default=None)
        if source is None or found[source] - own < least:
            return None
        token_s = self._token_s(prefill, found, effects.now)
        outcome, within_s = self._judge(prefill, token_s, (found[source] - own) * page_size, effects.now)
        effects.sought.append(outcome)
        if outcome != "named":
            return None
        span = PageSpan(found[source] * page_size, names[-found[source]])
        return PrefixSource(
            node=source.node_id,
            epoch=source.hello.epoch,
            endpoint=source.hello.node_endpoint,
            num_pages=found[source],
            last_page=span.last,
            within_ms=int(1000 * min(LONGEST_S, within_s)),
            ticket=self._tickets.issue_pull(request, key, prefill, source, span),
        )

    def _others(self, request: OpenRequest, prefill: RegisteredNode) -> Iterator[RegisteredNode]:
        for node in self._registry:
            is_like = lends(node, prefill) and node.hello.key_lookahead == prefill.hello.key_lookahead
            is_there = node.is_there and node.peer not in request.avoid and can_dial(prefill.hello, node.hello)
            if node is not prefill and is_like and is_there and len(node.pages):
                yield node

    def _token_s(self, prefill: RegisteredNode, others: Iterable[RegisteredNode], now: float) -> float | None:
        """Return the seconds per computed token. If no node was measured, return the assumed value or None."""
        speed = prefill.figures.prompts.speed_among([node.figures.prompts for node in others], now)
        return self._assumed_token_s if speed is None else speed.token_s

    @staticmethod
    def _judge(prefill: RegisteredNode, token_s: float | None, num_tokens: int, now: float) -> tuple[str, float]:
        """Return the outcome's name in the metrics, and how many seconds it takes to compute the pages."""
        if token_s is None:
            return "unmeasured", 0.0
        compute_s = num_tokens * token_s
        if compute_s < SHORTEST_S:
            return "quickly_computed", compute_s
        pull_token_s = prefill.figures.pulls.token_s(now)
        if pull_token_s is not None and pull_token_s >= token_s:
            return "slower", compute_s
        return "named", compute_s


def num_cached(node: RegisteredNode, names: Sequence[bytes]) -> int:
    return node.pages.num_pages(names, has_window=node.hello.has_window)


def lends(source: RegisteredNode, asker: RegisteredNode) -> bool:
    """Return whether the source lends pages to nodes like the asker."""
    lends_to_neighbours = source.hello.fingerprint.protocol >= FIRST_LENDER
    return source.kind is asker.kind or (lends_to_neighbours and source.kind in asker.kind.neighbours)


def can_dial(asker: Hello, source: Hello) -> bool:
    """Return whether the asker can dial the source. Loopback and ipc addresses need both nodes on one machine."""
    scheme, _, rest = source.node_endpoint.partition("://")
    host = rest.partition(KEY_MARK)[0].rpartition(":")[0]
    return same_host(asker.host_id, source.host_id) or (scheme == "tcp" and not is_loopback(host))
