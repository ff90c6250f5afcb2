"""What happened, in order: the timeline a failing seed is explained with. Lines are written only when asked for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from shared.wire.messages import Heartbeat, Message, Tokens


@dataclass(frozen=True, slots=True)
class Entry:
    time: float
    who: str
    what: str
    message: Message | None = None

    def line(self) -> str:
        shown = "" if self.message is None else f" {describe(self.message)}"
        return f"{self.time:10.4f}  {self.who:<18} {self.what}{shown}"


@dataclass
class Trace:
    entries: list[Entry] = field(default_factory=list)

    def note(self, time: float, who: str, what: str, message: Message | None = None) -> None:
        self.entries.append(Entry(time, who, what, message))

    def lines(self, word: str = "") -> list[str]:
        """All but heartbeats, or those that speak of `word` (a request's name); faults always."""
        lines = [entry.line() for entry in self.entries if not isinstance(entry.message, Heartbeat)]
        return [line for line in lines if not word or word in line or "FAULT" in line]

    def digest(self) -> str:
        """Equal for two runs that did the same at the same times."""
        return hashlib.sha256("\n".join(entry.line() for entry in self.entries).encode()).hexdigest()[:16]


def describe(message: Message) -> str:
    """One line per message: kind, keys, and the few numbers that matter."""
    kind = type(message).__name__
    if isinstance(message, Tokens):
        runs = [f"{short(run.key)}@{run.first_pos}+{len(run.ids)}" for run in message.runs]
        ends = [
            f"{short(end.key)}={end.reason}{'/' + end.error_code if end.error_code else ''}" for end in message.ends
        ]
        return f"{kind} {' '.join(runs + ends)}"
    key = getattr(message, "key", None)
    names = ("lease", "cached_prefix_len", "first_page", "committed", "reason", "all_sequences", "decode_node", "epoch")
    found = [f"{name}={getattr(message, name)}" for name in names if hasattr(message, name)]
    pages = [f"pages={len(message.pages)}"] if hasattr(message, "pages") else []
    return " ".join([kind, *([short(key)] if key is not None else []), *found, *pages])


def short(key: object) -> str:
    """router/rid#attempt.sequence"""
    return f"{key.router_id}/{key.rid}#{key.attempt}.{key.seq_index}"  # type: ignore[attr-defined]
