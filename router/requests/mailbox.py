"""Pass nodes' news to the task that answers one HTTP request.

A token needs no task, timer or future of its own: one future per wait wakes the reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.requests.answered import Answered
from router.requests.effects import News
from shared.wire.messages import Fingerprint


class Mailbox:
    """The news of one HTTP request, bounded by its prompt and max_tokens. Owned by the event loop's thread."""

    __slots__ = ("_news", "_waiter", "answer_id", "answered", "begun", "nodes", "rids")

    def __init__(self, answer_id: str = "") -> None:
        self.answer_id = answer_id  # the answer's id, as the client knows it
        self.rids: Sequence[str] = ()
        self.begun: set[str] = set()  # rids whose prompts a node has begun
        self.nodes: dict[str, list[Fingerprint]] = {}  # by rid: of each attempt's nodes
        self.answered: Sequence[Answered] = ()  # once the client has the whole answer
        self._news: list[News] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, news: News) -> None:
        self._news.append(news)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take_news(self) -> list[News]:
        """Return all news since the last call. Wait if there is none."""
        if not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news, self._news = self._news, []
        return news
