"""Settings of what a node answers to the platform that runs it."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.endpoints import MAX_PORT
from shared.config.options import check_fields, option


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """Probes: what a node answers to the platform that runs it, at `--bind-host`."""

    ready_port: int = option(0, "port that answers probes (GET /ready, /live) over HTTP; 0: none", low=0, high=MAX_PORT)

    def __post_init__(self) -> None:
        check_fields(self)
