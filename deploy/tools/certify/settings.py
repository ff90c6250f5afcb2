"""Settings of the engine that replays certified answers: those of nodes and routers that change tokens, its size."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.core_plan import CorePlan
from shared.config.settings.hub_settings import HubConfig
from shared.config.settings.settings import MemoryConfig, ModelConfig, SchedConfig
from shared.config.settings.text_settings import TextConfig

FLAGS = frozenset(
    {
        "model", "dtype", "kv_dtype", "weight_dtype", "model_library", "max_context", "lora", "offline", "kv_bytes",
        "page_size", "max_running", "device", "deterministic", "threads", "chat_template_kwargs", "tool_format",
        "allow_control_tokens",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    model: ModelConfig
    hub: HubConfig
    memory: MemoryConfig
    sched: SchedConfig
    text: TextConfig
    cores: CorePlan
