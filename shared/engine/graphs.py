"""Decode and verify steps as captured graphs: two launches where there were thousands.

    host      upload | replay A                                       | replay B                       | copy
    forward     ...  | prepare propose target sample verify publish  *| record, extend, stash, pack    | results
                                                        publish_ready |

A graph runs on the memory it was captured with. So what comes with a step is copied to one block of the device, at
places that each shape has for good; the block is free for the next step, for its copy runs behind this one's graphs.
Results are copied out of the graph behind it, so that they may travel to the host while the next step runs.

A graph reads nothing of the host: `frame_of` says what it was captured for, and steps of anything else run eagerly. It
is the worker's own code that is captured. Not yet run on a GPU.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from shared.device.gpu import Gpu, GpuGraph
from shared.engine.boundary import ALIGNED, Packed, PinnedCopies, Place, SideBySide, lay_side_by_side, size_of
from shared.engine.buckets import DRAWING, Buckets, Shape, frame_of, row_arrays
from shared.engine.compact import compact
from shared.engine.forward_batch import BothKnobs, ForwardBatch
from shared.engine.future_map import FutureIndices
from shared.engine.lease import StepLease
from shared.engine.plan import StepPlan
from shared.engine.results import named_results
from shared.engine.step_arrays import NOTHING, StepArrays, step_arrays
from shared.engine.verify import Verified, verify
from shared.engine.window import lay_out
from shared.engine.worker import OnVerifyComplete, Worker
from shared.model.interface import ModelOutput
from shared.observe.metric_names import EAGER_PREFIX, EAGER_REASONS
from shared.sample.knobs import ANY, UNFILTERED, Knobs, knobs_of

logger = logging.getLogger(__name__)
PAGES, STEP = "page_columns", "step"
MOST_BYTES = 8  # of a row's number


class StepRunner(Protocol):
    """Runs steps, each as two closures on the forward stream. The Worker is one: operator by operator."""

    def forward(self, plan: StepPlan, lease: StepLease) -> Generator[None, None, None]: ...

    def sample(
        self, plan: StepPlan, lease: StepLease, on_verify_complete: OnVerifyComplete
    ) -> Generator[None, None, Packed]: ...

    def totals(self) -> dict[str, float]:
        """Of steps so far, by the short names of metrics. Any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Frame:
    """What all steps of a shape share, on the host and on the device, and where in the block a step's own lies."""

    plan: StepPlan
    host: StepArrays[np.ndarray]
    arrays: StepArrays[torch.Tensor]
    knobs: BothKnobs
    places: Mapping[str, Place]  # the page table's is the last


@dataclass(frozen=True, slots=True)
class Captured:
    """`results`: where the second graph leaves them."""

    frame: Frame
    graphs: tuple[GpuGraph, GpuGraph]
    results: SideBySide


