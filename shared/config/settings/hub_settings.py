"""Settings for models that commands fetch from the hub (deploy/hub)."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.settings.options import Settings, option

OFFLINE_HELP = "take a model named org/name from the cache, and never ask the hub, as with HF_HUB_OFFLINE=1"


@dataclass(frozen=True, slots=True)
class HubConfig(Settings):
    """Models named org/name. The variables HF_HOME, HF_TOKEN and HF_ENDPOINT apply."""

    offline: bool = option(False, OFFLINE_HELP)
