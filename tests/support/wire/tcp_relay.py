"""A relay before servers, on loopback: a load balancer (`front`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.machine.patience import HANG_GUARD_S

Address = tuple[str, int]


@contextlib.contextmanager
def front(urls: Sequence[str]) -> Iterator[str]:
    """Give one URL for several servers. Each connection goes to the next server that answers."""
    parts = [urlsplit(url) for url in urls]
    with tcp_relay([(part.hostname or "", part.port or 80) for part in parts]) as port:
        yield f"http://127.0.0.1:{port}"


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for localhost, signed by itself; return the files of certificate and key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    key, certificate = folder / "tls.key", folder / "tls.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
               "-keyout", str(key), "-out", str(certificate)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@contextlib.contextmanager
def tcp_relay(servers: Sequence[Address], way_s: float = 0.0) -> Iterator[int]:
    """Give the port of a relay that runs in a thread of its own. When it ends, so does every connection.
    `way_s`: how long bytes and ends take each way, as between machines that are far apart."""
    turns = itertools.count()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        turn = next(turns)
        with contextlib.closing(writer):
            for attempt in range(len(servers)):
                with contextlib.suppress(OSError):
                    back, forth = await asyncio.open_connection(*servers[(turn + attempt) % len(servers)])
                    await asyncio.gather(pump(reader, forth, way_s), pump(back, writer, way_s))
                    return

    loop = asyncio.new_event_loop()
    listener = loop.run_until_complete(asyncio.start_server(carry, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(end(listener), loop).result(HANG_GUARD_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(HANG_GUARD_S)
        loop.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way_s: float) -> None:
    """Pass on what comes until one side is gone."""
    with contextlib.closing(writer), contextlib.suppress(OSError):
        while data := await reader.read(65536):
            await asyncio.sleep(way_s)
            writer.write(data)
            await writer.drain()
        await asyncio.sleep(way_s)


async def end(listener: asyncio.Server) -> None:
    """Close the listener and all that it carries."""
    listener.close()
    carried = asyncio.all_tasks() - {asyncio.current_task()}
    for task in carried:
        task.cancel()
    await asyncio.gather(*carried, return_exceptions=True)
    await asyncio.sleep(0)  # a closed transport lets go of its socket in the loop's next round
