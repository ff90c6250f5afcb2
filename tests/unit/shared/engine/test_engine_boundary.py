"""What goes to a device and comes back: one copy each way, out of slots that nobody else writes meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shared.engine.boundary import Boundary, SameMemory
from tests.support.cores.boundary import GARBAGE, PoisonedSlots
from tests.support.cores.core_rig import CoreKnobs, assert_streams, assert_whole, draw_jobs, make_core, run_local
from tests.support.cores.core_rig import some_follow_grammars as constrained

ARRAYS = {
    "rows": np.asarray([3, 1, 2], np.int64),
    "flags": np.asarray([True, False, True]),
    "table": np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],  # not contiguous
    "nothing": np.zeros((0, 5), np.float32),
    "half": torch.tensor([[1.5], [-2.25]], dtype=torch.bfloat16),
    "last": np.asarray([7], np.int64),
}


class Lease:
    """Holds slots until it ends."""

    def __init__(self) -> None:
        self._slots: list[Callable[[], None]] = []

    def hold(self, give_back: Callable[[], None]) -> None:
        self._slots.append(give_back)

    def end(self) -> None:
        for give_back in self._slots:
            give_back()


BOTH = pytest.mark.parametrize("boundary", [SameMemory(), PoisonedSlots()], ids=["same memory", "slots"])


@BOTH
def test_results_come_back_and_stay(boundary: Boundary) -> None:
    """What was read is the host's own: the next step's results, in the same slot, do not change it."""
    lease, tensors = Lease(), {name: torch.as_tensor(np.array(ARRAYS[name])) for name in ("rows", "flags", "table")}
    results = boundary.download(boundary.pack(tensors), lease).read()
    lease.end()
    for name, tensor in tensors.items():
        assert results[name].dtype == tensor.dtype and torch.equal(results[name], tensor), name


def test_a_slot_is_nobody_else_s_until_its_lease_ends() -> None:
    boundary, first, second = PoisonedSlots(), Lease(), Lease()
    one = boundary.upload({"ids": np.asarray([1, 2, 3])}, first)["ids"]
    other = boundary.upload({"ids": np.asarray([4, 5, 6])}, second)["ids"]
    assert one.tolist() == [1, 2, 3] and other.tolist() == [4, 5, 6]
    first.end()
    assert one.view(torch.uint8).eq(GARBAGE).all() and other.tolist() == [4, 5, 6]
    again = boundary.upload({"ids": np.asarray([7])}, Lease())["ids"]
    assert again.data_ptr() == one.data_ptr(), "a slot is used again"


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n-gram": {"width": 4, "spec": "ngram"},
    "chain": {"width": 4},
    "tree": {"width": 6, "topk": 2, "steps": 3},
    "layers": {"width": 4, "spec": "mtp"},
    "copies": {"width": 4, "copies": 2},
    "exact lengths": {"width": 4, "needs_cpu_seq_lens": True},
    "alternating": {"mix": False},
}


def apart(kind: str, seed: int = 0) -> CoreKnobs:
    return replace(CoreKnobs("simulated", apart=True, chunk_size=16, num_pages=80, seed=seed), **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_streams_are_the_same_across_the_boundary(kind: str, seed: int) -> None:
    """Every sampling parameter somewhere, retractions, closures in any order: the torch sampler and slots that turn to
    garbage as soon as their lease ends give the reference's streams."""
    rng = random.Random(seed)
    core = make_core(apart(kind, seed))
    jobs = constrained(draw_jobs(rng, 10))
    assert_streams(jobs, run_local(core, jobs, retract_every=7, rng=rng))
    assert_whole(core)
