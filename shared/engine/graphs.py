"""Run the model's part of a step as one captured graph instead of thousands of launches.

    worker    upload, resolve, draft | fill | replay | sample, publish, extend, stash, pack
    device                             inputs   model  logits, hidden, aux

A graph ends at the logits. So it knows nothing of sampling: penalties, grammars and log-probabilities need no graphs of
their own. A graph always uses the addresses of its capture, so inputs are copied to fixed places, and outputs lie in
fixed places until the next replay. All shapes share these places, because the forward stream runs step after step.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from dataclasses import dataclass

import torch

from shared.device.gpu import Gpu, GpuGraph
from shared.engine.buckets import Buckets, Shape
from shared.kernel.step_layout import HostLengths, Layout, equal_bounds
from shared.kv.pool import KVPool
from shared.model.interface import Carried, Model, ModelInputs, ModelOutput
from shared.observe.metric_names import EAGER_PREFIX, EAGER_REASONS

logger = logging.getLogger(__name__)
NO_MASK = {"visible": -1}  # what padding tokens have; other arrays have 0


class FixedInputs:
    """The places from which all graphs read: a step's `tokens`, (T,) int64 by name, and its `table`, (B, P) int32.

    Behind the step's own rows, tokens are padding: position 0, in page 0. Behind a row's own pages, a table keeps page
    numbers of earlier steps. Kernels may read these pages, and ignore their contents.
    """

    def __init__(self, most: Shape, num_pages: int, names: tuple[str, ...], device: torch.device) -> None:
        self.tokens = {
            name: torch.full((most.num_tokens,), NO_MASK.get(name, 0), dtype=torch.int64, device=device)
            for name in names
        }
        self.table = torch.zeros((most.batch, num_pages), dtype=torch.int32, device=device)
        self._used: Counter[str] = Counter()  # how many entries, from the first, are not padding

    def fill(self, inputs: ModelInputs) -> None:
        """Copy a step's inputs here. Runs on the forward stream."""
        layout = inputs.layout
        for name, own in inputs.per_token().items():
            fixed, num = self.tokens[name], len(own)
            fixed[:num].copy_(own)
            self._pad(name, num, fixed)
        num_rows, num_pages = layout.page_table.shape
        num_pages = min(num_pages, self.table.shape[1])
        self.table[:num_rows, :num_pages].copy_(layout.page_table[:, :num_pages])
        self._pad("table", num_rows, self.table[:, 0])

    def _pad(self, name: str, num: int, fixed: torch.Tensor) -> None:
        """Clear what a larger step has left: padding must not write to pages of others."""
        if num < self._used[name]:
            fixed[num : self._used[name]].fill_(NO_MASK.get(name, 0))
        self._used[name] = num

    def of(self, shape: Shape, most_tokens: int) -> ModelInputs:
        """Return the inputs that a graph of this shape reads."""
        device = self.table.device
        bounds = equal_bounds(shape.batch, shape.width)
        layout = Layout(
            torch.from_numpy(bounds).to(device),
            (self.table[: shape.batch],),
            shape.width,
            most_tokens,
            host=HostLengths(bounds, None, shape.batch),
        )
        own = {name: fixed[: shape.num_tokens] for name, fixed in self.tokens.items()}
        is_tree = shape.width > 1
        return ModelInputs(
            own["input_ids"],
            own["positions"],
            layout,
            logits_idx=torch.arange(shape.num_tokens, device=device),
            slots=own.get("slots") if is_tree else None,
            visible=own.get("visible") if is_tree else None,
            adapters=own["adapters"] if shape.adapted else None,
        )


@dataclass(frozen=True, slots=True)
class FixedOutputs:
    """Where all graphs leave their results, by the first indices of (E, vocab), (E, H) and (T, layers * H)."""

    logits: torch.Tensor
    hidden: torch.Tensor
    aux: torch.Tensor | None

    @classmethod
    def like(cls, output: ModelOutput) -> FixedOutputs:
        aux = None if output.aux is None else torch.empty_like(output.aux)
        return cls(torch.empty_like(output.logits), torch.empty_like(output.hidden), aux)

    def copy_from(self, output: ModelOutput) -> None:
        own = self.first(len(output.logits), len(output.logits) if output.aux is None else len(output.aux))
        own.logits.copy_(output.logits)
        own.hidden.copy_(output.hidden)
        if own.aux is not None and output.aux is not None:
            own.aux.copy_(output.aux)

    def first(self, num_outputs: int, num_tokens: int) -> ModelOutput:
        aux = None if self.aux is None else self.aux[:num_tokens]
        return ModelOutput(self.logits[:num_outputs], self.hidden[:num_outputs], aux)


