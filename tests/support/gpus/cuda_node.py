"""What a node builds at its start, on the virtual GPU, from settings as a person types them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch

from shared.config.processes import NodeParts, NodeProcessConfig
from shared.config.settings.settings import MemoryConfig, ModelConfig, NodeConfig, SchedConfig, SpecConfig
from shared.device.cpu import do_nothing
from shared.node import run
from shared.node.assembly import build_core
from shared.node.machine.cores import NodeCores
from shared.node.records.core import NodeCore
from shared.observe.log import Logger
from shared.ranks.leader import RankProcesses
from tests.support.gpus.cuda_core import folder_of
from tests.support.virtual_gpu.device import VirtualGpu

SMALL = {"max_running": 4, "kv_bytes": 0, "page_size": 16}


def parts_of(
    *,
    family: str = "draft target",
    spec: str = "none",
    memory: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> NodeParts:
    """`changes`: fields of ModelConfig and SchedConfig; NodeConfig's under their own names."""
    picked = {
        kind: {name: changes[name] for name in kind.__slots__ if name in changes}
        for kind in (ModelConfig, SchedConfig, NodeConfig)
    }
    head = {"spec_head": str(folder_of("head"))} if spec == "eagle" else {}
    return NodeParts(
        model=ModelConfig(
            model=str(folder_of(family)), **({"dtype": "float32", "max_context": 128} | picked[ModelConfig])
        ),
        sched=SchedConfig(**({"chunk_size": 64, "mixed_chunk_size": 32} | picked[SchedConfig])),
        node=NodeConfig(**picked[NodeConfig]),
        memory=MemoryConfig(**(SMALL | memory)),
        spec=SpecConfig(spec, **head),
    )


@dataclass
class Built:
    """Build a node's core on `gpu`, a virtual one that the node takes for torch.cuda's."""

    gpu: VirtualGpu
    said: io.StringIO = field(default_factory=io.StringIO)

    def core(self, parts: NodeParts) -> NodeCore:
        config = NodeProcessConfig(parts)
        before = torch.get_num_threads()
        try:
            cores = NodeCores(config.cores, config.parts.parallel, "n")
            return build_core.build_core(config, Logger("n", self.said), do_nothing, RankProcesses(config, "n"), cores)
        finally:
            torch.set_num_threads(before)


def on_virtual_gpu(gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> Built:
    monkeypatch.setattr(build_core, "devices", lambda *_: (str(gpu.device), "cuda"))
    monkeypatch.setattr(build_core, "gpu_of", lambda streams: gpu)
    monkeypatch.setattr(run, "capture_libraries", lambda log: None)  # of the whole process, and so of later tests
    return Built(gpu)
