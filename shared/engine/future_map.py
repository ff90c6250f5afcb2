"""FutureMap, the relay: what one step leaves for the next, keyed by request-pool row (reports #25862, #25879, #25945).

        publish  new_seq_lens_buf   + publish_ready    the scheduler may read this
        stash    output_tokens_buf, extras             forward stream only, ordered by program order, no event

Every write happens on the forward stream, PREBUILT admission included: a finished request's last step and the
row's next owner are then ordered without a fence. Row 0 is padding. Nothing is allocated per step, nothing wraps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.device.events import Event
from shared.engine.plan import HistorySeed, Int64s
from shared.sample.interface import History


@dataclass(frozen=True, slots=True)
class RelaySpec:
    """A buffer that only some algorithms need; declared by the drafter at start-up."""

    name: str
    shape: tuple[int, ...]  # of one row
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class FutureIndices:
    """Where a batch's future values live: simply its request-pool rows."""

    indices: torch.Tensor  # (B,) int64


class FutureMap:
    """Owner of the relay buffers. Tensors live on `device`; only closures on the forward stream touch them, except
    `resolve_seq_lens_cpu`, which reads new_seq_lens_buf after its event. All access goes through these methods, so
    that a test can watch who touches which row."""

    def __init__(self, num_rows: int, history_len: int, extras: Sequence[RelaySpec] = (), device: str = "cpu") -> None:
        self.num_rows = num_rows
        self.output_tokens_buf = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.new_seq_lens_buf = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.written_by = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
        self.history = torch.zeros((num_rows, history_len), dtype=torch.int32, device=device)
        self.extras = {
            spec.name: torch.zeros((num_rows, *spec.shape), dtype=spec.dtype, device=device) for spec in extras
        }

    def publish(self, future: FutureIndices, new_seq_lens: torch.Tensor, publish_ready: Event | None) -> None:
        """Make the committed lengths after this step readable. An empty index neither writes nor records (S3)."""
        if future.indices.numel() == 0:
            return
        self.new_seq_lens_buf[future.indices] = new_seq_lens
        if publish_ready is not None:
            publish_ready.fire()

    def stash(
        self, future: FutureIndices, next_token_ids: torch.Tensor, step: int | torch.Tensor, **extras: torch.Tensor
    ) -> None:
        """Write the relay rows after sampling: the next input token and the declared extras.

        Token ids of any integer shape are stored flat, as int64 (S3).

        The tag beside a value is the step that wrote it, a number or (1,) int64; `gather` compares it with the step the
        plan expects.
        """
        if future.indices.numel() == 0:
            return
        self.output_tokens_buf[future.indices] = next_token_ids.reshape(-1).to(torch.int64)
        self.written_by[future.indices] = step
        for name, value in extras.items():
            self.extras[name][future.indices] = value

    def gather(self, future: FutureIndices, expect_step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens (B,) int64, tag_ok (B,) bool). A wrong tag is reported with the results, not raised here."""
        return self.output_tokens_buf[future.indices], self.written_by[future.indices] == expect_step

    def published(self, future: FutureIndices) -> torch.Tensor:
        """(B,) int64 committed lengths, for a plan whose host holds bounds only."""
        return self.new_seq_lens_buf[future.indices]

    def relayed(self, name: str, future: FutureIndices) -> torch.Tensor:
        """(B, *shape) of a declared extra."""
        return self.extras[name][future.indices]

    def seed_history(self, seeds: Sequence[HistorySeed], ids: torch.Tensor) -> None:
        """`ids`: int32, the tokens of all seeds, one seed after another."""
        begin = 0
        for seed in seeds:
            end = begin + len(seed.ids)
            self.history[seed.row, : len(seed.ids)] = ids[begin:end]
            begin = end

    def write_history(self, rows: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> None:
        """Every input token at its position, draft tokens too: penalties then see all tokens before an output."""
        self.history[rows, positions] = ids.to(torch.int32)

    def history_of(self, future: FutureIndices) -> History:
        """The whole buffer by reference, and which of its rows the batch reads."""
        return History(self.history, future.indices)

    def history_tokens(self, future: FutureIndices, num_tokens: int) -> torch.Tensor:
        """(B, num_tokens) int32 copy of the rows' first positions; behind a row's known tokens lies anything."""
        return self.history[future.indices, :num_tokens]

    def resolve_seq_lens_cpu(self, req_pool_indices: Int64s, publish_ready: Event | None) -> Int64s:
        """Return the exact committed lengths (B,), int64 on the host.

        The host waits for the device here and nowhere else: for the newest lease's `publish_ready`, which is armed at
        launch, and for nothing behind it. Draft-extend may still be running (#25879, #26020).
        """
        if publish_ready is not None:
            publish_ready.synchronize()
        return self.new_seq_lens_buf.cpu().numpy()[req_pool_indices]
