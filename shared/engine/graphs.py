"""Run a decode or verify step as two captured graphs instead of thousands of launches.

    host      upload | replay A                                       | replay B                       | copy
    forward     ...  | prepare propose target sample verify publish  *| record, extend, stash, pack    | results
                                                        publish_ready |

A graph always uses the addresses of its capture, so a step's arrays go to fixed places in one device block. All steps
can share the block, because the next upload runs after this step's graphs. Results are copied out of the graph's memory
after replay B.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from shared.device.gpu import Gpu, GpuGraph
from shared.engine.boundary import ALIGNED, Packed, PinnedCopies, Place, SideBySide, lay_side_by_side, size_of
from shared.engine.buckets import Buckets, Shape, frame_of, row_arrays
from shared.engine.compact import compact
from shared.engine.forward_batch import BothParams, ForwardBatch, host_lengths
from shared.engine.future_map import FutureIndices
from shared.engine.lease import StepLease
from shared.engine.plan import StepPlan
from shared.engine.prepare import prepare_windows
from shared.engine.results import named_results
from shared.engine.step_arrays import NOTHING, StepArrays, step_arrays
from shared.engine.verify import Verified, verify
from shared.engine.window import lay_out
from shared.engine.worker import OnVerifyComplete, Worker
from shared.kernel.step_layout import named_tables
from shared.model.interface import ModelOutput
from shared.observe.metric_names import EAGER_PREFIX, EAGER_REASONS
from shared.sample.params import ANY, DRAWING, UNFILTERED, params_of

logger = logging.getLogger(__name__)
STEP = "step"
MOST_BYTES = 8  # size of the largest entry of a row array


class StepRunner(Protocol):
    """Run a step as two closures on the forward stream, as the Worker does."""

    def forward(self, plan: StepPlan, lease: StepLease) -> Generator[None, None, None]: ...

    def sample(
        self, plan: StepPlan, lease: StepLease, on_verify_complete: OnVerifyComplete
    ) -> Generator[None, None, Packed]: ...

    def totals(self) -> dict[str, float]:
        """Return counts of steps, by the metrics' short names. Any thread may call this."""
        ...


@dataclass(frozen=True, slots=True)
class Frame:
    """The plan and arrays that all steps of a shape share."""

    plan: StepPlan
    host: StepArrays[np.ndarray]
    arrays: StepArrays[torch.Tensor]
    params: BothParams
    places: Mapping[str, Place]  # where each step's arrays lie in the block; the page tables are last


@dataclass(frozen=True, slots=True)
class Captured:
    """One shape's two graphs. The second graph leaves the step's results in `results`."""

    frame: Frame
    graphs: tuple[GpuGraph, GpuGraph]
    results: SideBySide


