"""Run the model's part of a step as one captured graph instead of thousands of launches.

    worker    upload, resolve, draft | fill | replay | sample, publish, extend, stash, pack
    device                             inputs   model  logits, hidden, aux

A graph ends at the logits. So it knows nothing of sampling: penalties, grammars and log-probabilities need no graphs of
their own. A graph always uses the addresses of its capture, so inputs are copied to fixed places, and outputs lie in
fixed places until the next replay. All shapes share these places, because the forward stream runs step after step.

A graph of prompts has fixed numbers of rows and tokens. Which row owns which token is an input, on the device:

    cu_q_lens    0 | 5 | 12 | 64 | 64 ...       two rows, then the row of the padding tokens, then empty rows
    page table   a | b |  0 | 0  | 0 ...
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shared.device.gpu import Gpu, GpuGraph
from shared.engine.buckets import AnyShape, Buckets, PromptShape
from shared.kernel.code.step_layout import HostLengths, Layout, equal_bounds, named_tables
from shared.kv.layout import page_windows
from shared.kv.pool import KVPool
from shared.model.math.interface import Carried, Model, ModelInputs, ModelOutput
from shared.observe.metric_names import EAGER_PREFIX, EAGER_REASONS

logger = logging.getLogger(__name__)
NO_MASK = {"visible": -1}  # what padding tokens have; other arrays have 0


class FixedInputs:
    """The places from which all graphs read: a step's `tokens`, (T,) int64 by name, and its `tables`, (B, P) int32.

    Behind the step's own rows, tokens are padding: position 0, in page 0. Behind a row's own pages, a table keeps page
    numbers of earlier steps. Kernels may read these pages, and ignore their contents.
    """

    def __init__(
        self,
        shapes: Sequence[AnyShape],
        num_pages: int,
        names: tuple[str, ...],
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        num_tokens, batch = (max(sizes) for sizes in zip(*((of.num_tokens, of.batch) for of in shapes), strict=True))
        self.tokens = {
            name: torch.full((num_tokens,), NO_MASK.get(name, 0), dtype=torch.int64, device=device) for name in names
        }
        self.device = device
        self.tables = tuple(torch.zeros(batch, num_pages, dtype=torch.int32, device=device) for _ in range(num_groups))
        self._used: Counter[str] = Counter()  # how many entries, from the first, are not padding

    def fill(self, inputs: ModelInputs, read: ModelInputs) -> None:
        """Copy a step's inputs to the places that its graph reads: see `of`. Runs on the forward stream."""
        layout = inputs.layout
        for name, own in inputs.per_token().items():
            fixed, num = self.tokens[name], len(own)
            fixed[:num].copy_(own)
            self._pad(name, num, fixed)
        for (name, table), fixed in zip(named_tables(layout.page_tables).items(), self.tables, strict=True):
            num_rows, num_pages = len(table), min(table.shape[1], fixed.shape[1])
            fixed[:num_rows, :num_pages].copy_(table[:, :num_pages])
            self._pad(name, num_rows, fixed[:, 0])
        if read.layout.host is not None and read.layout.host.varies:
            divide(inputs, read)

    def _pad(self, name: str, num: int, fixed: torch.Tensor) -> None:
        """Clear what a larger step has left: padding must not write to pages of others."""
        if num < self._used[name]:
            fixed[num : self._used[name]].fill_(NO_MASK.get(name, 0))
        self._used[name] = num

    def of(self, shape: AnyShape) -> ModelInputs:
        """Return the inputs that a graph of this shape reads."""
        device, own = self.device, {name: fixed[: shape.num_tokens] for name, fixed in self.tokens.items()}
        is_prompt = isinstance(shape, PromptShape)
        if isinstance(shape, PromptShape):
            bounds, width = np.full(shape.batch + 1, shape.num_tokens, np.int32), shape.num_tokens
            bounds[0] = 0
        else:
            bounds, width = equal_bounds(shape.batch, shape.width), shape.width
        layout = Layout(
            torch.from_numpy(bounds).to(device),
            tuple(table[: shape.batch] for table in self.tables),
            width,
            shape.length,
            host=HostLengths(bounds, None, 0 if is_prompt else shape.batch, varies=is_prompt),
        )
        is_tree = width > 1 and not is_prompt
        return ModelInputs(
            own["input_ids"],
            own["positions"],
            layout,
            logits_idx=torch.arange(shape.num_outputs, device=device) * (not is_prompt),
            slots=own.get("slots") if is_tree else None,
            visible=own.get("visible") if is_tree else None,
            adapters=own["adapters"] if shape.adapted else None,
        )


def divide(inputs: ModelInputs, read: ModelInputs) -> None:
    """Copy to a graph of prompts how a step's tokens are divided among rows, and which want logits.

    The row behind the last one owns the padding tokens, which no row of a request may own. Later rows are empty. Behind
    the step's own outputs, an earlier step's indices stay: they are tokens of this graph, too, and the engine does not
    read their logits."""
    own, fixed = inputs.layout.cu_q_lens, read.layout.cu_q_lens
    fixed[: len(own)].copy_(own)
    fixed[len(own) :].fill_(len(read.input_ids))
    read.logits_idx[: len(inputs.logits_idx)].copy_(inputs.logits_idx)


