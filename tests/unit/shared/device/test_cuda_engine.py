"""The engine on the virtual GPU, by the CUDA backend's own streams: it gives the CPU's streams, copies once each way a
step, and the host waits for nothing."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import torch

from shared.core.keys import RequestKey
from shared.engine.plan import Admission, HistorySeed, RowId
from shared.node.records.core import NodeCore
from shared.sample.interface import TokenMasks
from shared.wire.messages import TokenLogprob
from tests.support.cores.core_rig import Job, Outcome, assert_whole, name_of, run_local
from tests.support.gpus.cuda_core import KINDS, Kind, make_core
from tests.support.gpus.cuda_jobs import jobs_for
from tests.support.models.tiny_families import FAMILIES
from tests.support.oracles.grammar_oracle import allows_of
from tests.support.virtual_gpu.crossings import Counts
from tests.support.virtual_gpu.device import VirtualGpu, make_device

FAMILY_JOBS = 3
TOLERANCE = 1e-4  # of log-probabilities: the CPU's are another sampler's
RETRACT_EVERY = 9


LONG = pytest.mark.long
QUICK = ("plain", "alternating", "n-gram", "tree", "exact lengths", "fp8 KV", "adapters", "grammars, n-gram")
EACH_RUN = ("plain", "chain", "int8 KV")  # the other kinds take minutes
IN_ANY_ORDER = [
    *EACH_RUN,
    *(pytest.param(name, marks=LONG) for name in KINDS if name not in EACH_RUN),
]


class Heard:
    """The masks that the scheduler makes for a core's steps."""

    def __init__(self, core: NodeCore) -> None:
        self.num_masked = self.num_drafted = 0
        self._make, core.scheduler.masks.make = core.scheduler.masks.make, self._heard  # type: ignore[method-assign]

    def _heard(self, plan: object, drafts: object) -> TokenMasks:
        masks = self._make(plan, drafts)  # type: ignore[arg-type]
        self.num_masked += bool((masks.rows >= 0).any())
        self.num_drafted += drafts is not None
        return masks


@cache
def on_cpu(kind: Kind, num_jobs: int) -> tuple[list[Job], Outcome]:
    core = make_core(kind)
    asked = jobs_for(kind, core.settings.adapters.digests, num_jobs)
    outcome = run_local(core, asked, rng=random.Random(1))
    core.close()
    assert all(end.error is None for end in outcome.ends.values())
    for job in asked:
        follow_grammar(job, outcome.streams[name_of(job.request().key)])
    return asked, outcome


def follow_grammar(job: Job, stream: list[int]) -> None:
    allows = allows_of(job.sampling.grammar)
    for at, token in enumerate(stream if allows else ()):
        assert allows is not None and allows(stream[:at])[token], f"{stream} at {at}"


def run_on(gpu: VirtualGpu, kind: Kind, num_jobs: int = 5, retract_every: int = 0) -> tuple[Outcome, Heard, Counts]:
    """The CPU's streams and log-probabilities, whatever the device does."""
    core = make_core(kind, gpu)
    asked, expected = on_cpu(kind, num_jobs)
    heard = Heard(core)
    with gpu.counting() as counts:
        outcome = run_local(core, asked, retract_every=retract_every, rng=random.Random(1))
    assert_whole(core)
    core.close()
    assert outcome.streams == expected.streams
    for name in expected.streams:
        assert_close(outcome.logprobs[name], expected.logprobs[name])
        assert_close(outcome.scores[name], expected.scores[name])
    return outcome, heard, counts


def assert_close(got: list[TokenLogprob], wanted: list[TokenLogprob]) -> None:
    assert [one.top_ids for one in got] == [one.top_ids for one in wanted]
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)
        assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=TOLERANCE)


