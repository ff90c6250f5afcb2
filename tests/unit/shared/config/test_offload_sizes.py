"""--offload-bytes as pages: none, too little for one, more than the machine has."""

from __future__ import annotations

import pytest

from shared.config.processes import NodeParts
from shared.config.settings.settings import MemoryConfig
from shared.core.errors import ConfigError
from shared.node.assembly.memory_plan import plan_memory


def cold_pages(num_bytes: int, device: str = "cpu", page_bytes: int = 4096) -> int:
    parts = NodeParts(memory=MemoryConfig(max_running=32, offload_bytes=num_bytes))
    return plan_memory(parts, 512, page_bytes, depth=1, device=device, available=1 << 30).cold_pages


@pytest.mark.parametrize(
    ("num_bytes", "device", "named"),
    [
        (4095, "cpu", "one page takes 4096 bytes"),
        (1 << 60, "cpu", "GB are free"),
        (4096, "cuda", "pages on cuda"),
    ],
)
def test_what_can_not_be_is_refused(num_bytes: int, device: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        cold_pages(num_bytes, device)
