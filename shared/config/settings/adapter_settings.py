"""Settings of adapters that nodes load while they run. Those of the start are settings.ModelConfig.lora."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.settings.options import Settings, option
from shared.core.adapter_table import MAX_ADAPTERS


@dataclass(frozen=True, slots=True)
class AdapterConfig(Settings):
    """LoRA adapters that /admin/adapters loads and removes."""

    lora_dir: str = option(
        "", "folder whose LoRA adapters /admin/adapters may load (CPU only); empty: it may load none", metavar="DIR"
    )
    lora_slots: int = option(8, "how many adapters of --lora-dir may be loaded at once", low=1, high=MAX_ADAPTERS)

    @property
    def num_spare(self) -> int:
        return self.lora_slots if self.lora_dir else 0
