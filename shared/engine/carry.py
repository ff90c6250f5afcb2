"""What a step's forward leaves for its sampling. Knows nothing of when either runs."""

from __future__ import annotations

from dataclasses import dataclass

from shared.engine.forward_batch import ForwardBatch
from shared.engine.verify import Drafts
from shared.model.interface import Carried, ModelOutput


@dataclass(frozen=True, slots=True)
class Carry:
    """Held by the step's lease until the step is sampled. A pipeline's stages replace it, one after another."""

    fb: ForwardBatch
    output: Carried | ModelOutput  # the model's once its last stage has run
    drafts: Drafts | None
