"""Verify windows that are trees, in the whole engine: streams are the reference's whatever the trees are, and every
verify accepts all that its tree has of the truth. Every seed draws its cell."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.engine.drafter import Drafter
from shared.engine.future_map import FutureIndices
from shared.engine.plan import StepPlan, StepResult
from shared.speculation.draft_tree import num_levels
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, assert_whole, draw_jobs, make_core, run_local
from tests.support.cores.random_trees import RandomTrees
from tests.support.cores.scripted_core import FORWARD, TRANSFER, Script, job
from tests.support.hazards.attach import watching
from tests.support.hazards.ledger import Mode
from tests.support.oracles.hash_draft import expected_accept_len

Check = Callable[[StepResult], object]
BLOCK = 5
NUM_BLOCKS = 5


TREES = ((2, 2, 7), (2, 2, 7), (2, 3, 6), (3, 3, 8), (4, 2, 9), (2, 4, 12), (4, 4, 16))  # topk, steps, width


def draw_knobs(rng: random.Random, seed: int) -> CoreKnobs:
    page_size = rng.choice([1, 16])
    return CoreKnobs(
        backend=rng.choice(["simulated", "simulated", "cpu", "inline"]),
        overlap=rng.random() < 0.7,
        chunk_size=rng.choice([3, 16, 64]),
        mix=rng.random() < 0.7,
        page_size=page_size,
        num_pages=rng.choice({1: (500, 900), 16: (40, 100)}[page_size]),
        prefix_cache=rng.random() < 0.5,
        width=rng.choice([3, 6, 16]),
        needs_cpu_seq_lens=rng.random() < 0.3,
        seed=seed,
    )


def run(knobs: CoreKnobs, rng: random.Random, jobs: list[Job], check: Check, drafter: Drafter | None = None) -> None:
    """Streams and books are right, and `check` agrees with every step's result of requests that still live."""
    with watching() if knobs.backend == "simulated" else nullcontext() as hazards:
        core = make_core(knobs, drafter=drafter)
        if hazards is not None:
            hazards.watch(core)
        process = core.scheduler.process
        core.scheduler.process = lambda result: (check(result), process(result))  # type: ignore[method-assign]
        outcome = run_local(core, jobs, retract_every=rng.choice([0, 0, 7]), rng=rng)
    assert_streams(jobs, outcome)
    assert_whole(core)
    core.close()


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_streams_and_accepted_lengths_of_random_trees(block: int) -> None:
    checked = moved = 0
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        rng = random.Random(seed)
        jobs = draw_jobs(rng, rng.randrange(5, 10), rng.choice([0.0, 0.8]), max_prompt=100)
        trees = RandomTrees(jobs, seed)
        try:
            run(draw_knobs(rng, seed), rng, jobs, trees.check, trees)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        checked, moved = checked + trees.num_checked, moved + trees.num_moved
    assert checked > 40 and moved > 10, "trees were verified, and paths had to be moved"


@pytest.mark.rule("H12")
@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_streams_and_accepted_lengths_of_a_head_s_trees(block: int) -> None:
    """EagleWorkerV2 on HashDraft: every verify accepts as many levels as the head foresees. With penalties too, and
    where other steps of the same rows are narrower."""
    counts = Counter[int]()
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        rng = random.Random(seed)
        jobs = draw_jobs(rng, rng.randrange(5, 10), rng.choice([0.0, 0.8]), max_prompt=100)
        topk, steps, width = rng.choice(TREES)
        knobs = replace(draw_knobs(rng, seed), topk=topk, steps=steps, width=width, draw_widths=rng.random() < 0.3)
        try:
            run(knobs, rng, jobs, lambda result, knobs=knobs: counts.update(_foreseen(result, knobs)))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {knobs}: {error}") from error
    assert counts.total() > 100 and counts[3] > 10, "some accepted more than one draft"


