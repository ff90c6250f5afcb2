"""Processes that measure what prompts and hand-offs cost, and a router that places by it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.clusters.cluster import baton_up
from tests.support.clusters.metrics_page import total
from tests.support.web.mixed_clients import make_client, stream_all

NAMES = ("baton_prompt_steps_total", "baton_prompt_step_tokens_total", "baton_prompt_step_seconds_total")


def test_an_idle_decode_node_starts_prompts_once_costs_are_known(tmp_path: Path) -> None:
    flags = ("--model", "hashlm", "--heartbeat-s", "0.1", "--local-prefill-tokens", "-1")
    with baton_up(tmp_path / "up.log", *flags) as cluster:

        def counted(name: str) -> float:
            return total(cluster.metrics(), name)

        number = 0
        while not counted("baton_started_by_cost_total"):
            client = make_client(number, 60)
            asyncio.run(stream_all(cluster.url, [client]))
            client.check()
            number += 1
            assert number < 200, "measured costs decide nothing"
        assert counted("baton_handoff_cost_seconds_count") > 0
        assert all(counted(name) > 0 for name in NAMES)
        cluster.eventually(cluster.at_rest, "all pages and rows are back")
