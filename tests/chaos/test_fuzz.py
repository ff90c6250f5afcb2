"""A few thousand messages of the fuzzing node; `make fuzz` is the long run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.fuzz_cluster import fuzz_cluster

NUM_MESSAGES = 5000
FEWEST_STREAMS = 10


def test_a_node_that_says_anything_harms_nobody(tmp_path: Path) -> None:
    with fuzz_cluster(tmp_path) as cluster:
        fuzzer = cluster.fuzz(seed=1)
        asyncio.run(
            cluster.serve(fuzzer, lambda: fuzzer.sent < NUM_MESSAGES or sum(cluster.outcomes.values()) < FEWEST_STREAMS)
        )
        fuzzer.stop()
        assert cluster.outcomes["whole"] >= FEWEST_STREAMS // 2, cluster.outcomes
        cluster.check_whole()
        after = cluster.outcomes["whole"]
        asyncio.run(cluster.serve(fuzzer, lambda: cluster.outcomes["whole"] < after + 3))
