"""PREBUILT: the record that lets a row go on without a forward, and the admission made of such records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shared.core.request import Request
from shared.engine.plan import Admission, HistorySeed, RowId
from shared.sched.settings import SchedSettings
from shared.wire.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class Arrival:
    """A granted request whose KV is here: `token` is its next input, `committed` tokens have KV."""

    request: Request
    token: int
    committed: int
    logprobs: tuple[TokenLogprob, ...]
    draft_state: dict[str, torch.Tensor]  # (*shape) host, per relayed extra of the drafter; empty without one


def build_admission(step: int, arrivals: Sequence[Arrival], settings: SchedSettings) -> Admission:
    """Values only. History: all tokens with KV; the next input is written by the forward that consumes it."""
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
