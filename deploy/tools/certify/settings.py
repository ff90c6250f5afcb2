"""Settings of the engine that replays certified answers: those of a node that can change a token, and its size."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.core_plan import CorePlan
from shared.config.hub_settings import HubConfig
from shared.config.settings import MemoryConfig, ModelConfig, SchedConfig

FLAGS = frozenset(
    {
        "model", "dtype", "kv_dtype", "weight_dtype", "model_library", "max_context", "lora", "offline", "kv_bytes",
        "page_size", "max_running", "device", "threads",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    model: ModelConfig
    hub: HubConfig
    memory: MemoryConfig
    sched: SchedConfig
    cores: CorePlan
