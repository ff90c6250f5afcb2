"""kill -9 of a decode node inside 32 calls of tools by a real model: every answer equals the unbroken run's."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.machine.patience import HANG_GUARD_S

NUM_CALLS = 32
NUM_BEGUN = 8  # streams that have tokens when the node dies
FLAGS = (
    *("--model", "smollm2", "--dtype", "float32", "--tool-format", "hermes", "--max-context", "1024"),
    *("--prefill", "1", "--decode", "2", "--kv-bytes", "128MiB", "--heartbeat-s", "0.1"),
    "--no-prefix-cache",  # what a cache had shows in the usage
)
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"enum": ["monday", "tuesday", "sunday"]}, "minItems": 1, "maxItems": 2},
        "why": {"type": "string", "minLength": 16, "maxLength": 32},
    },
    "required": ["city", "unit", "days", "why"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS}}


def body_of(number: int) -> dict[str, Any]:
    """Every second one is streamed. Each draws with a seed of its own."""
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": f"Which weather will there be in town {number}?"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0.8,
        "seed": number,
        "max_tokens": 300,
        "request_id": f"call-{number}",
        "stream": bool(number % 2),
        **({"stream_options": {"include_usage": True}} if number % 2 else {}),
    }


class Calls:
    """One run of all of them. `num_begun`: streams that have said something of their arguments."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.num_begun = 0

    async def run(self) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=HANG_GUARD_S, limits=httpx.Limits(max_connections=None)) as http:
            return list(await asyncio.gather(*(self._ask(http, body_of(number)) for number in range(NUM_CALLS))))

    async def _ask(self, http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
        path = f"{self._url}/v1/chat/completions"
        if not body["stream"]:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return {name: value for name, value in answer.json().items() if name not in ("id", "created")}
        told: dict[str, Any] = {"ids": [], "name": "", "arguments": "", "reason": None, "usage": None}
        async with http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self._add(told, json.loads(line.removeprefix("data: ")))
        return told

    def _add(self, told: dict[str, Any], event: dict[str, Any]) -> None:
        assert "error" not in event, event
        told["usage"] = event["usage"] or told["usage"]
        for choice in event["choices"]:
            told["reason"] = choice["finish_reason"] or told["reason"]
            for part in choice["delta"].get("tool_calls", ()):
                self.num_begun += not told["arguments"] and bool(part["function"]["arguments"])
                told["arguments"] += part["function"]["arguments"]
                told["name"] += part["function"].get("name", "")
                told["ids"] += [part["id"]] if "id" in part else []


async def struck(calls: Calls, pid: int) -> list[dict[str, Any]]:
    running = asyncio.create_task(calls.run())
    while calls.num_begun < NUM_BEGUN:
        assert not running.done(), "all was over before enough had begun"
        await asyncio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return await running


def decode_pid(cluster: Cluster) -> int:
    """Of the one that has most to do: an idle one's death shows nothing."""
    nodes = [child for child in psutil.Process(cluster.process.pid).children() if "decode" in child.cmdline()]
    return max(nodes, key=lambda node: sum(node.cpu_times()[:2])).pid


@pytest.mark.long
def test_calls_outlive_the_node_that_wrote_them(tmp_path: Path) -> None:
    with baton_up(tmp_path / "up.log", *FLAGS) as cluster:
        unbroken = asyncio.run(Calls(cluster.url).run())
        before = cluster.metrics()["baton_resumed_total", ""]
        broken = asyncio.run(struck(Calls(cluster.url), decode_pid(cluster)))
        assert cluster.metrics()["baton_resumed_total", ""] - before >= NUM_BEGUN // 2
        for number, (one, other) in enumerate(zip(unbroken, broken, strict=True)):
            assert one == other, f"call {number}"
        for answer in unbroken[1::2]:
            assert answer["reason"] == "tool_calls" and answer["name"] == "forecast" and len(answer["ids"]) == 1
            assert set(json.loads(answer["arguments"])) == set(PARAMETERS["required"])
        assert len({answer["arguments"] for answer in unbroken[1::2]}) > NUM_CALLS // 4, "they are not all alike"
        cluster.eventually(cluster.at_rest, "nothing is left behind")
