"""What the measuring process writes and its parent reads. Values only: the parent loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.tools.plan.profile import StepShape


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Shapes and seconds of all steps, and what memory the node found for itself."""

    shapes: list[StepShape]
    seconds: list[float]
    num_pages: int
    max_context: int
    page_bytes: int
