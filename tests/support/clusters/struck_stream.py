"""A stream whose decode node is killed on the way."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx

from tests.support.clusters.cluster import Cluster
from tests.support.machine.patience import HANG_GUARD_S


def struck_stream(cluster: Cluster, body: dict[str, Any], strike_at: int) -> list[int]:
    """Return the answer's ids. Kills the decode node once so many of them are there."""
    ids: list[int] = []
    asked = {"return_token_ids": True, "stream": True} | body
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=asked, timeout=HANG_GUARD_S) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            ids += event["choices"][0].get("token_ids") or []
            if strike_at and len(ids) >= strike_at:
                strike_at = 0
                os.kill(cluster.node_pid("--node-id=decode-0"), signal.SIGKILL)
    return ids
