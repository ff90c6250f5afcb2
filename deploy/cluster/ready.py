"""Tell when a cluster is ready, and announce it."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
from typing import TextIO

from deploy.cluster.facts import ClusterFacts
from deploy.cluster.supervisor import Readiness
from deploy.router_http import own_connection
from shared.config.models import shipped_model
from shared.config.processes import ClusterConfig
from shared.config.settings.endpoints import bracketed

PROBE_TIMEOUT_S = 0.5
READY = "Baton is ready"  # scripts wait for this text
MAX_ANSWER = 1 << 20
# The path and the JSON fields of an example request.
CHAT = (
    "chat/completions",
    '"max_tokens": 100, "messages": [{"role": "user", "content": "What is the capital of Japan?"}]',
)
COMPLETION = "completions", '"prompt": "translate English to German: Good morning."'


def readiness(facts: ClusterFacts) -> Readiness:
    """The cluster is ready when all routers know all nodes as ready."""
    config = facts.config

    def serves() -> bool:
        return all(
            is_ready(router.host, router.port, config.local.num_nodes, facts.key, config.http.tls_cert)
            for router in facts.routers
        )

    return Readiness(serves, lambda: announce(facts), config.local.start_timeout_s)


def url(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://{bracketed(host)}:{port}"


def is_ready(host: str, port: int, num_nodes: int, key: str = "", cert: str = "") -> bool:
    """Return whether the router serves and at least `num_nodes` nodes are ready. `key`: the key that /ready wants.
    `cert`: the router's --tls-cert."""
    try:
        connection = own_connection(host, port, cert, PROBE_TIMEOUT_S)
    except OSError:  # no usable certificate: the router says so, and ends
        return False
    try:
        connection.request("GET", "/ready", headers={"x-api-key": key} if key else {})
        answer = connection.getresponse()
        return answer.status == 200 and count_ready(answer.read(MAX_ANSWER)) >= num_nodes
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def count_ready(body: bytes) -> int:
    try:
        return sum(bool(node["ready"]) for node in json.loads(body)["nodes"])
    except (ValueError, KeyError, TypeError):
        return 0


def better_model(config: ClusterConfig) -> str:
    if config.nodes.model.model != shipped_model.NAME:
        return ""
    return "  a larger model        baton up --model Qwen/Qwen2.5-1.5B-Instruct   (3.1 GB on disk)\n"


def announce(facts: ClusterFacts) -> None:
    """Print the next steps."""
    config, routers = facts.config, facts.routers
    base, *others = (url(router.host, router.port, config.http.scheme) for router in routers)
    path, asked = COMPLETION if facts.has_encoder else CHAT
    body = f'{{"model": "{config.nodes.model.public_name}", "stream": true, {asked}}}'
    browser = f"  chat in the browser   {base}/\n" if path.startswith("chat") else ""
    more = "".join(f"  another router        {other}\n" for other in others)
    key, bearer = ("none", "") if not routers[0].api_key_file else ("KEY", " -H 'Authorization: Bearer KEY'")
    write_line(
        f"\n{READY}: {base}\n{more}{browser}"
        f"  from a shell          curl -N {base}/v1/{path} -H 'Content-Type: application/json'{bearer} \\\n"
        f"                          -d '{body}'\n"
        f"{better_model(config)}"
        f'  with the openai SDK   OpenAI(base_url="{base}/v1", api_key="{key}")\n'
        "  stop                  Ctrl-C\n",
        sys.stdout,
    )


def write_line(line: str, stream: TextIO | None = None) -> None:
    """Write to `stream` (default: stderr, which is the cluster's log). Ignore a full disk or a closed pipe."""
    with contextlib.suppress(OSError):
        print(line, file=stream or sys.stderr, flush=True)
