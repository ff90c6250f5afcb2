"""Decode compressed bodies on threads, within the limit on a body and the budget of all bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from router.http.body_budget import BodyHold
from router.http.codings import decode
from router.http.work_threads import WorkThreads
from shared.core.errors import BodyTooLarge

NUM_THREADS = 2  # also the number of decoders, which need up to 8 MiB each


class BodyDecoding:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self._threads = WorkThreads(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="decode"), NUM_THREADS)
        self._turns = asyncio.Semaphore(NUM_THREADS)

    async def decoded(self, data: bytes, codings: Iterable[str], limit: int, hold: BodyHold) -> bytes:
        """Return the contents, whose bytes `hold` then counts instead of `data`'s.

        `codings`: the last one applied comes first. Raise BodyTooLarge, BodiesFull or InvalidRequest.
        """
        async with self._turns:
            for coding in codings:
                data = await self._decoded_once(data, coding, limit, hold)
        return data

    async def _decoded_once(self, data: bytes, coding: str, limit: int, hold: BodyHold) -> bytes:
        parts: list[bytes] = []
        size, num_bytes = 0, len(data)
        pieces = decode(coding, data)
        del data
        while (piece := await self._threads.run(partial(next, pieces, None), hold)) is not None:
            size += len(piece)
            if size > limit:
                raise BodyTooLarge(f"the decoded request body is above the limit of {limit} bytes")
            hold.take(len(piece))
            parts.append(piece)
        hold.give_back(num_bytes)
        return b"".join(parts)
