"""Start the reference server. Two of them with one secret continue each other's streams."""

from __future__ import annotations

import argparse
import asyncio

from stream_conformance.reference import Reference


async def serve(reference: Reference, port: int) -> None:
    async with await asyncio.start_server(reference.serve, "127.0.0.1", port) as server:
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="stream-reference", description=__doc__)
    parser.add_argument("--port", type=int, default=8009)
    parser.add_argument("--secret", default="", help="shared by servers that continue each other's streams")
    parser.add_argument("--key", default="", help="the API key that clients need")
    parser.add_argument("--pace-s", type=float, default=0.01, help="between two events")
    args = parser.parse_args()
    asyncio.run(serve(Reference(args.secret, args.key, args.pace_s), args.port))


if __name__ == "__main__":
    main()
