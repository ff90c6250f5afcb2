"""One request's history as the client saw it. Pure.

All times are in seconds from the start of the run.
  `due`      When the request should have been sent.
  `sent`     When the client began to send or to connect.
  `at[i]`    When chunk i with tokens reached this machine. The client handled this chunk `late[i]` seconds later.
  `end`      When the answer was over.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

NOT_YET = math.nan
UNFINISHED = "still open at the end of the run"


@dataclass(slots=True)
class RequestRecord:
    """What a run keeps of one request. It has many fields because each is a measurement of its own."""

    number: int
    session: int
    turn: int
    due: float
    max_tokens: int
    probe: int | None = None  # index of the golden answer that the answer must equal
    sent: float = NOT_YET
    end: float = NOT_YET
    status: int = 0  # HTTP status; 0 until it comes
    error: str = ""
    hung_up: bool = False
    num_resumed: int = 0
    finish_reason: str = ""
    at: array[float] = field(default_factory=lambda: array("d"))
    late: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("l"))
    prompt_tokens: int = 0  # by the server's count; 0 if unknown
    cached_tokens: int | None = None  # of the prompt; None if the server does not tell
    reported_tokens: int = 0
    ids: list[int] = field(default_factory=list)  # the answer's token ids; empty if the server shows none
    pieces: list[str] = field(default_factory=list)
    arguments: str = ""  # of the first call of a tool

    def token(self, at: float, late: float, count: int) -> None:
        self.at.append(at)
        self.late.append(late)
        self.counts.append(count)

    @property
    def is_call(self) -> bool:
        return self.finish_reason == "tool_calls" and bool(self.arguments)

    @property
    def text(self) -> str:
        return self.arguments if self.is_call else "".join(self.pieces)

    @property
    def is_whole(self) -> bool:
        return not self.error and not self.hung_up and len(self.at) > 0 and not math.isnan(self.end)

    @property
    def num_tokens(self) -> int:
        """The server's count of tokens if known, since a chunk may hold several."""
        return self.reported_tokens or sum(self.counts)

    @property
    def send_lag(self) -> float:
        return self.sent - self.due

    @property
    def ttft(self) -> float:
        """The seconds from sending to the first token; NaN if none came."""
        return self.at[0] - self.sent if self.at else math.nan

    @property
    def e2e(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float:
        """The mean wait for a token after the first; 0 for an answer of one token."""
        return (self.at[-1] - self.at[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.at, self.at[1:], strict=False)]

    def waits(self) -> list[float]:
        return [*self.gaps(), self.end - self.at[-1]] if self.at and not math.isnan(self.end) else self.gaps()

    def token_gaps(self) -> list[tuple[float, int]]:
        """Return (wait per token, tokens) for each chunk after the first."""
        return [(gap / count, count) for gap, count in zip(self.gaps(), self.counts[1:], strict=True)]