class GraphRunner:
    """A StepRunner: by a graph where there is one, else by the worker. All its methods run in closures on the forward
    stream. `graphed`: steps by graphs; `eager`: the others, by EAGER_REASONS."""

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
        with lease.times.drafting():  # of drafting, what keeps its state: the rest is one with the target's forward
            rest.replay()
        found = captured.results
        places = {name: place.first(plan.batch_size) for name, place in found.places.items()}
        results = SideBySide(found.block.clone(), places)
        lease.times.mark()
        yield
        return results

    def _shape_of(self, plan: StepPlan) -> Shape | str:
        shape = self._buckets.shape_of(plan, self._worker.knobs(plan.sampling))
        return shape if isinstance(shape, str) or shape in self._captured else "uncaptured"

    def _upload(self, plan: StepPlan, lease: StepLease, frame: Frame) -> None:
        """By one copy. Padded rows are zeros."""
        pages = plan.page_table[:, : self._num_pages].T
        places = dict(frame.places)
        places[PAGES] = places[PAGES].first(len(pages))
        own = row_arrays(plan, self._worker.knobs(plan.sampling))
        arrays = own | {STEP: np.asarray([plan.step], np.int64), PAGES: pages}
        self._boundary.refill(self._block, places, arrays, lease)

    # Capturing

    def capture(self) -> None:
        """Every shape, once run and then captured; at start, before anything else runs. Padded rows only: nothing is
        changed that anybody reads. Where the device or an operator refuses, what is left runs eagerly, and the log
        says so."""
        started = time.monotonic()
        try:
            self._capture_all()
        except RuntimeError as error:  # out of memory, too; a device that is lost fails the next step as well
            logger.warning("no CUDA graphs for smaller steps than %s: %s", list(self._captured)[-1:], error)
        told = (2 * len(self._captured), len(self._buckets.shapes()), time.monotonic() - started)
        logger.info("captured %d CUDA graphs of %d kinds of steps in %.1f s", *told)

    def _capture_all(self) -> None:
        device = self._worker.future_map.new_seq_lens_buf.device
        frames = {shape: self._frame(shape, device) for shape in self._buckets.shapes()}
        size = max(size_of(list(frame.places.values())) for frame in frames.values())
        self._block = torch.zeros(size, dtype=torch.uint8, device=device)
        memory = self._gpu.new_graph_memory()
        gc.collect()  # nothing of the device's is let go while a graph is captured
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
        knobs = knobs_of(plan.sampling, worker.model.spec.vocab_size)
        blind = replace(knobs, way=np.full(shape.batch, ANY if shape.filtered else UNFILTERED, np.int64))
        places = self._places(row_arrays(plan, knobs) | {STEP: np.zeros(1, np.int64)}, shape.batch)
        arrays = StepArrays(**_on_device(host.named(), device))
        return Frame(plan, host, arrays, BothKnobs(blind, Knobs(**_on_device(knobs.named(), device))), places)

    def _places(self, own: Mapping[str, np.ndarray], batch: int) -> dict[str, Place]:
        """Rows' own arrays, then page numbers (pages, batch) from a place that all shapes share: a step sends those
        that it has, and behind them lie other steps'. Nobody uses those, but they are looked up: all are pages."""
        tensors = {name: torch.from_numpy(array) for name, array in own.items()}
        places = dict(zip(tensors, lay_side_by_side(tensors), strict=True))
        begin = ALIGNED * len(tensors) + MOST_BYTES * len(tensors) * self._buckets.batches[-1]
        assert begin >= size_of(list(places.values()))
        return places | {
            PAGES: Place(begin, begin + 4 * self._num_pages * batch, (self._num_pages, batch), torch.int32)
        }

    def _first(self, frame: Frame) -> tuple[ForwardBatch, ModelOutput, Verified, torch.Tensor]:
        """Up to publish."""
        worker = self._worker
        fb, step = self._prepare(frame)
        worker.resolve(fb)
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
        """Behind publish."""
        worker = self._worker
        worker.record_drafts(fb, verified)
        worker.extend(fb, output, verified)
        worker.stash(fb, verified, step)
        packed = self._boundary.pack(named_results(frame.plan, verified))
        assert isinstance(packed, SideBySide)
        return packed

    def _prepare(self, frame: Frame) -> tuple[ForwardBatch, torch.Tensor]:
        """The step in the block, as the worker knows it."""
        sent = {name: place.of(self._block) for name, place in frame.places.items()}
        rows, lengths = sent["rows"], sent["seq_lens"]
        future = FutureIndices(rows)
        relayed = self._worker.future_map.published(future)
        committed = torch.where(lengths < 0, relayed, lengths)
        arrays = replace(
            frame.arrays,
            rows=rows,
            seq_lens=committed,
            expect_step=sent["expect_step"],
            emits=sent["emits"],
            page_table=sent[PAGES].T.contiguous(),
        )
        device = replace(frame.knobs.device, **{name: sent[name] for name in DRAWING})
        knobs = BothKnobs(frame.knobs.host, device)
        return ForwardBatch.on_device(frame.plan, frame.host, arrays, knobs, future, committed), sent[STEP]


def _on_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
