"""Refuse flags that --deterministic excludes, because results would depend on the batch or on measured times.

`fixed_kernels` refuses unsuitable models when they are loaded.
"""

from __future__ import annotations

from shared.config.processes import NodeParts
from shared.core.errors import ConfigError


def check_deterministic(parts: NodeParts, *, on_gpu: bool) -> None:
    """Raise ConfigError for an excluded flag."""
    if not parts.sched.deterministic:
        return
    refused = {
        "a CPU has no kernels with fixed tiles: use --device cuda": not on_gpu,
        "adapters' products are the library's: leave --lora out": bool(parts.model.lora),
        f"--spec {parts.spec.spec} has a draft head, whose kernels are not fixed: use ngram or none": (
            parts.spec.spec in ("eagle", "mtp")
        ),
        "draft lengths would follow measured times: add --no-spec-adaptive": (
            parts.spec.spec != "none" and parts.spec.spec_adaptive
        ),
    }
    for why, is_so in refused.items():
        if is_so:
            raise ConfigError(f"--deterministic: {why}")
