"""What happened to one request, as the client saw it. Pure: times are given, never read.

    due      when it should have been sent          (all in seconds from the start of the run)
    sent     when the client began to send it; ahead of the connection where a new one was needed
    at[i]    when chunk i with tokens reached this machine, late[i] seconds before the client handled it
    end      when the answer was over

One chunk may bring several tokens: they share the wait since the chunk before, as they do in the server's metrics.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

NOT_YET = math.nan
UNFINISHED = "not over when the run was"  # the error of what was open then


@dataclass(slots=True)
class RequestRecord:
    number: int
    session: int
    turn: int
    due: float
    max_tokens: int
    probe: int | None = None  # which golden answer it must equal
    sent: float = NOT_YET
    end: float = NOT_YET
    status: int = 0  # HTTP, 0 while none came
    error: str = ""
    hung_up: bool = False  # we did, on purpose
    num_resumed: int = 0  # how often it went on after its connection broke
    finish_reason: str = ""
    at: array[float] = field(default_factory=lambda: array("d"))
    late: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("l"))
    prompt_tokens: int = 0  # the server's word, 0 where it gave none
    cached_tokens: int = 0
    reported_tokens: int = 0
    ids: list[int] = field(default_factory=list)  # where the server shows them
    pieces: list[str] = field(default_factory=list)

    def token(self, at: float, late: float, count: int) -> None:
        self.at.append(at)
        self.late.append(late)
        self.counts.append(count)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_whole(self) -> bool:
        """It came, to its own end."""
        return not self.error and not self.hung_up and len(self.at) > 0 and not math.isnan(self.end)

    @property
    def num_tokens(self) -> int:
        """The server's count where it gives one: not every chunk is one token everywhere."""
        return self.reported_tokens or sum(self.counts)

    @property
    def send_lag(self) -> float:
        return self.sent - self.due

    @property
    def ttft(self) -> float:
        """NaN without a token."""
        return self.at[0] - self.sent if self.at else math.nan

    @property
    def e2e(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float:
        """The mean wait for a token after the first; 0 for an answer of one token."""
        return (self.at[-1] - self.at[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    def gaps(self) -> list[float]:
        """Between chunks: what a reader waits."""
        return [later - earlier for earlier, later in zip(self.at, self.at[1:], strict=False)]

    def waits(self) -> list[float]:
        """The gaps, and what passed from the last chunk until the answer was over: it may stand still there."""
        return [*self.gaps(), self.end - self.at[-1]] if self.at and not math.isnan(self.end) else self.gaps()

    def token_gaps(self) -> list[tuple[float, int]]:
        """(wait per token, tokens) of each chunk after the first."""
        return [(gap / count, count) for gap, count in zip(self.gaps(), self.counts[1:], strict=True)]
