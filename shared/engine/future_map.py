"""Keep the relay: for each request-pool row, the state that one step leaves for the next.

See #25862, #25879 and #25945 of sgl-project/sglang.

        publish  new_seq_lens_buf   + publish_ready    the scheduler may read this
        stash    output_tokens_buf, extras             forward stream only, ordered by program order, no event

Every write runs on the forward stream, even the write of a PREBUILT admission. So a row's new owner needs no fence. Row
0 is padding. Steps allocate no buffers, and indices never wrap around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.device.events import Event
from shared.engine.plan import HistorySeed, Int64s
from shared.observe.step_records import StepRecords
from shared.sample.interface import History


@dataclass(frozen=True, slots=True)
class RelaySpec:
    """A buffer that a drafter declares."""

    name: str
    shape: tuple[int, ...]  # of one row
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class FutureIndices:
    """A batch's request-pool rows."""

    indices: torch.Tensor  # (B,) int64


class FutureMap:
    """Owner of the relay buffers on `device`.

    Only closures on the forward stream touch the buffers, except that `resolve_seq_lens_cpu` reads new_seq_lens_buf
    after its event.
    """

    def __init__(self, num_rows: int, history_len: int, extras: Sequence[RelaySpec] = (), device: str = "cpu") -> None:
        self.num_rows = num_rows
        self.records = StepRecords()
        self.output_tokens_buf = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.new_seq_lens_buf = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.written_by = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
        self.history = torch.zeros((num_rows, history_len), dtype=torch.int32, device=device)
        self.extras = {
            spec.name: torch.zeros((num_rows, *spec.shape), dtype=spec.dtype, device=device) for spec in extras
        }

    def publish(self, future: FutureIndices, new_seq_lens: torch.Tensor, publish_ready: Event | None) -> None:
        """Publish the rows' new committed lengths. Without rows, write nothing and fire no event (S3)."""
        if future.indices.numel() == 0:
            return
        self.new_seq_lens_buf[future.indices] = new_seq_lens
        if publish_ready is not None:
            self.records.mark("forward", "publish", publish_ready.name)
            publish_ready.fire()

    def stash(self, future: FutureIndices, next_token_ids: torch.Tensor, step: int, **extras: torch.Tensor) -> None:
        """Write relay rows after sampling: the next input token and the declared extras.

        Token ids of any shape and integer dtype become flat int64 (S3). `step` tags the rows.
        """
        if future.indices.numel() == 0:
            return
        self.output_tokens_buf[future.indices] = next_token_ids.reshape(-1).to(torch.int64)
        # an assignment would make a GPU wait
        self.written_by.index_fill_(0, future.indices, step)
        for name, value in extras.items():
            self.extras[name][future.indices] = value
        self.records.mark("forward", "stash", step)

    def gather(self, future: FutureIndices, expect_step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens (B,) int64, tag_ok (B,) bool). tag_ok: whether `expect_step` is the row's tag."""
        return self.output_tokens_buf[future.indices], self.written_by[future.indices] == expect_step

    def published(self, future: FutureIndices) -> torch.Tensor:
        """Return committed lengths, (B,) int64."""
        return self.new_seq_lens_buf[future.indices]

    def relayed(self, name: str, future: FutureIndices) -> torch.Tensor:
        """Return the rows of the declared extra `name`, (B, *shape)."""
        return self.extras[name][future.indices]

    def seed_history(self, seeds: Sequence[HistorySeed], ids: torch.Tensor) -> None:
        """Write history seeds. `ids`: int32, the tokens of all seeds in one tensor."""
        begin = 0
        for seed in seeds:
            end = begin + len(seed.ids)
            self.history[seed.row, : len(seed.ids)] = ids[begin:end]
            begin = end

    def write_history(self, rows: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> None:
        """Write tokens to the history, drafts included, because penalties count all tokens before an output."""
        self.history[rows, positions] = ids.to(torch.int32)

    def history_of(self, future: FutureIndices) -> History:
        """Return the whole history buffer by reference, and the batch's rows in it."""
        return History(self.history, future.indices)

    def history_tokens(self, future: FutureIndices, num_tokens: int) -> torch.Tensor:
        """Return a (B, num_tokens) int32 copy of the rows' history, undefined after the known tokens."""
        return self.history[future.indices, :num_tokens]

    def resolve_seq_lens_cpu(self, req_pool_indices: Int64s, publish_ready: Event | None) -> Int64s:
        """Return exact committed lengths (B,), int64 on the host.

        Waits only for the newest lease's `publish_ready`, not for that step's draft-extend (#25879, #26020).
        """
        if publish_ready is not None:
            publish_ready.synchronize()
        return self.new_seq_lens_buf.cpu().numpy()[req_pool_indices]