class GraphRunner:
    """Runs a step with the graphs of its shape. Without graphs, the worker runs the step.

    `graphed` counts steps that graphs ran. `eager` counts other steps by reason (EAGER_REASONS).
    """

    def __init__(self, worker: Worker, gpu: Gpu, buckets: Buckets, *, publishes: bool, page_size: int) -> None:
        assert isinstance(worker.boundary, PinnedCopies)
        self.graphed = 0
        self.eager: Counter[str] = Counter()
        self._worker, self._gpu, self._buckets = worker, gpu, buckets
        self._boundary = worker.boundary
        self._publishes = publishes
        self._num_pages = -(-buckets.most_tokens // page_size)
        self._captured: dict[Shape, Captured] = {}

    def totals(self) -> dict[str, float]:
        return {"graph_steps": float(self.graphed)} | {
            EAGER_PREFIX + why: float(self.eager[why]) for why in EAGER_REASONS
        }

    def forward(self, plan: StepPlan, lease: StepLease) -> Generator[None, None, None]:
        shape = self._shape_of(plan)
        if isinstance(shape, str):
            self.eager[shape] += 1
            yield from self._worker.forward(plan, lease)
            return
        self.graphed += 1
        lease.times.mark()
        self._upload(plan, lease, self._captured[shape].frame)
        yield

    def sample(
        self, plan: StepPlan, lease: StepLease, on_verify_complete: OnVerifyComplete
    ) -> Generator[None, None, Packed]:
        shape = self._shape_of(plan)
        if isinstance(shape, str):
            return (yield from self._worker.sample(plan, lease, on_verify_complete))
        captured = self._captured[shape]
        propose_to_publish, rest = captured.graphs
        propose_to_publish.replay()
        if lease.publish_ready is not None:
            lease.publish_ready.fire()
        yield
        with lease.times.drafting():  # replay B has `extend`; `propose`, in A, counts as other work
            rest.replay()
        found = captured.results
        places = {name: place.first(plan.batch_size) for name, place in found.places.items()}
        results = SideBySide(found.block.clone(), places)
        lease.times.mark()
        yield
        return results

    def _shape_of(self, plan: StepPlan) -> Shape | str:
        shape = self._buckets.shape_of(plan, self._worker.params(plan.sampling))
        return shape if isinstance(shape, str) or shape in self._captured else "uncaptured"

    def _upload(self, plan: StepPlan, lease: StepLease, frame: Frame) -> None:
        """Send the step's arrays in one copy; padding rows are zeros."""
        pages = named_tables(tuple(table[:, : self._num_pages].T for table in plan.layout.page_tables))
        places = {**frame.places} | {name: frame.places[name].first(len(table)) for name, table in pages.items()}
        own = row_arrays(plan, self._worker.params(plan.sampling))
        arrays = own | {STEP: np.asarray([plan.step], np.int64)} | pages
        self._boundary.refill(self._block, places, arrays, lease)

    # Capturing

    def capture(self) -> None:
        """Run and then capture every shape, with padding rows, before the first step.

        If a capture fails, log a warning. Steps of uncaptured shapes run eagerly.
        """
        started = time.monotonic()
        try:
            self._capture_all()
        except RuntimeError as error:  # memory may be full; if the device is lost, the next step fails, too
            logger.warning("no CUDA graphs for steps smaller than %s: %s", list(self._captured)[-1:], error)
        figures = (2 * len(self._captured), len(self._buckets.shapes()), time.monotonic() - started)
        logger.info("captured %d CUDA graphs of %d kinds of steps in %.1f s", *figures)

    def _capture_all(self) -> None:
        device = self._worker.future_map.new_seq_lens_buf.device
        frames = {shape: self._frame(shape, device) for shape in self._buckets.shapes()}
        size = max(size_of(list(frame.places.values())) for frame in frames.values())
        self._block = torch.zeros(size, dtype=torch.uint8, device=device)
        memory = self._gpu.new_graph_memory()
        gc.collect()  # nothing on the device may be freed during a capture
        for shape, frame in frames.items():
            self._second(frame, *self._first(frame))
            self._gpu.synchronize(device)
            with self._gpu.capture(memory) as first:
                made = self._first(frame)
            with self._gpu.capture(memory) as second:
                results = self._second(frame, *made)
            del made
            self._captured[shape] = Captured(frame, (first, second), results)

    def _frame(self, shape: Shape, device: torch.device) -> Frame:
        worker = self._worker
        keeps = worker.drafter is not None and worker.drafter.reads_history
        plan = frame_of(shape, self._buckets.most_tokens, keeps_history=keeps)
        host = step_arrays(plan, NOTHING)
        params = params_of(plan.sampling, worker.model.spec.vocab_size)
        blind = params | {"mode": np.full(shape.batch, ANY if shape.filtered else UNFILTERED, np.int64)}
        own = row_arrays(plan, params) | {STEP: np.zeros(1, np.int64)}
        places = self._places(own, [*named_tables(plan.layout.page_tables)], shape.batch)
        arrays = host.on_device(_on_device(host.named(), device), host_lengths(plan))
        return Frame(plan, host, arrays, BothParams(blind, _on_device(params, device)), places)

    def _places(self, own: Mapping[str, np.ndarray], tables: Sequence[str], batch: int) -> dict[str, Place]:
        """Return the places of the row arrays and, last, of each page table's numbers (pages, batch).

        The page numbers have the same offset for all shapes. Only page numbers in use are sent. Behind them the block
        keeps page numbers of earlier steps. Kernels read these old pages, too, and ignore their contents. So every old
        number must name an existing page.
        """
        tensors = {name: torch.from_numpy(array) for name, array in own.items()}
        places = dict(zip(tensors, lay_side_by_side(tensors), strict=True))
        begin = ALIGNED * len(tensors) + MOST_BYTES * len(tensors) * self._buckets.batches[-1]
        assert begin >= size_of(list(places.values()))
        shape, size = (self._num_pages, batch), 4 * self._num_pages * batch
        room = 4 * self._num_pages * self._buckets.batches[-1]
        begins = [begin + group * room for group in range(len(tables))]
        return places | {
            name: Place(at, at + size, shape, torch.int32) for name, at in zip(tables, begins, strict=True)
        }

    def _first(self, frame: Frame) -> tuple[ForwardBatch, ModelOutput, Verified, torch.Tensor]:
        worker = self._worker
        fb, step = self._prepare(frame)
        worker.record_inputs(fb)
        drafts = None
        if worker.has_drafts(frame.plan):
            drafts = worker.propose(fb)
            lay_out(fb, drafts)
        output = worker.run_model(fb)
        assert isinstance(output, ModelOutput)
        verified = verify(fb, worker.draw(fb, output.logits, drafts, None), drafts)
        if verified.order is not None:
            compact(fb, output, verified.order, worker.kv)
        if self._publishes:
            worker.future_map.publish(fb.future, verified.seq_lens, None)
        return fb, output, verified, step

    def _second(
        self, frame: Frame, fb: ForwardBatch, output: ModelOutput, verified: Verified, step: torch.Tensor
    ) -> SideBySide:
        """Run the step after `publish`. Return the packed results."""
        worker = self._worker
        worker.record_drafts(fb, verified)
        worker.extend(fb, output, verified)
        worker.stash(fb, verified, step)
        packed = self._boundary.pack(named_results(frame.plan, verified))
        assert isinstance(packed, SideBySide)
        return packed

    def _prepare(self, frame: Frame) -> tuple[ForwardBatch, torch.Tensor]:
        """Return a batch for the worker, made from the step in the block, and the step's number."""
        sent = {name: place.of(self._block) for name, place in frame.places.items()}
        rows, expected, relay = sent["rows"], sent["expect_step"], self._worker.future_map
        prepared = prepare_windows(rows, sent["seq_lens"], expected, frame.plan.width, relay)
        layout = frame.arrays.layout
        pages = {name: sent[name].T.contiguous() for name in named_tables(layout.page_tables)}
        arrays = replace(
            frame.arrays,
            rows=rows,
            seq_lens=prepared.committed,
            expect_step=expected,
            emits=sent["emits"],
            layout=layout.with_arrays(layout.arrays() | {name: sent[name] for name in layout.per_row()} | pages),
        )
        device = frame.params.device | {name: sent[name] for name in DRAWING}
        params = BothParams(frame.params.host, device)
        fb = ForwardBatch.on_device(frame.plan, frame.host, arrays, params, FutureIndices(rows), prepared)
        return fb, sent[STEP]


def _on_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
