"""Triton's kernels on the device, one by one, beside the reference on the CPU. Without a GPU they run in Triton's
interpreter, which shows that the checks themselves are right."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from shared.kernel.attention.attention import TorchAttention
from shared.sample.interface import History, SampleOutput, SamplingBatch, TokenMasks
from shared.sample.sampler_numba import sample_cpu
from tests.gpu.place import Place
from tests.gpu.plan import NotHere
from tests.support.cores.sampling_cases import VOCAB, masks_on, rows_on, windows
from tests.support.cores.sampling_cases import Case as Draws
from tests.support.kernels.attention_cases import CASES, Case
from tests.support.kernels.paged_steps import tables_of

CPU = torch.device("cpu")
TINY_CASES = ("decode", "int8", "chunk")
NUM_DRAWS, NUM_TINY_DRAWS = 20, 1
# Of results around 1: the reference sums in another order, and bfloat16 rounds the weights of the keys as well.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPS = 1e-5
KNOBS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "top-p and top-k": {"top_p": 0.9, "top_k": 50}}


def kernels(place: Place, name: str) -> ModuleType:
    """Return a module of shared.gpu_kernel: compiled by a GPU, interpreted elsewhere."""
    if not place.tiny:
        return importlib.import_module(f"shared.gpu_kernel.{name}")
    try:
        from tests.support.kernels import interpreter
    except ImportError as missing:
        raise NotHere(f"kernels can't be interpreted here: {missing}") from missing
    return interpreter.kernels(name)


def device_of(place: Place) -> torch.device:
    """The interpreter reads the host's memory."""
    return CPU if place.tiny else place.gpu.device


def attention(place: Place, products: str) -> dict[str, object]:
    """Every case of the interpreter's tests, or in bfloat16 those of float32: near the reference, and with the same
    bits in a second run."""
    triton, device = kernels(place, "attention"), device_of(place)
    far: dict[torch.dtype, float] = {}
    for case in cases(place, products):
        step = case.step()
        wanted = step.run(TorchAttention(case.shape, tables_of(case.shape), tables_of(case.shape, 500.0)))
        tables, local = (tuple(of.to(device) for of in tables_of(case.shape, theta)) for theta in (10000.0, 500.0))
        there = step.to(device)
        got, again = (there.run(triton.TritonAttention(case.shape, tables, local)).cpu() for _ in range(2))
        assert torch.equal(got, again), f"{case}: two runs differ"
        assert got.isfinite().all(), f"{case}: a slot was read that holds nothing"
        difference = float((got.float() - wanted.float()).abs().max())
        assert difference < TOLERANCE[case.dtype], f"{case}: {difference} from the reference"
        far[case.dtype] = max(far.get(case.dtype, 0.0), difference)
    return {f"largest difference of attention, {dtype}": value for dtype, value in far.items()}


def cases(place: Place, products: str) -> Iterator[Case]:
    if place.tiny:
        yield from (CASES[name] for name in TINY_CASES)
        return
    for case in CASES.values():
        if products == "as they are":
            yield case
        elif case.dtype == torch.float32:
            yield replace(case, dtype=torch.bfloat16)


def draws(place: Place) -> dict[str, object]:
    """Ids of every set of sampling parameters, plain, on drafts and under masks: the CPU's, bit for bit."""
    kernels(place, "sample")
    from shared.sample.sampler_triton import sample_triton

    def sample(
        logits: torch.Tensor,
        batch: SamplingBatch,
        row_of: np.ndarray,
        positions: torch.Tensor,
        history: History | None,
        masks: TokenMasks | None = None,
    ) -> SampleOutput:
        there = None if masks is None else masks_on(masks, logits.device)
        return sample_triton(logits, rows_on(batch, row_of, logits), positions, history, there)

    device, count = str(device_of(place)), NUM_TINY_DRAWS if place.tiny else NUM_DRAWS
    for seed in range(count):
        plain = Draws(seed, 1 if place.tiny else 3, num_logprobs=seed % 5 - 1)
        cases = {"": plain} if place.tiny else {"": plain, " on drafts": windows(seed)[0]}
        for told, case in cases.items():
            for masks in (None, masks_of(case, seed)):
                got = case.run(partial(sample, masks=masks), device).ids
                if place.computes:
                    wanted = case.run(partial(sample_cpu, masks=masks)).ids
                    assert torch.equal(got.cpu(), wanted), f"ids of case {seed}{told}{', masked' if masks else ''}"
    return {"batches drawn by kernels": count}


def masks_of(case: Draws, seed: int) -> TokenMasks:
    """Half of the outputs may take about half of the ids."""
    rng = np.random.default_rng(seed)
    rows = np.where(rng.random(len(case.rows)) < 0.5, np.arange(len(case.rows)), -1)
    return TokenMasks(rows, rng.integers(0, 2**32, (len(rows), -(-VOCAB // 32)), dtype=np.uint32))
