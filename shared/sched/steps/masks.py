"""Make a step's masks from its requests' grammars, for shared/engine/masks.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from shared.core.errors import BatonError
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.engine.masks import HostDrafts
from shared.engine.plan import StepPlan
from shared.sample.interface import TokenMasks

EVERY_ID = 0xFFFFFFFF


class MaskMaker:
    """`num_words`: the number of words in a mask, one per 32 ids. `fail` ends a request with an error."""

    def __init__(
        self,
        requests: Mapping[RequestKey, Request],
        num_words: int,
        fail: Callable[[RequestKey, BatonError], None],
    ) -> None:
        self._requests = requests
        self._num_words = num_words
        self._fail = fail
        self._broken: list[tuple[RequestKey, BatonError]] = []

    def make(self, plan: StepPlan, drafts: HostDrafts | None) -> TokenMasks:
        """Return a mask for each output of each row that has a grammar. Zombies (results.py) get no masks."""
        num_outputs = [int(emits) for emits in plan.emits[: plan.num_prefill]]
        num_outputs += [plan.width] * (plan.batch_size - plan.num_prefill)
        rows = np.full(sum(num_outputs), -1, dtype=np.int64)
        num_masks = sum(
            num for num, is_constrained in zip(num_outputs, plan.constrained, strict=True) if is_constrained
        )
        bits = np.full((num_masks, self._num_words), EVERY_ID, dtype=np.uint32)
        output = mask = 0
        for index, num in enumerate(num_outputs):
            if num and plan.constrained[index]:
                if self._fill(plan, index, drafts, bits[mask : mask + num]):
                    rows[output : output + num] = np.arange(mask, mask + num)
                mask += num
            output += num
        return TokenMasks(rows, bits)

    def _fill(self, plan: StepPlan, index: int, drafts: HostDrafts | None, out: np.ndarray) -> bool:
        """Return False if the row needs no masks."""
        row_id = plan.row_ids[index]
        req = self._requests.get(row_id.key)
        if req is None or req.incarnation != row_id.incarnation or req.constraint is None:
            return False
        ids: list[int] = []
        parents: list[int] = []
        if plan.narrow and plan.narrow[index]:
            out = out[:1]
        elif drafts is not None and index >= plan.num_prefill:
            ids = drafts.ids[index - plan.num_prefill].tolist()
            parents = drafts.parents[index - plan.num_prefill].tolist()
        try:
            req.constraint.fill(req.output_ids, ids, parents, out)
        except BatonError as error:
            self._broken.append((req.key, error))
            return False
        return True

    def end_broken(self) -> None:
        """End the requests whose grammars have failed, between two launches and before their steps' results."""
        broken, self._broken = self._broken, []
        for key, error in broken:
            self._fail(key, error)
