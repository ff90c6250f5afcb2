"""One address before several servers, as a load balancer is: each connection goes to the next one that answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit


@contextlib.contextmanager
def front(urls: Sequence[str]) -> Iterator[str]:
    """Its URL."""
    places = [(urlsplit(url).hostname, urlsplit(url).port) for url in urls]
    turns = itertools.count()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        turn = next(turns)
        for attempt in range(len(places)):
            with contextlib.suppress(OSError):
                back, forth = await asyncio.open_connection(*places[(turn + attempt) % len(places)])
                await asyncio.gather(pump(reader, forth), pump(back, writer))
                return
        writer.close()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(carry, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
