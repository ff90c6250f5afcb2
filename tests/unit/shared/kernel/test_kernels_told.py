"""What is told of kernels: progress while they are compiled, a warning for those that a request waits for."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from numba import njit
from numba.core.compiler_lock import global_compiler_lock

from shared.kernel.code.compile_watch import CompileWatch
from shared.node.machine.compiling import SAID_EVERY_S, KernelLog, tell_of_kernels
from shared.observe.log import Logger
from tests.support.machine.patience import HANG_GUARD_S

ROOT = Path(__file__).resolve().parents[4]


@dataclass
class News:
    worked_on: list[str] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)

    def compiling(self, kernel: str) -> None:
        self.worked_on.append(kernel)

    def made_ready(self, kernel: str, seconds: float) -> None:
        assert seconds >= 0
        self.ready.append(kernel)


def lines_of(log: io.StringIO, what: str) -> list[str]:
    return [line for line in log.getvalue().splitlines() if what in line]


def make_log() -> tuple[io.StringIO, Logger]:
    stream = io.StringIO()
    return stream, Logger("decode-0", stream)


def test_a_kernel_is_told_once_by_its_own_name() -> None:
    @njit
    def inner(x: int) -> int:
        return x + 1

    @njit
    def outer(x: int) -> int:
        return int(inner(x)) * 2

    news = News()
    watch = CompileWatch(news)
    watch.start()
    try:
        assert outer(3) == 8
        assert outer(4) == 10
        assert news.ready == ["outer"], "what it calls is compiled inside it"
        assert outer(2.5) == 6
        assert news.ready == ["outer", "outer"], "other types are other code"
        assert set(news.worked_on) == {"outer"}
    finally:
        watch.stop()
    outer(True)
    assert len(news.ready) == 2, "nobody listens any more"


def test_a_start_says_that_it_lives_and_not_more_often() -> None:
    stream, log = make_log()
    now = 100.0
    news = KernelLog(log, clock=lambda: now)
    news.compiling("early")
    assert not stream.getvalue(), "code that is on disk is read in less time"
    now += SAID_EVERY_S
    news.compiling("attend")
    news.made_ready("attend", 2.0)
    news.compiling("product")
    (line,) = lines_of(stream, "compiling")
    assert "kernel=attend" in line
    now += SAID_EVERY_S
    news.compiling("product")
    assert "kernel=product done=1" in lines_of(stream, "compiling")[1]


def test_only_kernels_made_after_the_start_kept_a_client_waiting() -> None:
    stream, log = make_log()
    news = KernelLog(log)
    news.made_ready("attend", 2.5)
    news.serving()
    assert not lines_of(stream, "waited")
    assert "kernels=1 seconds=2.5" in lines_of(stream, "kernels are ready")[0]
    news.made_ready("logprobs", 0.51234)
    (line,) = lines_of(stream, "waited")
    assert "WARNING" in line
    assert "kernel=logprobs seconds=0.512" in line


def test_a_node_of_a_gpu_does_not_listen() -> None:
    _, log = make_log()
    news = KernelLog(log)
    for device, num_told in (("cuda", 0), ("cpu", 1)):
        stop = tell_of_kernels(news, device)
        with global_compiler_lock:
            pass
        stop()
        assert news.num_ready == num_told


WARMED = """
import sys
import numpy as np
from shared.config import core_plan
from shared.config.load import load
from shared.config.processes import NodeProcessConfig
given = {"model": {"model": "hashlm"}, "sched": {"device": "inline"}, "memory": {"kv_bytes": 1 << 20}}
config = load(NodeProcessConfig, given | {"cores": {"threads": 2}}, fixed={"node": {"role": "decode"}})
core_plan.apply(config.cores)
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.node.assembly.build_core import build_core
from shared.node.assembly.warm_up import warm_up
from shared.node.machine.compiling import KernelLog, tell_of_kernels
from shared.node.machine.cores import NodeCores
from shared.observe.log import Logger
from shared.ranks.leader import RankProcesses
log = Logger("n", sys.stdout)
kernels = KernelLog(log)
tell_of_kernels(kernels, "inline")
cores = NodeCores(config.cores, config.parts.parallel, "n")
core = build_core(config, log, lambda: None, RankProcesses(config, "n"), cores)
warm_up(core, log)
kernels.serving()
kinds = dict(temperature=0.0), dict(temperature=0.9, top_p=0.5), dict(num_logprobs=2), dict(bad_words=((1, 2),))
for n in range(32):
    key, sampling = RequestKey("r", 0, str(n), 0, 0), SamplingParams(max_tokens=4, **kinds[n % len(kinds)])
    core.submit(Request(key, NodeAsk(np.arange(1, 40 + n), sampling, n), n))
while not core.idle:
    core.step(block=True)
core.close()
"""


def test_a_warm_node_has_every_kernel_of_its_requests() -> None:
    """In a process of its own: what other tests have used is there already."""
    done = subprocess.run(
        [sys.executable, "-c", WARMED], cwd=ROOT, capture_output=True, text=True, timeout=HANG_GUARD_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "kernels are ready" in done.stdout
    assert [line for line in done.stdout.splitlines() if "waited" in line] == []
