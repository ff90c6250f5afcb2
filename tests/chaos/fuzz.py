"""An allowed node that says anything to everybody, for long, among clients whose streams are checked; memory,
descriptors and threads of router and nodes must stay flat.

    make fuzz                   make fuzz SECONDS=60 SEED=7
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.soak import WARM_UP, Watch
from tests.support.fuzz_cluster import FuzzCluster
from tests.support.fuzz_node import FuzzNode

TELL_S = 30.0


async def fuzz(cluster: FuzzCluster, fuzzer: FuzzNode, seconds: float) -> bool:
    """Whether everything stayed flat; an oracle's failure is raised."""
    until = time.monotonic() + seconds
    watch = Watch(cluster, seconds * WARM_UP)  # type: ignore[arg-type]
    aside = [asyncio.create_task(watch.run()), asyncio.create_task(tell(cluster, fuzzer))]
    try:
        await cluster.serve(fuzzer, lambda: time.monotonic() < until)
    finally:
        for task in aside:
            task.cancel()
    return watch.report()


async def tell(cluster: FuzzCluster, fuzzer: FuzzNode) -> None:
    while True:
        await asyncio.sleep(TELL_S)
        print(f"{fuzzer.sent} messages; streams: {dict(cluster.outcomes)}", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="a fuzzing node with a key")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args(argv)
    print(f"seed {options.seed}, {options.seconds:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        cluster = FuzzCluster(Path(folder))
        try:
            fuzzer = cluster.fuzz(options.seed)
            flat = asyncio.run(fuzz(cluster, fuzzer, options.seconds))
            fuzzer.stop()
            cluster.check_whole()
        finally:
            cluster.close()
    print(f"{fuzzer.sent} messages, heard and done: {dict(fuzzer.counts)}")
    print(f"streams: {dict(cluster.outcomes)}\n{'flat' if flat else 'NOT FLAT'}")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
