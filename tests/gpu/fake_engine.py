"""The engine on fake tensors of the device "cuda": scheduler and host are real, what closures compute has no values.

host      plan            StepArrays                          read: invented results
closure          upload (fake)  forward, sample (fake)  download (fake)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from shared.core.errors import BatonError
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.device.events import Event, Ticket
from shared.device.inline import InlineStream
from shared.device.stream import Closure, run_to_end
from shared.device.streams import StreamSet
from shared.engine.boundary import HostCopy, Packed, PinnedCopies, SlotHolder
from shared.engine.drafter import Drafter
from shared.engine.future_map import FutureIndices, FutureMap
from shared.engine.lease import StepLease
from shared.engine.plan import StepPlan
from shared.model.formats.opened import LoadOptions
from shared.model.formats.tensor_files import TensorFiles
from shared.model.llama.eagle_file import HeadFolder
from shared.model.loading.load import load_eagle_head, load_model
from shared.model.math.interface import Model
from shared.model.math.kernels import Formats
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.records.core import NodeCore
from shared.sched.steps.settings import SchedSettings
from shared.speculation.eagle import EagleWorkerV2
from shared.speculation.ngram import NgramWorkerV2
from tests.gpu.failed_steps import no_failed_steps
from tests.support.gpus.cuda_core import Kind, folder_of
from tests.support.models.draft_head import VOCAB

R = TypeVar("R")
CUDA = torch.device("cuda")
FEWEST_STEPS = 10
KINDS = {
    "plain": Kind(),
    "n-gram": Kind(spec="ngram"),
    "chain": Kind(spec="chain"),
    "tree": Kind(spec="tree"),
    "int8 KV": Kind(kv="int8"),
    "sliding windows": Kind("gemma3"),
    "a mixture of experts": Kind("qwen3-moe"),
}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "num_logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": ((7, 2.0),)},
    {"temperature": 0.7, "top_k": 9, "bad_words": ((3,), (5, 6)), "min_tokens": 6, "stop_token_ids": (11, 12)},
    {"temperature": 0.7, "allowed_token_ids": (1, 2, 3), "min_p": 0.1},
)


class HostKnowsItsOwn(FakeTensorMode):
    """Computes what is asked of the host's own tensors alone: their values are there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        leaves = any(isinstance(value, torch.device) and value.type != "cpu" for value in given)
        if tensors and not leaves and all(type(tensor) is torch.Tensor for tensor in tensors):
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


class FakeStream(InlineStream):
    """Runs closures at once, on fake tensors."""

    def __init__(self, name: str, mode: FakeTensorMode) -> None:
        super().__init__(name)
        self._mode = mode

    def launch(self, fn: Closure[R], fires: Sequence[Event] = (), label: str = "") -> Ticket[R]:
        def run() -> R:
            with self._mode, torch.inference_mode(False), torch.no_grad():
                return run_to_end(fn)

        return super().launch(run, fires, label)


@dataclass(frozen=True, slots=True)
class Invented:
    """Results of a step, on the host: each row that emits has got token 0."""

    plan: StepPlan
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    def read(self) -> dict[str, torch.Tensor]:
        plan = self.plan
        found = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in self.shapes.items()}
        emitted = torch.from_numpy(plan.emits.astype(np.int64))
        is_chunk = torch.arange(plan.batch_size) < plan.num_prefill
        taken = torch.where(is_chunk, torch.from_numpy(plan.q_lens.astype(np.int64)), emitted)
        found["accept_lens"] = emitted.to(found["accept_lens"].dtype)
        found["seq_lens"] = (torch.from_numpy(plan.seq_lens_cpu) + taken).to(found["seq_lens"].dtype)
        found["tag_ok"] = torch.ones_like(found["tag_ok"])
        return found


class FakeCopies(PinnedCopies):
    """Both copies are checked; what comes home is invented."""

    def __init__(self) -> None:
        super().__init__(CUDA, lambda size: torch.empty(size, dtype=torch.uint8))

    def download(self, packed: Packed, holder: SlotHolder) -> HostCopy:
        super().download(packed, holder)
        assert isinstance(holder, StepLease) and isinstance(holder.work, StepPlan)
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in packed.tensors.items()}
        return Invented(holder.work, shapes)


def run_steps(name: str) -> str:
    """Requests with all sampling parameters, to their ends. What a closure raises ends them with an error."""
    core = fake_core(KINDS[name])
    for number, knobs in enumerate(SAMPLINGS):
        sampling = SamplingParams(max_tokens=8, **knobs)
        prompt = np.arange(5 + 9 * number, dtype=np.int64) % 50
        core.submit(Request(RequestKey("fake", 1, f"r{number}", 0, 0), NodeAsk(prompt, sampling, number), number))
    with no_failed_steps():
        while not core.idle:
            core.step(block=True)
    steps = core.loop.num_steps
    core.close()
    assert steps >= FEWEST_STEPS, steps
    return f"{steps} steps"


SPOILS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a tensor of the host": lambda tokens: tokens.cpu(),
    "a value that the host reads": lambda tokens: tokens + int(tokens.sum()),
}


def run_spoiled(name: str) -> str:
    """Steps with a fault in them must fail."""
    real = FutureMap.stash

    def stash(self: FutureMap, future: FutureIndices, next_token_ids: torch.Tensor, step: int, **extras: Any) -> None:
        real(self, future, SPOILS[name](next_token_ids), step, **extras)

    with patch.object(FutureMap, "stash", stash):
        try:
            run_steps("plain")
        except (AssertionError, BatonError) as error:
            return f"refused: {str(error).splitlines()[0][:120]}"
    raise AssertionError("nobody saw it")


def fake_core(kind: Kind) -> NodeCore:
    folders = {name: str(folder_of(name)) for name in (kind.family, "head", "draft target")}
    mode = HostKnowsItsOwn(allow_non_fake_inputs=True)
    streams = StreamSet(*(FakeStream(name, mode) for name in ("forward", "copy", "transfer", "cold")))
    settings = SchedSettings(16, 128, chunk_size=16, mixed_chunk_size=16, width=kind.width, device="cuda")
    options = LoadOptions("float32", kernels="torch", formats=Formats(kv=kind.kv))
    with mode, real_files():
        model = load_model(folders[kind.family], options, "cuda")
        return assemble_core(
            model, streams, settings, CoreSizes(60, 8, prefix_cache=False),
            drafter=drafter_of(kind, model, folders), overlap=False, boundary=FakeCopies(),
        )  # fmt: skip


@contextmanager
def real_files() -> Iterator[None]:
    """Files are read as ever, outside of the mode: what they hold is known."""
    with ExitStack() as stack:
        for owner, name in ((TensorFiles, "tensor"), (HeadFolder, "__init__")):
            stack.enter_context(patch.object(owner, name, unfaked(getattr(owner, name))))
        yield


def unfaked(method: Callable[..., R]) -> Callable[..., R]:
    def run(*args: Any, **kwargs: Any) -> R:
        with unset_fake_temporarily():
            return method(*args, **kwargs)

    return run


def drafter_of(kind: Kind, model: Model, folders: Mapping[str, str]) -> Drafter | None:
    if kind.spec == "none":
        return None
    if kind.spec == "ngram":
        return NgramWorkerV2()
    head = load_eagle_head(folders["head"], folders["draft target"], model, kernels="torch")  # type: ignore[arg-type]
    model.capture_aux(head.aux_layers)  # type: ignore[attr-defined]
    return EagleWorkerV2(head, VOCAB, *((2, 3) if kind.spec == "tree" else (1, 1)))
