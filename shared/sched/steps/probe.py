"""Make a step without requests, to distinguish a failing device from failing requests. It reserves nothing.

The step uses request-pool row 0, which is padding, and page 0, the sink. No request reads the values there.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.engine.plan import StepPlan
from shared.kv.manager import page_count
from shared.sched.steps.batch import ScheduleBatch
from shared.sched.steps.chunking import ChunkedPrompt
from shared.sched.steps.freeze import ChunkShare, PlanFreezer
from shared.sched.steps.settings import SchedSettings

PROBE_PROMPT = (1, 2, 3)  # every vocabulary has these ids; the warm-up also uses them


def probe_plan(freezer: PlanFreezer, settings: SchedSettings, step: int, nobody: ScheduleBatch) -> StepPlan:
    prompt = np.asarray(PROBE_PROMPT, dtype=np.int64)
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    req = Request(RequestKey("probe", 0, str(step), 0, 0), NodeAsk(prompt, greedy, 0), arrival=0)
    share = ChunkShare(ChunkedPrompt(req, prompt, 0), len(prompt))
    plan = freezer.freeze(step, [share], nobody, np.zeros(0, dtype=np.int64), width=1)
    sink = np.zeros((1, page_count(len(prompt), settings.page_size)), dtype=np.int32)
    return replace(plan, layout=replace(plan.layout, page_tables=(sink,) * len(plan.layout.page_tables)))
