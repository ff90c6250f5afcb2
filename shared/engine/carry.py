"""Hold the state that a step's forward leaves for its sampling."""

from __future__ import annotations

from dataclasses import dataclass

from shared.engine.forward_batch import ForwardBatch
from shared.engine.verify import Drafts
from shared.model.math.interface import Carried, ModelOutput


@dataclass(frozen=True, slots=True)
class Carry:
    """The state, owned by the step's lease until sampling. Each pipeline stage replaces it."""

    fb: ForwardBatch
    output: Carried | ModelOutput  # a ModelOutput after the last stage
    drafts: Drafts | None
