"""The file that the measuring process writes for its parent, which does not load torch. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.tools.plan.profile import StepShape


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    shapes: list[StepShape]
    seconds: list[float]
    num_pages: int
    max_context: int
    page_bytes: int
