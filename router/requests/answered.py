"""What an answer's reader knows about its return."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class AnswerKind(enum.Enum):
    """Conversations of one kind come back alike."""

    CALLS = "calls"  # the client must run tools, and brings their results
    AFTER_TOOLS = "after tools"  # it could have called tools, but did not: often an agent's last answer
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Answered:
    """A request whose client has the whole answer.

    `session`: the client's name for what belongs together. `keep_s`: how long the client asked to keep its prompt
    cached. `names_session`: whether that name is of one session; else, several may have it.
    """

    rid: str
    kind: AnswerKind = AnswerKind.PLAIN
    session: str = ""
    keep_s: float = 0.0
    names_session: bool = False
