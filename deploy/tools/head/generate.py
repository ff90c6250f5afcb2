"""Generate many greedy continuations at a time, in ragged steps over paged KV, without the scheduler.

A finished row is free before the next step, so another prompt joins that step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from shared.kernel.code.step_layout import Layout
from shared.kv.layout import page_windows
from shared.kv.pool import KVPool
from shared.model.math.interface import Model, ModelInputs

PAGE = 16


@dataclass(frozen=True, slots=True)
class Task:
    """`key`: the caller's name for the task. `limit`: the most ids to make."""

    key: int
    prompt: tuple[int, ...]
    limit: int


@dataclass(slots=True)
class GeneratedRow:
    task: Task
    made: list[int] = field(default_factory=list)
    computed: int = 0

    def due(self) -> list[int]:
        """Return the ids that have no KV yet."""
        return [*self.task.prompt, *self.made][self.computed :]


class Generator:
    """Own the KV memory of `rows` sequences of at most `longest` tokens, prompt included."""

    def __init__(self, model: Model, rows: int, longest: int, device: torch.device) -> None:
        self._model = model
        self._device = device
        planes = model.kv_planes(PAGE)
        self._num_groups = len(page_windows(planes))
        self._pages = -(-longest // PAGE) * self._num_groups
        self._longest = longest
        self._pool = KVPool(planes, rows * self._pages + 1, PAGE, device)
        self._rows: list[GeneratedRow | None] = [None] * rows

    def close(self) -> None:
        self._pool.close()

    @torch.inference_mode()
    def run(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, list[int]]]:
        """Yield each continuation when it ends, with its end id if it has one.

        A task is taken when a row is free. A prompt without room for a token yields an empty continuation.
        """
        waiting = iter(tasks)
        while True:
            for slot in [n for n, row in enumerate(self._rows) if row is None]:
                task = next(waiting, None)
                while task is not None and len(task.prompt) + 1 > self._longest:
                    yield task, []
                    task = next(waiting, None)
                if task is not None:
                    self._rows[slot] = GeneratedRow(task)
            busy = [n for n, row in enumerate(self._rows) if row is not None]
            if not busy:
                return
            yield from self._step(busy)

    def _step(self, busy: Sequence[int]) -> Iterator[tuple[Task, list[int]]]:
        rows = [row for n in busy if (row := self._rows[n]) is not None]
        best = self._model.forward(self._inputs(busy, rows), self._pool).logits.argmax(dim=-1).tolist()
        for slot, row, token in zip(busy, rows, best, strict=True):
            row.computed += len(row.due())
            row.made.append(token)
            ended = row.made[-1] in self._model.spec.eos_ids
            if ended or len(row.made) == row.task.limit or row.computed + 1 == self._longest:
                self._rows[slot] = None
                yield row.task, row.made

    def _inputs(self, busy: Sequence[int], rows: Sequence[GeneratedRow]) -> ModelInputs:
        due = [row.due() for row in rows]
        lengths = torch.tensor([0, *map(len, due)])
        ends = lengths.cumsum(0)
        positions = [torch.arange(row.computed, row.computed + len(ids)) for row, ids in zip(rows, due, strict=True)]
        pages = 1 + torch.tensor(busy).unsqueeze(1) * self._pages + torch.arange(self._pages)
        pages = pages.to(self._device, torch.int32).view(len(busy), self._num_groups, -1)
        return ModelInputs(
            input_ids=torch.tensor([token for ids in due for token in ids], device=self._device),
            positions=torch.cat(positions).to(self._device),
            layout=Layout(
                cu_q_lens=ends.to(self._device, torch.int32),
                page_tables=pages.unbind(1),
                max_q_len=int(lengths.max()),
                max_seq_len=max(row.computed + len(ids) for row, ids in zip(rows, due, strict=True)),
            ),
            logits_idx=(ends[1:] - 1).to(self._device),
        )
