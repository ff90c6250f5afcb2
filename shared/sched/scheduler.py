"""Make a scheduler of its parts. A scheduler is single-threaded, and has no clock and no socket.

        submit -> WAITING -> PREFILLING -> RUNNING -> FINISHED          here from start to end
                                       \\-> HANDED_OFF -> FINISHED       prefill node, KV goes to a decode node
                   WAITING -> RESTORING -> PREFILLING or RUNNING        KV comes back from the cold tier
        grant  -> GRANTED -> RUNNING -> FINISHED                        decode node, KV comes from a prefill node

`intake` queues requests, `grants` reserves memory for KV that arrives, `planner` makes steps, and `results` applies
their results. All of them change the same `queues`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from shared.engine.plan import Int64s, StepResult
from shared.engine.stages import every_row
from shared.grammar.grammars import NO_GRAMMARS, Grammars, NoGrammars
from shared.kv.manager import KVManager
from shared.kv.pages import PageAllocator
from shared.kv.prefix_cache import PrefixCache
from shared.kv.rows import ReqToTokenPool
from shared.sched.memory.offload import ColdTier
from shared.sched.planning.capacity import Capacity
from shared.sched.planning.grants import Grants
from shared.sched.planning.planner import Planner
from shared.sched.requests.intake import Intake
from shared.sched.requests.queues import Queues
from shared.sched.requests.results import Results
from shared.sched.steps.draft_length import FixedWidth, WidthChoice
from shared.sched.steps.masks import MaskMaker
from shared.sched.steps.mixed_chunk import MixedChunk
from shared.sched.steps.settings import SchedSettings


class Scheduler:
    def __init__(
        self,
        kv: KVManager,
        settings: SchedSettings,
        new_step: Callable[[], int],
        widths: WidthChoice,
        tier: ColdTier | None = None,
        choose_rows: Callable[[Int64s, Int64s], Int64s] = every_row,
        grammars: Grammars | NoGrammars = NO_GRAMMARS,
        mixed_chunk: MixedChunk | None = None,
    ) -> None:
        """`choose_rows`: see Stages.choose."""
        self.settings = settings
        self.queues = queues = Queues(kv, settings, tier)
        self.capacity = capacity = Capacity(kv, settings, queues)
        self.intake = Intake(queues, grammars)
        self.grants = Grants(kv, settings, queues, capacity, new_step)
        self.planner = Planner(kv, settings, queues, capacity, new_step, widths, choose_rows, mixed_chunk)
        self.results = Results(settings, queues)
        self.masks = MaskMaker(queues.requests, grammars.num_words, queues.fail)

    def process(self, result: StepResult) -> None:
        self.planner.observe(result)
        self.results.process(result)

    def close(self) -> None:
        self.queues.offload.close()
        self.intake.close()


def make_scheduler(settings: SchedSettings, num_pages: int, max_running: int) -> Scheduler:
    """Make a scheduler with a node's accounts of pages and rows, but without memory."""
    kv = KVManager(
        ReqToTokenPool(max_running + 1, settings.num_pages(settings.history_len)),
        PageAllocator(num_pages),
        PrefixCache(settings.page_size),
    )
    return Scheduler(kv, settings, itertools.count(1).__next__, FixedWidth(1))
