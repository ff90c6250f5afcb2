"""Choose the first transport in the list of an Offer to a decode node.

Each transport that both nodes have is tried TRIALS times. Then the fastest is kept. The time counts from a prompt's
last chunk to Installed, because requests wait that long. Every AGAIN_EVERY-th offer tries the next transport again.

    offered: shm, zmq    granted: shm    measured    offered: zmq, shm    granted: zmq    measured ...    shm stays.

A decode node takes the first offered transport that it can use. So it can't use those before the granted one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from shared.observe.log_once import LogOnce

TRIALS = 5
KEPT = 15  # number of newest hand-offs in the median
AGAIN_EVERY = 64
NEAR = 0.9  # another transport is chosen if its time is below this share of the chosen one's
FAILED_S = 60.0  # seconds recorded for a failed hand-off


@dataclass(slots=True)
class Measured:
    """`seconds`: transport -> newest times of hand-offs to one peer. Transports that the peer lacks are removed."""

    seconds: dict[str, deque[float]]
    chosen: str = ""
    why: str = "not measured yet"
    num_offers: int = field(default=0)


class TransportChoice:
    """Owned by the node's loop. `transports`: the likely fastest first. `about`: added to each text of `reasons`."""

    def __init__(self, transports: Sequence[str], log: LogOnce, about: str = "") -> None:
        self._transports = tuple(transports)
        self._log = log
        self._about = about
        self._peers: dict[str, Measured] = {}

    def order(self, peer: str) -> list[str]:
        """Return the transports to offer, the preferred one first."""
        known = self._of(peer)
        known.num_offers += 1
        names = list(known.seconds)
        first = min(names, key=lambda name: min(TRIALS, len(known.seconds[name])), default="")
        if first and len(known.seconds[first]) >= TRIALS:
            turn = known.num_offers // AGAIN_EVERY
            first = names[turn % len(names)] if known.num_offers % AGAIN_EVERY == 0 else known.chosen
        return [name for name in self._transports if name == first] + [name for name in names if name != first]

    def granted(self, peer: str, offered: Sequence[str], transport: str) -> None:
        known = self._of(peer)
        if transport in known.seconds and transport in offered:
            for name in offered[: offered.index(transport)]:
                known.seconds.pop(name, None)
        self._choose(peer, known)

    def measured(self, peer: str, transport: str, seconds: float) -> None:
        known = self._of(peer)
        if transport in known.seconds:
            known.seconds[transport].append(seconds)
            self._choose(peer, known)

    def failed(self, peer: str, transport: str) -> None:
        self.measured(peer, transport, FAILED_S)

    def forget_peer(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def reasons(self) -> dict[str, str]:
        more = f" ({self._about})" if self._about else ""
        said = {peer: f"{known.chosen or 'in turn'}: {known.why}{more}" for peer, known in self._peers.items()}
        return {peer.partition("@")[0]: why for peer, why in said.items()}

    def _of(self, peer: str) -> Measured:
        return self._peers.setdefault(peer, Measured({name: deque(maxlen=KEPT) for name in self._transports}))

    def _choose(self, peer: str, known: Measured) -> None:
        if len(known.seconds) == 1:
            chosen, why = next(iter(known.seconds)), "the only one that both have"
        elif all(len(samples) >= TRIALS for samples in known.seconds.values()):
            times = {name: median(samples) for name, samples in known.seconds.items()}
            fastest = min(times, key=lambda name: times[name])
            chosen = known.chosen or fastest
            chosen = fastest if times[fastest] < NEAR * times.get(chosen, FAILED_S) else chosen
            why = ", ".join(f"{name} {1e3 * times[name]:.1f} ms" for name in times) + " from last chunk to installed"
        else:
            return
        changed = chosen != known.chosen
        known.chosen, known.why = chosen, why
        if changed:
            self._log.info((peer, chosen), "transport chosen", peer=peer, transport=chosen, why=why)