@dataclass(frozen=True, slots=True)
class FixedOutputs:
    """Where all graphs leave their results, by the first indices of (E, vocab), (E, H) and (T, layers * H)."""

    logits: torch.Tensor
    hidden: torch.Tensor
    aux: torch.Tensor | None

    @classmethod
    def like(cls, output: ModelOutput, shapes: Sequence[AnyShape]) -> FixedOutputs:
        """Return places for the outputs of all shapes, of which `output` is one's."""
        num_outputs, num_tokens = max(of.num_outputs for of in shapes), max(of.num_tokens for of in shapes)

        def places(like: torch.Tensor, num: int) -> torch.Tensor:
            return like.new_empty((num, *like.shape[1:]))

        aux = None if output.aux is None else places(output.aux, num_tokens)
        return cls(places(output.logits, num_outputs), places(output.hidden, num_outputs), aux)

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

    The outputs are valid until the next step's forward. `graphed` counts steps that graphs ran, and `graphed_prompts`
    those of prompts among them. `eager` counts other steps by reason (EAGER_REASONS).
    """

    def __init__(
        self, model: Model, kv: KVPool, gpu: Gpu, buckets: Buckets, *, trees: bool, device: str, refused: str = ""
    ) -> None:
        """`trees`: whether windows of several tokens are trees. `refused`: why the model can't be captured, or ""."""
        self.graphed = self.graphed_prompts = 0
        self._refused = refused
        self.eager: Counter[str] = Counter()
        self._model, self._kv, self._gpu, self._buckets = model, kv, gpu, buckets
        self._device = torch.device(device)
        self._names = ("input_ids", "positions", *(("slots", "visible") if trees else ()))
        self._names += ("adapters",) if True in buckets.adapted else ()
        self._captured: dict[AnyShape, Captured] = {}
        self._inputs: FixedInputs | None = None
        self._outputs: FixedOutputs | None = None
        self._memory: object = None  # what new_graph_memory returns
        self._plan_graph = getattr(model, "plan_graph", None)  # of attention that plans each run on the host

    def totals(self) -> dict[str, float]:
        return {"graph_steps": float(self.graphed), "graph_prompt_steps": float(self.graphed_prompts)} | {
            EAGER_PREFIX + why: float(self.eager[why]) for why in EAGER_REASONS
        }

    def forward(self, model: Model, inputs: ModelInputs, kv: KVPool) -> Carried | ModelOutput:
        """`inputs.layers` is not told of layers: the worker says that all are ready when the graph has run."""
        shape = self._buckets.shape_of(inputs)
        captured = None if isinstance(shape, str) else self._captured.get(shape)
        if captured is None:
            self.eager[shape if isinstance(shape, str) else "waits" if self._refused else "uncaptured"] += 1
            return model.forward(inputs, kv)
        assert captured.fits(inputs), f"the graph of {shape} reads other arrays than the step has"
        assert self._inputs is not None and self._outputs is not None
        self.graphed += 1
        self.graphed_prompts += isinstance(shape, PromptShape)
        self._inputs.fill(inputs, captured.inputs)
        if self._plan_graph is not None:
            self._plan_graph(captured.inputs, inputs.layout.host, kv.page_size)
        captured.graph.replay()
        return self._outputs.first(len(inputs.logits_idx), len(inputs.positions))

    # Capturing

    def capture(self) -> None:
        """Run and then capture every shape, with padding rows, before the first step, on the forward stream.

        Shapes whose capture fails are named in the log, and their steps run eagerly. Smaller shapes may still succeed.
        """
        if self._refused:
            logger.warning("no CUDA graphs: %s", self._refused)
            return
        started, shapes = time.monotonic(), self._buckets.shapes()
        failed: dict[AnyShape, str] = {}
        gc.collect()  # nothing on the device may be freed during a capture
        for number, shape in enumerate(shapes):
            try:
                self._capture_one(shape, shapes[number:])
            except RuntimeError as error:  # memory may be full; if the device is lost, the next step fails, too
                failed[shape] = str(error)
            if shape in failed:
                self._clean_up()
        if failed:
            missing, why = ", ".join(map(str, failed)), next(iter(failed.values()))
            logger.warning("no CUDA graphs for steps of %s: %s", missing, why)
        figures = (len(self._captured), len(shapes), time.monotonic() - started)
        logger.info("captured CUDA graphs of %d of %d kinds of steps in %.1f s", *figures)

    def _clean_up(self) -> None:
        """Free what a failed capture has left: without a graph, also the places and the pool, which torch lets go."""
        if not self._captured:
            self._inputs = self._outputs = self._memory = None
        gc.collect()

    def _capture_one(self, shape: AnyShape, left: Sequence[AnyShape]) -> None:
        """`left`: the shape and all that come later. Raises RuntimeError."""
        if self._inputs is None:
            num_pages = -(-self._buckets.lengths[-1] // self._kv.page_size)
            num_groups = len(page_windows(self._kv.planes))
            self._inputs = FixedInputs(left, num_pages, self._names, self._device, num_groups)
            self._memory = self._gpu.new_graph_memory()
        inputs = self._inputs.of(shape)
        if self._plan_graph is not None:
            self._plan_graph(inputs, None, self._kv.page_size)
        output = self._model.forward(inputs, self._kv)
        outputs = self._outputs = self._outputs or FixedOutputs.like(output, left)
        outputs.copy_from(output)
        del output
        self._gpu.synchronize(self._device)
        self._gpu.release_cached(self._device)  # torch can't do it itself during a capture
        with self._gpu.capture(self._memory) as graph:
            outputs.copy_from(self._model.forward(inputs, self._kv))
        self._captured[shape] = Captured(graph, inputs)
