"""The dispatcher's results, as plain data: messages to nodes, news for clients, alarms for the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from shared.core.errors import BatonError
from shared.wire.messages import Fingerprint, Message, SequenceEnd, TokenLogprob


class Update(msgspec.Struct, frozen=True):
    """New tokens of one sequence, and its end if known. Structs are cheap to make, and each token needs one."""

    rid: str
    seq_index: int
    ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    end: SequenceEnd | None


class ScoredPrompt(msgspec.Struct, frozen=True):
    """Log-probabilities of the next prompt tokens, sent before the first Update. A prompt's first token has none."""

    rid: str
    logprobs: Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True)
class Failure:
    rid: str
    error: BatonError


News = Update | ScoredPrompt | Failure


@dataclass(frozen=True, slots=True)
class Alarm:
    kind: str
    subject: str


@dataclass(slots=True)
class Effects:
    now: float
    sends: list[tuple[str, Message]] = field(default_factory=list)  # (peer, message)
    news: list[News] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    num_resumed: int = 0
    num_by_cost: int = 0  # requests that run on one node, because a hand-off costs more
    picks: list[tuple[str, str]] = field(default_factory=list)  # (role, reason) of each picked node
    sought: list[str] = field(default_factory=list)  # outcomes of searches for cached prefixes
    begun: list[str] = field(default_factory=list)  # rids, see Mailbox
    placed: list[tuple[str, Sequence[Fingerprint]]] = field(default_factory=list)  # rid, of its attempt's nodes
    queue_waits: list[float] = field(default_factory=list)  # seconds that each started request waited
    num_moved: int = 0