def assert_steady(name: str, kind: Kind, outcome: Outcome, heard: Heard, counts: Counts) -> None:
    """Prints the counts. A step with a grammar sends its masks when the host has made them, behind the step's upload;
    where it verifies drafts, these come to the host before."""
    told = f"{outcome.num_steps} steps, {heard.num_masked} masked: {counts.told()}"
    print(f"{name}: {told}")
    assert counts.syncs <= (outcome.num_steps if kind.exact else 0), told
    assert counts.h2d_pageable == 0 and counts.by_thread["syncs MainThread"] == counts.syncs, told
    assert counts.h2d_async == outcome.num_steps + heard.num_masked, told
    assert counts.d2h_async == outcome.num_steps + heard.num_drafted, told
    assert bool(heard.num_masked) == kind.grammars and bool(heard.num_drafted) == (kind.grammars and kind.width > 1)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=LONG) for name in KINDS if name not in QUICK)])
def test_a_step_crosses_once_each_way_and_nobody_waits(name: str) -> None:
    """All sampling parameters, penalties and log-probabilities included, chunks and decode rows mixed."""
    kind = KINDS[name]
    assert_steady(name, kind, *run_on(make_device("eager"), kind))


def test_masks_cross_by_one_copy_and_drafts_by_another() -> None:
    """The smallest such run: a prompt of one token."""
    kind = KINDS["grammars, n-gram"]
    assert_steady("one request", kind, *run_on(make_device("eager"), kind, 1))


@pytest.mark.parametrize("family", [*(name for name in FAMILIES if "," not in name), "llama, llama3 rope"])
def test_every_family_runs_there(family: str) -> None:
    kind = Kind(family)
    assert_steady(family, kind, *run_on(make_device("eager"), kind, FAMILY_JOBS))


@pytest.mark.parametrize("name", IN_ANY_ORDER)
def test_streams_are_the_cpu_s_in_any_order_that_the_waits_allow(name: str) -> None:
    """Retractions too. Freed memory is handed out again at once, full of garbage, and torch's sanitizer looks on."""
    gpu, kind = make_device("deferring", list(KINDS).index(name)), KINDS[name]
    run_on(gpu, kind, 5 if kind.width == 1 else 3, RETRACT_EVERY)
    assert not gpu.races


def test_exact_lengths_are_read_after_the_newest_step_publishes() -> None:
    """By the host, which waits for nothing else here."""
    gpu = make_device("deferring", 1, laziness=1.0)
    run_on(gpu, KINDS["exact lengths"], 2)
    assert not gpu.races


@pytest.mark.parametrize("mode", ["eager", "deferring"])
@pytest.mark.parametrize("num_arrivals", [1, 2, 4])
def test_arrivals_cross_once_and_lie_where_the_next_step_looks(num_arrivals: int, mode: str) -> None:
    """Tokens, lengths, histories and draft state of all rows by one copy, and none comes back. Prints the counts."""
    gpu = make_device(mode, num_arrivals)
    core = make_core(KINDS["tree"], gpu)
    relay, rows = core.engine.future_map, np.arange(num_arrivals, 0, -1)
    seeds = tuple(HistorySeed(int(row), np.arange(row, row + 3)) for row in rows)
    state = {
        name: torch.rand((num_arrivals, *buffer.shape[1:])).to(buffer.dtype) for name, buffer in relay.extras.items()
    }
    ids = tuple(RowId(RequestKey("test", 1, str(row), 0, 0), 0) for row in rows)
    with gpu.counting() as counts:
        lease = core.engine.admit(Admission(core.engine.new_step(), ids, rows, rows + 40, rows + 20, state, seeds))
        assert core.engine.wait_oldest() and lease.result is not None
    assert lease.result.error is None and core.engine.collect() is None
    print(f"{num_arrivals} arrivals: {counts.told()}")
    assert (counts.syncs, counts.h2d_pageable, counts.h2d_async, counts.d2h_async) == (0, 0, 1, 0), counts.by_place
    assert relay.output_tokens_buf.cpu()[rows].tolist() == (rows + 40).tolist()
    assert relay.new_seq_lens_buf.cpu()[rows].tolist() == (rows + 20).tolist()
    assert relay.written_by.cpu()[rows].tolist() == [lease.step] * num_arrivals
    assert relay.history.cpu()[rows, :3].tolist() == [seed.ids.tolist() for seed in seeds]
    for name, buffer in relay.extras.items():
        assert torch.equal(buffer.cpu()[rows], state[name])
    core.streams.stop()
    core.close()
    assert not gpu.races
