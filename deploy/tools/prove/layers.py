"""Find the layer at which two answers differ, by computing the differing token twice in this process.

  `plainly`    Compute the prompt in one step, then the answer token by token, in one pool of pages.
  `as it ran`  Compute in the cell's chunks and pages. For a hand-off, the prompt's pages go to another pool as bytes.

Each layer's input (the residual) is compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.config.core_plan import CorePlan, num_threads
from shared.config.device_defaults import CPU
from shared.config.settings.settings import MemoryConfig
from shared.core.errors import ConfigError
from shared.kernel.code.step_layout import Layout
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.llama.llama import LlamaModel
from shared.model.loading.load import load_model
from shared.model.math.interface import ModelInputs

MOVED_BY = 3  # page numbers in the other pool are larger by this number


@dataclass(frozen=True, slots=True)
class ReplayMode:
    """A cell's settings, as far as one process can replay them."""

    page_size: int
    chunk_size: int
    hands_over: bool


PLAIN = ReplayMode(page_size=MemoryConfig().page_size, chunk_size=1 << 30, hands_over=False)


def mode_of(flags: Sequence[str]) -> ReplayMode:
    pairs = dict(zip(flags, flags[1:], strict=False))
    return ReplayMode(
        page_size=int(pairs.get("--page-size", MemoryConfig().page_size)),
        chunk_size=int(pairs.get("--chunk-size", 0)) or CPU.chunk_size,
        hands_over=pairs.get("--prefill") != "0",
    )


def name_layer(model_name: str, dtype: str, prompt: Sequence[int], answer: Sequence[int], mode: ReplayMode) -> str:
    """Return the verdict. `answer`: the tokens before the differing one."""
    model = load_model(model_name, LoadOptions(dtype, threads=num_threads(CorePlan()), kernels="separate"))
    if not isinstance(model, LlamaModel):
        raise ConfigError(f"--layers: {model_name} has no layers that could be compared")
    wanted, got = replay(model, prompt, answer, PLAIN), replay(model, prompt, answer, mode)
    return verdict(wanted, got)


def verdict(wanted: torch.Tensor, got: torch.Tensor) -> str:
    """Compare (L + 1, H) tensors: the inputs of all layers and of the head."""
    num_layers = len(wanted) - 1
    apart = (wanted - got).abs().amax(dim=1)
    differing = torch.nonzero(apart > 0).flatten().tolist()
    if not differing:
        return (
            f"replayed alone, no layer of {num_layers} differs: look at batches, order and transfer, not at the model"
        )
    first = differing[0]
    by = f"{float(apart[first]):.2g} of {float(wanted[first].abs().max()):.2g}"
    where = f"layer {first - 1} of {num_layers} (counted from 0)" if first else "the embedding"
    at_end = f"{float(apart[-1]):.2g} of {float(wanted[-1].abs().max()):.2g}"
    return f"replayed alone, {where} is the first whose output differs, by {by}; into the head it is {at_end}"


def replay(model: LlamaModel, prompt: Sequence[int], answer: Sequence[int], mode: ReplayMode) -> torch.Tensor:
    """Return the last token's layer inputs, (L + 1, H) float32."""
    num_layers = model.config.num_layers
    steps = [list(prompt[at : at + mode.chunk_size]) for at in range(0, len(prompt), mode.chunk_size)]
    row = LayerRow(model, len(prompt) + len(answer), mode.page_size)
    with torch.inference_mode():
        for number, ids in enumerate(steps):
            is_last = number + 1 == len(steps) and not answer
            seen = row.step(ids, tuple(range(num_layers)) if is_last else ())
        if mode.hands_over:
            row.move()
        for number, token in enumerate(answer):
            seen = row.step([token], tuple(range(num_layers)) if number + 1 == len(answer) else ())
    row.pool.close()
    return seen


class LayerRow:
    def __init__(self, model: LlamaModel, num_tokens: int, page_size: int) -> None:
        self._model, self._page_size = model, page_size
        self._num_groups = model.config.groups.num_groups
        self._num_pages = -(-num_tokens // page_size) * self._num_groups
        self._first = 1
        self._length = 0
        self.pool = self._new_pool()

    def _new_pool(self) -> KVPool:
        return KVPool(self._model.kv_planes(self._page_size), 1 + MOVED_BY + self._num_pages, self._page_size)

    def step(self, ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
        """Append tokens. Return the last token's layer inputs, (len(layers) + 1, H)."""
        self._model.capture_aux(layers)
        start, self._length = self._length, self._length + len(ids)
        pages = torch.arange(self._first, self._first + self._num_pages, dtype=torch.int32)
        inputs = ModelInputs(
            input_ids=torch.tensor(ids),
            positions=torch.arange(start, self._length),
            layout=Layout(
                cu_q_lens=torch.tensor([0, len(ids)], dtype=torch.int32),
                page_tables=pages.view(self._num_groups, 1, -1).unbind(),
                max_q_len=len(ids),
                max_seq_len=self._length,
            ),
            logits_idx=torch.tensor([len(ids) - 1]),
        )
        output = self._model.forward(inputs, self.pool)
        last = [output.hidden[-1].float()]
        if output.aux is not None:
            last = [*output.aux[-1].float().view(len(layers), -1), *last]
        return torch.stack(last)

    def move(self) -> None:
        """Move the pages like a decode node's pull: as bytes, to other page numbers."""
        source, self.pool = self.pool, self._new_pool()
        for page in range(self._num_pages):
            self.pool.page_view(self._first + MOVED_BY + page)[:] = source.page_view(self._first + page)
        self._first += MOVED_BY
        source.close()
