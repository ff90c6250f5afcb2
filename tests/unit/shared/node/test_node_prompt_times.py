"""What a node counts of steps that compute prompts: how many, of how many tokens, and for how long."""

from __future__ import annotations

from shared.core.sampling_params import SamplingParams
from shared.node.records.report import StepWatch
from shared.node.records.request_spans import RequestSpans
from shared.observe.node_metrics import NodeMetrics
from tests.support.cores.core_rig import CoreKnobs, Job, make_core
from tests.support.cores.simulated_streams import World

NAMES = ("prompt_steps", "prompt_step_tokens", "prompt_step_seconds")


def job(length: int, max_tokens: int) -> Job:
    return Job(0, tuple(n % 90 for n in range(length)), SamplingParams(max_tokens=max_tokens, temperature=0.0), 0)


class Watched:
    """A core whose device works when it is told to, on a clock that the test moves."""

    def __init__(self) -> None:
        self.world, self.metrics, self.now = World.script(), NodeMetrics(), 0.0
        self.core = make_core(CoreKnobs(backend="simulated", chunk_size=32), self.world)
        self.watch = StepWatch(self.core, self.metrics, lambda: self.now, RequestSpans())

    def round(self, at: float) -> None:
        self.now = at
        self.core.step()
        self.watch.look(at)

    def device_works(self, until: float) -> None:
        self.now = until
        self.world.run_until_idle()

    def counted(self) -> tuple[float, ...]:
        counters = self.metrics.counters()
        return tuple(counters[name] for name in NAMES)


def test_a_step_s_time_begins_where_the_one_before_it_ends() -> None:
    node = Watched()
    node.core.submit(job(40, 3).request())
    node.round(1.0)  # the chunk of 32 is launched
    node.round(2.0)  # and the one of 8, behind it
    assert node.counted() == (0, 0, 0)
    node.device_works(until=4.0)
    node.round(9.0)  # it is noticed late
    node.round(9.0)
    assert node.counted() == (2, 40, 3.0), "from 1 to 4, and nothing for the second: both ended at 4"
