"""A short time of each mode of fuzzing; `make fuzz` is the long run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.fuzz.fuzz_cluster import FuzzCluster, fuzz_cluster
from tests.support.fuzz.fuzz_http import HttpOutsider
from tests.support.fuzz.fuzz_memory import MOST_GROWTH, MemoryWatch, growth, held
from tests.support.fuzz.fuzz_node import FuzzNode
from tests.support.fuzz.fuzz_tickets import TicketForger

NUM_MESSAGES = 5000
FEWEST_STREAMS = 10
FEWEST_GENUINE, FEWEST_FORGED = 20, 500
FEWEST_REQUESTS = 200


def serve_some(cluster: FuzzCluster, fuzzer: FuzzNode | None, more: int = 3) -> None:
    """Streams until so many have been whole."""
    after = cluster.outcomes["whole"] + more
    asyncio.run(cluster.serve(fuzzer, lambda: cluster.outcomes["whole"] < after))


def test_a_node_that_says_anything_harms_nobody(tmp_path: Path) -> None:
    with fuzz_cluster(tmp_path) as cluster:
        fuzzer = cluster.fuzz(seed=1)
        asyncio.run(
            cluster.serve(fuzzer, lambda: fuzzer.sent < NUM_MESSAGES or sum(cluster.outcomes.values()) < FEWEST_STREAMS)
        )
        fuzzer.stop()
        assert cluster.outcomes["whole"] >= FEWEST_STREAMS // 2, cluster.outcomes
        cluster.check_whole()
        serve_some(cluster, fuzzer)


@pytest.mark.parametrize("has_keys", [True, False], ids=["keys", "no_keys"])
def test_tickets_that_no_router_gave_open_nothing(tmp_path: Path, has_keys: bool) -> None:
    """Nor one that was used: what the forger hears that it should not, ends it with an error."""
    with fuzz_cluster(tmp_path, has_keys=has_keys) as cluster:
        forger = cluster.fuzz(1, TicketForger)
        assert isinstance(forger, TicketForger)

        def is_enough() -> bool:
            tried = forger.counts["genuine"] >= FEWEST_GENUINE and forger.counts["forged"] >= FEWEST_FORGED
            return forger.has_stopped or (tried and bool(forger.granted))

        asyncio.run(cluster.serve(forger, lambda: not is_enough()))
        forger.stop()
        cluster.check_whole()
        serve_some(cluster, forger)


@pytest.mark.parametrize("has_keys", [True, False], ids=["keys", "no_keys"])
def test_a_hostile_client_of_http_harms_nobody(tmp_path: Path, has_keys: bool) -> None:
    """Every answer that it reads is looked at: a 500 ends it with an error."""
    with fuzz_cluster(tmp_path, has_keys=has_keys) as cluster:
        serve_some(cluster, None)
        rest = held(cluster.processes)
        with MemoryWatch(cluster.processes) as watch:
            client = HttpOutsider(cluster.url, cluster.api_key)

            def is_enough() -> bool:
                """It does not wait long for answers: on a slow machine it reads few."""
                return client.has_stopped or (sum(client.counts.values()) >= FEWEST_REQUESTS and 400 in client.statuses)

            asyncio.run(cluster.serve(None, lambda: not is_enough()))
            client.stop()
        assert max(growth(rest, watch.most).values()) <= MOST_GROWTH
        assert 400 in client.statuses, client.statuses
        cluster.check_whole()
        serve_some(cluster, None)
