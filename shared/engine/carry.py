"""Hold the state that a step's forward leaves for its sampling."""

from __future__ import annotations

from dataclasses import dataclass

from shared.engine.forward_batch import ForwardBatch
from shared.engine.verify import Drafts
from shared.model.interface import Carried, ModelOutput


@dataclass(frozen=True, slots=True)
class Carry:
    """The step's lease holds this state until sampling. Each pipeline stage replaces the state."""

    fb: ForwardBatch
    output: Carried | ModelOutput  # a ModelOutput once the last stage has run
    drafts: Drafts | None
