"""What the dispatcher wants done: messages to nodes, news for clients, alarms for the log. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from shared.core.errors import BatonError
from shared.wire.messages import Message, SequenceEnd, TokenLogprob


class Update(msgspec.Struct, frozen=True):
    """New tokens of one sequence, and its end when it has come. One is made for each token, so its kind is the one that
    is made fastest."""

    rid: str
    seq_index: int
    ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    end: SequenceEnd | None


class Scored(msgspec.Struct, frozen=True):
    """How likely the next tokens of a prompt were, from its second on; before the first Update."""

    rid: str
    logprobs: Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True)
class Failure:
    """The whole rid has failed; nothing more comes for it."""

    rid: str
    error: BatonError


News = Update | Scored | Failure


@dataclass(frozen=True, slots=True)
class Alarm:
    kind: str
    subject: str


@dataclass(slots=True)
class Effects:
    now: float  # when it all happened
    sends: list[tuple[str, Message]] = field(default_factory=list)  # (peer, message)
    news: list[News] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    num_resumed: int = 0  # requests that were given another attempt
    num_by_cost: int = 0  # requests that begin on their decode node because a hand-off costs more
    picks: list[tuple[str, str]] = field(default_factory=list)  # (role, reason) of each node that a policy picked
    num_moved: int = 0  # requests that went from a decode node without memory to one with room
