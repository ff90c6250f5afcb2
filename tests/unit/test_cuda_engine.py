"""The engine on the virtual GPU, by the CUDA backend's own streams: it gives the CPU's streams, copies once each way a
step, and the host waits for nothing."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.support.core_rig import Outcome, assert_whole, run_local
from tests.support.cuda_core import Kind, jobs, make_core
from tests.support.virtual_gpu.device import make_device

KINDS = {
    "plain": Kind(),
    "alternating": Kind(mix=False),
    "n-gram": Kind(spec="ngram"),
    "chain": Kind(spec="chain"),
    "tree": Kind(spec="tree"),
    "copies": Kind(spec="copies"),
    "exact lengths": Kind(spec="ngram", exact=True),
    "int8 KV": Kind(kv="int8"),
}


@cache
def on_cpu(kind: Kind, retract_every: int = 0) -> Outcome:
    core = make_core(kind)
    outcome = run_local(core, jobs(), retract_every=retract_every, rng=random.Random(1))
    core.close()
    return outcome


@pytest.mark.parametrize("name", KINDS)
def test_a_step_crosses_once_each_way_and_nobody_waits(name: str) -> None:
    """All sampling parameters, penalties and log-probabilities included, chunks and decode rows mixed."""
    kind, gpu = KINDS[name], make_device("eager")
    core = make_core(kind, gpu)
    with gpu.counting() as counts:
        outcome = run_local(core, jobs(), rng=random.Random(1))
    assert_whole(core)
    core.close()
    assert outcome.streams == on_cpu(kind).streams
    told = f"{outcome.num_steps} steps: {counts.by_place.most_common(8)}"
    print(f"{name}: {told}")
    asked = outcome.num_steps if kind.exact else 0
    assert counts.syncs <= asked and counts.h2d_pageable == 0, told
    assert counts.h2d_async == outcome.num_steps, told
    assert counts.d2h_async == outcome.num_steps, told


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seed", [1, 2])
def test_streams_are_the_cpu_s_in_any_order_that_the_waits_allow(name: str, seed: int) -> None:
    """Retractions too. Freed memory is handed out again at once, full of garbage, and torch's sanitizer looks on."""
    kind, gpu = KINDS[name], make_device("deferring", seed)
    core = make_core(kind, gpu)
    outcome = run_local(core, jobs(), retract_every=9, rng=random.Random(1))
    assert_whole(core)
    core.close()
    assert outcome.streams == on_cpu(kind).streams
    assert not gpu.races
