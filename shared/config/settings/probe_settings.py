"""Settings of what a node answers to the platform and to the people that run it."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.settings.endpoints import MAX_PORT
from shared.config.settings.options import Settings, option


@dataclass(frozen=True, slots=True)
class ProbeConfig(Settings):
    """Probes: what a node answers to the platform that runs it, at `--bind-host`, and to `baton trace`."""

    ready_port: int = option(0, "port that answers probes (GET /ready, /live) over HTTP; 0: none", low=0, high=MAX_PORT)
    record_dir: str = option(
        "",
        "folder through which `baton trace` asks this node to record its steps; every user who may write there may ask",
        metavar="DIR",
    )