@dataclass(frozen=True, slots=True)
class Captured:
    graph: GpuGraph
    inputs: ModelInputs  # kept: the graph reads their addresses

    def fits(self, inputs: ModelInputs) -> bool:
        """Return whether the step has just the arrays that the graph reads."""
        is_equal = self.inputs.per_token().keys() == inputs.per_token().keys()
        return is_equal and self.inputs.layout.arrays().keys() == inputs.layout.arrays().keys()


class GraphRunner:
    """Runs the model with the graph of a step's shape, or without a graph if there is none.

    The outputs are valid until the next step's forward. `graphed` counts steps that graphs ran. `eager` counts other
    steps by reason (EAGER_REASONS).
    """

    def __init__(
        self, model: Model, kv: KVPool, gpu: Gpu, buckets: Buckets, *, trees: bool, device: str, refused: str = ""
    ) -> None:
        """`trees`: whether windows of several tokens are trees. `refused`: why the model can't be captured, or ""."""
        self.graphed = 0
        self._refused = refused
        self.eager: Counter[str] = Counter()
        self._model, self._kv, self._gpu, self._buckets = model, kv, gpu, buckets
        self._device = torch.device(device)
        self._names = ("input_ids", "positions", *(("slots", "visible") if trees else ()))
        self._names += ("adapters",) if True in buckets.adapted else ()
        self._captured: dict[Shape, Captured] = {}

    def totals(self) -> dict[str, float]:
        return {"graph_steps": float(self.graphed)} | {
            EAGER_PREFIX + why: float(self.eager[why]) for why in EAGER_REASONS
        }

    def forward(self, model: Model, inputs: ModelInputs, kv: KVPool) -> Carried | ModelOutput:
        shape = self._buckets.shape_of(inputs)
        captured = None if isinstance(shape, str) else self._captured.get(shape)
        if captured is None:
            self.eager[shape if isinstance(shape, str) else "waits" if self._refused else "uncaptured"] += 1
            return model.forward(inputs, kv)
        assert captured.fits(inputs), f"the graph of {shape} reads other arrays than the step has"
        self.graphed += 1
        self._inputs.fill(inputs)
        captured.graph.replay()
        return self._outputs.first(len(inputs.logits_idx), len(inputs.positions))

    # Capturing

    def capture(self) -> None:
        """Run and then capture every shape, with padding rows, before the first step, on the forward stream.

        If a capture fails, log a warning. Steps of uncaptured shapes run eagerly.
        """
        if self._refused:
            logger.warning("no CUDA graphs: %s", self._refused)
            return
        started = time.monotonic()
        try:
            self._capture_all()
        except RuntimeError as error:  # memory may be full; if the device is lost, the next step fails, too
            logger.warning("no CUDA graphs for steps smaller than %s: %s", list(self._captured)[-1:], error)
        figures = (len(self._captured), len(self._buckets.shapes()), time.monotonic() - started)
        logger.info("captured CUDA graphs of %d of %d kinds of steps in %.1f s", *figures)

    def _capture_all(self) -> None:
        shapes, page_size = self._buckets.shapes(), self._kv.page_size
        num_pages = -(-self._buckets.most_tokens // page_size)
        self._inputs = FixedInputs(shapes[0], num_pages, self._names, self._device)
        memory = self._gpu.new_graph_memory()
        gc.collect()  # nothing on the device may be freed during a capture
        for shape in shapes:
            inputs = self._inputs.of(shape, self._buckets.most_tokens)
            output = self._model.forward(inputs, self._kv)
            if not self._captured:
                self._outputs = FixedOutputs.like(output)
            self._outputs.copy_from(output)
            del output
            self._gpu.synchronize(self._device)
            with self._gpu.capture(memory) as graph:
                self._outputs.copy_from(self._model.forward(inputs, self._kv))
            self._captured[shape] = Captured(graph, inputs)
