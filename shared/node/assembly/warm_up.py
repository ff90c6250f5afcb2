"""Run a core's first steps, so that kernels compile before clients wait."""

from __future__ import annotations

import gc
import time

import numpy as np

from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.device.malloc import give_freed_memory_back
from shared.node.records.core import NodeCore
from shared.observe.log import Logger
from shared.sched.steps.largest import EVERY_FEATURE
from shared.sched.steps.probe import PROBE_PROMPT


def warm_up(core: NodeCore, log: Logger) -> None:
    """Run every sampling feature, so that kernels compile before clients wait."""
    started = time.monotonic()
    kinds = SamplingParams(max_tokens=3, temperature=0.0), EVERY_FEATURE
    for arrival, sampling in enumerate(kinds):
        key = RequestKey("warm-up", 0, str(arrival), 0, 0)
        core.submit(Request(key, NodeAsk(np.asarray(PROBE_PROMPT, np.int64), sampling, 1), arrival=-arrival))
    while not core.idle:
        core.step(block=True)
    core.take_events()
    core.kv.flush_cache()
    gc.freeze()  # later garbage collections skip the objects made so far
    give_freed_memory_back()
    log.info("warm", seconds=round(time.monotonic() - started, 2))