def _foreseen(result: StepResult, knobs: CoreKnobs) -> list[int]:
    """Accepted lengths. At most the levels that the head is right about, and all of them where the whole tree is
    verified; the first level's draw always is."""
    found = []
    for b in range(result.num_prefill, len(result.row_ids)):
        accepted = int(result.accept_lens[b])
        levels = num_levels(result.width, knobs.topk, knobs.steps) if result.width > 1 else 0
        foreseen = expected_accept_len(int(result.seq_lens[b]) - accepted, levels + 1, knobs.hit_rate)
        is_whole = result.width - 1 >= knobs.topk + (levels - 1) * knobs.topk**2
        assert accepted <= foreseen, "the head knows nothing of that"
        assert accepted == foreseen if is_whole else accepted >= min(foreseen, 2), (
            f"{result.row_ids[b]} accepted {accepted} of {foreseen}"
        )
        found.append(accepted)
    return found


def test_penalties_count_a_node_s_ancestors_and_no_sibling() -> None:
    """Strong ones, on trees where siblings are many and often the truth of another depth."""
    strong = {"repetition_penalty": 1.8, "presence_penalty": 1.0, "frequency_penalty": 0.7}
    jobs = [job(rid, 9, 40, **strong) for rid in range(8)]
    trees = RandomTrees(jobs)
    core = make_core(CoreKnobs(width=16), drafter=trees)
    process = core.scheduler.process
    core.scheduler.process = lambda result: (trees.check(result), process(result))  # type: ignore[method-assign]
    assert_streams(jobs, run_local(core, jobs))
    assert trees.num_checked > 20 and trees.num_moved > 10


def test_kv_up_to_published_lengths_is_whole_when_published(hazards) -> None:  # noqa: ANN001
    """Somebody reads the new lengths the moment they are published, and then the pages up to there. He must find what
    will lie there for good, and his reads must be ordered behind the compaction's writes."""
    one = job(1, 9, 60)
    trees = RandomTrees([one])
    extend = trees.extend
    script = Script(trees, width=8, prefix_cache=False)
    hazards.watch(script.core)
    trees.extend = extend  # type: ignore[method-assign]  # it writes no draft KV, which may change at any time
    (req,) = script.submit(one)
    script.run_until_running(req)
    for _ in range(12):
        if req.finished:
            break
        script.step()
        _read_when_published(script, hazards, req.row)
    assert trees.num_moved > 3
    assert_streams([one], script.finish())


def _read_when_published(script: Script, hazards, row: int) -> None:  # noqa: ANN001
    """Another stream, as early as the newest step's event lets it."""
    core, lease = script.core, script.core.engine.leases[-1]
    plan = lease.work
    assert isinstance(plan, StepPlan) and lease.publish_ready is not None
    node, seen = hazards.nodes[0], []

    def read() -> None:
        length = int(core.future_map.published(FutureIndices(torch.tensor([row])))[0])
        pages = plan.layout.page_table[0, : -(-length // core.pool.page_size)].astype(np.int64)
        node.touch(node.pages, pages, Mode.READ)
        with hazards.detector.scope(node.pages.name):
            seen.append((length, pages, _slots(core, pages, length)))

    core.streams.transfer.wait(lease.publish_ready)
    done = core.streams.transfer.launch(read, label="read").done
    core.streams.forward.wait(done)  # later steps write behind that length, but into the same pages
    while not lease.publish_ready.peek():
        script.world.run(FORWARD)
    script.world.run_stream(TRANSFER)
    script.world.run_until_idle()
    length, pages, before = seen[0]
    with hazards.detector.mute():
        assert torch.equal(_slots(core, pages, length), before), f"KV of {length} tokens changed after publication"


def _slots(core, pages: np.ndarray, length: int) -> torch.Tensor:  # noqa: ANN001
    """(2, length) of HashLM's plane."""
    return core.pool.plane("kv")[torch.from_numpy(pages)].transpose(0, 1).flatten(1)[:, :length].clone()
