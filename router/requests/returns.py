"""Measure how soon conversations come back, so that nodes keep their pages that long. Sans-IO.

    an answer ends --> it waits for its return, by the name of a page near its prompt's end
    a prompt begins with that page --> it is back
    PATIENCE_S after its end --> it counts, as back or as gone

If answers counted as soon as they were back, the slow ones would be missing. Answers count in groups: by tenant, the
client's session and kind of answer. A group with few answers is judged by its tenant's answers of the kind, and these
by all tenants'.

If a session's prompt does not go on from the session's last answer, the client has edited its history: the pages of
that answer are then useless. An answer whose calls may still be running is spared: other requests of the
session may come from its tools.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from router.requests.answered import Answered, AnswerKind
from shared.wire.messages import Keep, Key

PATIENCE_S = 180.0
LATEST = 64  # answers of a group that count
ENOUGH = 8  # answers from which on a group is judged by itself
MOST_GROUPS, MOST_WAITING = 4096, 1 << 14  # further answers are not followed
MOST_SOUGHT = 1024  # last pages of a prompt that are compared with answers that wait
LIKELY, UNLIKELY = 0.5, 0.05  # shares of a group that come back: to be kept, and to be evicted first
ASSUMED_S = 30.0  # until enough answers with calls were seen
LONGEST_S = 24 * 3600.0  # that a client may ask for

Group = tuple[int | None, str | None, AnswerKind]  # tenant and session; None: all
Gaps = deque[float]  # seconds until the return, of the latest answers; infinity: gone


def page_near_end(names: Sequence[bytes]) -> bytes:
    """Return the name by which a conversation's next prompt is known. `names`: of all pages of its prompt, last first.

    The last page won't do: a template may end a prompt otherwise than it goes on there."""
    return names[min(1, len(names) - 1)]


@dataclass(slots=True, eq=False)
class EndedAnswer:
    """`name`: see `page_near_end`. `peers`: its nodes."""

    key: Key
    peers: tuple[str, ...]
    name: bytes
    tenant: int
    at: float
    begun_at: float = 0.0
    groups: tuple[Group, ...] = ()
    gap: float = math.inf

    @property
    def is_waiting(self) -> bool:
        """Whether tools may still be running."""
        return self.gap == math.inf and self.groups[-1][-1] is AnswerKind.CALLS


class Returns:
    """Owned by the router's loop."""

    def __init__(self) -> None:
        self._gaps: OrderedDict[Group, Gaps] = OrderedDict()  # the group that learned last is last
        # by rid: answers that have ended, but are not yet read to the end, and their prompts' pages
        self._ended: dict[str, tuple[EndedAnswer, Sequence[bytes]]] = {}
        self._last: OrderedDict[tuple[int, str], EndedAnswer] = (
            OrderedDict()
        )  # by tenant and session; the latest is last
        self._waiting: dict[bytes, EndedAnswer] = {}  # by page: not yet back
        self._young: deque[EndedAnswer] = deque()  # not yet counted, the oldest first

    def came(self, names: Sequence[bytes], now: float) -> None:
        """Note a prompt. `names`: of its pages, last first."""
        while self._young and now - self._young[0].at >= PATIENCE_S:
            oldest = self._young.popleft()
            if self._waiting.get(oldest.name) is oldest:
                del self._waiting[oldest.name]
            self._learn(oldest)
        if not self._waiting:
            return
        for name in names[:MOST_SOUGHT]:
            ended = self._waiting.pop(name, None)
            if ended is not None:
                ended.gap = now - ended.at
                return

    def ended(self, rid: str, answer: EndedAnswer, names: Sequence[bytes]) -> None:
        """Note that an answer's last token has come, until `over` or `left`. `names`: of its prompt's pages."""
        self._ended[rid] = answer, names

    def left(self, rid: str) -> None:
        """Forget an answer whose client has left."""
        self._ended.pop(rid, None)

    def over(self, answered: Answered) -> list[tuple[str, Keep]]:
        """Return what to tell which nodes."""
        if answered.rid not in self._ended:
            return []
        ended, names = self._ended.pop(answered.rid)
        kind, tenant = answered.kind, ended.tenant
        of_all: tuple[Group, ...] = (tenant, None, kind), (None, None, kind)
        ended.groups = ((tenant, answered.session, kind), *of_all) if answered.session else of_all
        if len(self._young) < MOST_WAITING:
            self._waiting[ended.name] = ended
            self._young.append(ended)
        told = self._edited(ended, names, answered.session) if answered.names_session else []
        expected_s = self.expected_s(ended.groups)
        if answered.keep_s or expected_s is not None:
            keep_ms = round(1000 * max(min(answered.keep_s, LONGEST_S), expected_s or 0.0))
            told += [(peer, Keep(ended.key, keep_ms)) for peer in ended.peers]
        return told

    def _edited(self, ended: EndedAnswer, names: Sequence[bytes], session: str) -> list[tuple[str, Keep]]:
        """Return what to tell of the session's last answer, if this one does not go on from it."""
        place = ended.tenant, session
        last = self._last.pop(place, None)
        self._last[place] = ended
        if len(self._last) > MOST_GROUPS:
            self._last.popitem(last=False)
        if last is None or last.is_waiting or last.at > ended.begun_at or last.name in names:
            return []
        return [(peer, Keep(last.key, 0)) for peer in last.peers]

    def expected_s(self, groups: Sequence[Group]) -> float | None:
        """Return the time within which a conversation should be back. 0: it will hardly come back. None: unknown.

        `groups`: those of its answer, the smallest first."""
        is_kept = groups[-1][-1] is AnswerKind.CALLS  # if all chats were kept, too, none would be favoured
        gaps = next((gaps for group in groups if len(gaps := self._gaps.get(group, Gaps())) >= ENOUGH), None)
        if gaps is None:
            return ASSUMED_S if is_kept else None
        back = [gap for gap in gaps if gap < math.inf]
        if len(back) <= UNLIKELY * len(gaps):
            return 0.0
        return max(back) if is_kept and len(back) >= LIKELY * len(gaps) else None

    def _learn(self, ended: EndedAnswer) -> None:
        for group in ended.groups:
            self._gaps.setdefault(group, deque(maxlen=LATEST)).append(ended.gap)
            self._gaps.move_to_end(group)
        while len(self._gaps) > MOST_GROUPS:
            self._gaps.popitem(last=False)
