"""The default model as transformers runs it: the reference that nobody here wrote."""

from __future__ import annotations

import torch
import transformers

from benchmarks.engine_model import reference_network
from shared.config.models.model_path import bundled_gguf
from shared.model.formats.opened import open_model


def default_model_in_transformers() -> transformers.PreTrainedModel:
    """The default model's dequantised weights in float32."""
    return reference_network(open_model(bundled_gguf()), torch.float32)
