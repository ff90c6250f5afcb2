"""A drafter for tests: random trees with the true continuation along a random path, and what a verify must accept."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap, RelaySpec
from shared.engine.plan import StepResult
from shared.engine.verify import Drafts, Verified
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.math.interface import ModelOutput
from tests.support.cores.core_rig import Job
from tests.support.cores.draft_trees import draw_parents, path_to

VOCAB = 96


class RandomTrees:
    """Knows the jobs' whole streams. Trees depend on (seed, request, length) alone, whatever ran before.

    `expected`: by (request, committed length) what a verify there must accept, where the stream goes on for as long.
    """

    state_name = "none"
    relay_specs: tuple[RelaySpec, ...] = ()
    key_lookahead = 0
    drafts_trees = True
    reads_history = False

    def __init__(self, jobs: Sequence[Job], seed: int = 0, streams: Mapping[str, Sequence[int]] | None = None) -> None:
        """`streams`: what the jobs will say, where it is not HashLM that says it."""
        said = streams or {f"r{job.rid}": job.expected() for job in jobs}
        self._texts = {f"r{job.rid}": [*job.prompt, *said[f"r{job.rid}"]] for job in jobs}
        self._seed = seed
        self.expected: dict[tuple[str, int], int] = {}
        self.num_checked = self.num_moved = 0

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return ()

    def propose(self, fb: ForwardBatch, future_map: FutureMap, kv: KVPool) -> Drafts:
        plan = fb.plan
        rows = range(plan.num_prefill, plan.batch_size)
        trees = [self._tree(plan.row_ids[b].key.rid, int(fb.committed[b]), plan.width) for b in rows]
        return Drafts(torch.tensor([ids for ids, _ in trees]), torch.tensor([parents for _, parents in trees]))

    def _tree(self, rid: str, committed: int, width: int) -> tuple[list[int], list[int]]:
        rng = random.Random(f"{self._seed} {rid} {committed}")
        parents = draw_parents(rng, width)
        truth = self._texts[rid][committed + 1 :]
        ids = [rng.choice([rng.randrange(VOCAB), *truth[:2]]) for _ in parents]
        for depth, node in enumerate(path_to(parents, rng.randrange(width))[1:]):
            if depth < len(truth):
                ids[node - 1] = truth[depth]
        paths = [path_to(parents, node)[1:] for node in range(width)]
        right = [path for path in paths if [ids[node - 1] for node in path] == truth[: len(path)]]
        best = max(right, key=len)
        if len(best) < len(truth):
            self.expected[rid, committed] = len(best) + 1
            self.num_moved += best != list(range(1, len(best) + 1))
        return ids, parents

    def extend(
        self, fb: ForwardBatch, output: ModelOutput, verified: Verified, future_map: FutureMap, kv: KVPool
    ) -> dict[str, torch.Tensor]:
        return {}

    def check(self, result: StepResult) -> None:
        """Every verify accepted what its tree had of the truth, no less."""
        for b in range(result.num_prefill, len(result.row_ids)):
            accepted = int(result.accept_lens[b])
            where = (result.row_ids[b].key.rid, int(result.seq_lens[b]) - accepted)
            if where in self.expected:
                assert accepted == self.expected[where], f"{where} accepted {accepted} of {self.expected[where]}"
                self.num_checked += 1
