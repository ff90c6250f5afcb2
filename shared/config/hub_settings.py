"""How models named org/name are found. Fetching them is the command's business (deploy/hub)."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.options import check_fields, option

OFFLINE_HELP = "take a model named org/name from the cache and never ask the hub, as HF_HUB_OFFLINE=1 does"


@dataclass(frozen=True, slots=True)
class HubConfig:
    """Where models named org/name come from. HF_HOME, HF_TOKEN and HF_ENDPOINT hold as everywhere."""

    offline: bool = option(False, OFFLINE_HELP)

    def __post_init__(self) -> None:
        check_fields(self)
