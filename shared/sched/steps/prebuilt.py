"""Define PREBUILT records, with which a decode node continues a row without a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shared.core.request import Request
from shared.engine.plan import Admission, HistorySeed, RowId
from shared.sched.steps.settings import SchedSettings
from shared.wire.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request whose KV of `committed` tokens has arrived. `token` is the request's next input token."""

    request: Request
    token: int
    committed: int
    logprobs: tuple[TokenLogprob, ...]
    draft_state: dict[str, torch.Tensor]  # tensors that the drafter relays, by name, in host memory


def build_admission(step: int, arrivals: Sequence[Arrival], settings: SchedSettings) -> Admission:
    """History seeds lack the next input token: the forward that reads this token writes it to the history."""
    reqs = [arrival.request for arrival in arrivals]
    return Admission(
        step=step,
        row_ids=tuple(RowId(req.key, req.incarnation) for req in reqs),
        req_pool_indices=np.asarray([req.row for req in reqs], dtype=np.int64),
        tokens=np.asarray([arrival.token for arrival in arrivals], dtype=np.int64),
        committed=np.asarray([arrival.committed for arrival in arrivals], dtype=np.int64),
        draft_state={
            name: torch.stack([arrival.draft_state[name] for arrival in arrivals]) for name in arrivals[0].draft_state
        },
        history_seeds=tuple(
            HistorySeed(req.row, req.all_ids()[: arrival.committed])
            for req, arrival in zip(reqs, arrivals, strict=True)
            if settings.keeps_history(req)
        ),
    )
