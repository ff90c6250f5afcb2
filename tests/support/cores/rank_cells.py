"""Cells of the matrix of ranks: how many each of two nodes has, what carries the pages, and what else may show in a
stream and must not. Ranks are threads with their real groups; gloo is real, shared memory is the system's."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from shared.config.settings.settings import SpecConfig
from shared.core.sampling_params import SamplingParams
from shared.device.group import RankGroup
from shared.engine.drafter import Drafter
from shared.kernel.team.team import Team as Threads
from shared.model.formats.opened import LoadOptions
from shared.model.hashlm.model import HashLM
from shared.model.hashlm.shard import HashLMShard
from shared.model.loading.load import load_model
from shared.model.loading.shard import load_shard
from shared.model.math.interface import Model
from shared.node.loop.node import Node
from shared.speculation.drafters import make_drafter
from shared.transfer.transports import open_group
from tests.support.cores.core_rig import MAX_CONTEXT, CoreKnobs, Job, draw_jobs, make_core, retract_somebody, run_local
from tests.support.cores.tp_rig import Team, followers
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.draft_head import head_config, head_tensors, save_head
from tests.support.models.tiny_llama import VOCAB, write_tiny_llama
from tests.support.worlds.node_pair import Net, make_node

MAIN_AXES: dict[str, tuple] = {"transport": ("shm", "zmq", "gloo"), "prefill": (1, 2, 4), "decode": (1, 2, 4)}
AXES: dict[str, tuple] = MAIN_AXES | {
    "drafts": ("none", "ngram", "chain", "tree"),
    "retract": (True, False),
    "offload": (True, False),
    "in_parts": (True, False),  # pages travel layer by layer
    "backend": ("cpu", "inline"),
    "temperature": (0.0, 0.8),
}
DRAFTS: dict[str, dict] = {
    "none": {},
    "ngram": {"spec": "ngram", "width": 4},
    "chain": {"spec": "eagle", "width": 4},
    "tree": {"spec": "eagle", "width": 7, "topk": 2, "steps": 2},
}
KNOBS = CoreKnobs(chunk_size=16, page_size=4, num_pages=120)
NUM_JOBS = 6
RETRACT_EVERY, MAX_RETRACTIONS = 25, 8
TURN_S = 0.001  # so that ranks, which are threads here, need not wait for the interpreter at each of their meetings


@dataclass(frozen=True)
class RankCell:
    transport: str
    prefill: int
    decode: int
    drafts: str
    retract: bool
    offload: bool
    in_parts: bool
    backend: str
    temperature: float

    def __str__(self) -> str:
        return "-".join(str(getattr(self, axis.name)) for axis in fields(self))

    def pairs(self) -> set[tuple[str, object, str, object]]:
        values = [(axis.name, getattr(self, axis.name)) for axis in fields(self)]
        return {(*one, *other) for one, other in itertools.combinations(values, 2)}


def all_pairs() -> set[tuple[str, object, str, object]]:
    axes = itertools.combinations(AXES.items(), 2)
    return {(one, a, other, b) for (one, values), (other, others) in axes for a in values for b in others}


def draw(rng: random.Random, **fixed: object) -> RankCell:
    return RankCell(**{name: fixed.get(name, rng.choice(values)) for name, values in AXES.items()})  # type: ignore[arg-type]


def some_cells(seed: int) -> list[RankCell]:
    """Few that together have every pair of values."""
    rng, cells, left = random.Random(seed), [], all_pairs()
    while left:
        first, a, second, b = min(left, key=str)
        candidates = [draw(rng, **{first: a, second: b}) for _ in range(200)]
        cells.append(max(candidates, key=lambda cell: len(cell.pairs() & left)))
        left -= cells[-1].pairs()
    return cells


def all_cells(seed: int) -> list[RankCell]:
    """Every transport with every two numbers of ranks; the rest is drawn."""
    rng = random.Random(seed)
    return [draw(rng, **dict(zip(MAIN_AXES, values, strict=True))) for values in itertools.product(*MAIN_AXES.values())]


class Kind(Protocol):
    """A model, whole and in shares, its draft heads, and what its streams must be."""

    def whole(self) -> Model: ...

    def share(self, group: RankGroup) -> Model: ...

    def drafter(self, model: Model, drafts: str) -> Drafter | None:
        """None: as the knobs say."""
        ...

    def jobs(self, temperature: float) -> list[Job]: ...

    def expected(self, jobs: Sequence[Job]) -> list[list[int]]: ...


def some_jobs(temperature: float) -> list[Job]:
    return draw_jobs(random.Random(str(temperature)), NUM_JOBS, temperature, max_prompt=60)


class HashKind:
    """HashLM, and the plain reference."""

    def whole(self) -> Model:
        return HashLM(max_context=MAX_CONTEXT)

    def share(self, group: RankGroup) -> Model:
        return HashLMShard(group, MAX_CONTEXT)

    def drafter(self, model: Model, drafts: str) -> Drafter | None:
        return None

    def jobs(self, temperature: float) -> list[Job]:
        return some_jobs(temperature)

    def expected(self, jobs: Sequence[Job]) -> list[list[int]]:
        return [job.expected() for job in jobs]


class LlamaKind:
    """8 query and 4 KV heads, and an EAGLE head, all random."""

    def __init__(self, folder: Path) -> None:
        self._model = str(write_tiny_llama(folder / "model", layers=8))
        ids = head_tensors()["t2d"].nonzero().flatten()
        t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
        config = head_config() | {"vocab_size": VOCAB}
        self._head = str(save_head(folder / "head", head_tensors() | {"t2d": t2d}, config))

    def whole(self) -> Model:
        return load_model(self._model, LoadOptions("float32", max_context=MAX_CONTEXT))

    def share(self, group: RankGroup) -> Model:
        return load_shard(self._model, LoadOptions("float32", max_context=MAX_CONTEXT), group)

    def drafter(self, model: Model, drafts: str) -> Drafter | None:
        if drafts == "none":
            return None
        knobs = DRAFTS[drafts]
        tree = {"spec_topk": knobs["topk"], "spec_steps": knobs["steps"]} if "topk" in knobs else {}
        head = {"spec_head": self._head} if knobs["spec"] == "eagle" else {}
        spec = SpecConfig(spec=knobs["spec"], spec_width=knobs["width"], spec_copies=0, **tree, **head)
        return make_drafter(spec, self._model, model, Threads())

    def jobs(self, temperature: float) -> list[Job]:
        """Short answers: each step is dozens of meetings."""
        return [replace(job, sampling=bounded(job.sampling)) for job in some_jobs(temperature)]

    def expected(self, jobs: Sequence[Job]) -> list[list[int]]:
        """One rank's, without anything that might show."""
        core = make_core(replace(KNOBS, prefix_cache=False), model=self.whole())  # type: ignore[arg-type]
        try:
            streams = run_local(core, jobs).streams
        finally:
            core.close()
        return [streams[f"r{job.rid}"] for job in jobs]


def bounded(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, max_tokens=min(sampling.max_tokens, 30), stop_token_ids=(1,))


@contextlib.contextmanager
def node_of(kind: Kind, cell: RankCell, role: str, size: int) -> Iterator[Node]:
    """A node whose ranks live as long as it does."""
    knobs = replace(KNOBS, backend=cell.backend, layer_ends=(1,) if cell.in_parts else (), **DRAFTS[cell.drafts])
    knobs = replace(knobs, cold_pages=60 if cell.offload else 0)
    shares_memory = size > 1 or (role == "prefill" and cell.transport == "shm")
    with followers(size, kind.share) if size > 1 else contextlib.nullcontext() as team:
        model = kind.whole() if team is None else team.model
        core = make_core(
            replace(knobs, shared_memory=shares_memory),
            drafter=kind.drafter(model, cell.drafts),
            model=model,  # type: ignore[arg-type]
            ranks=None if team is None else team.ranks,
        )
        make_group = partial(open_group, host="127.0.0.1", device=torch.device("cpu"), wake=lambda: None)
        node = make_node(role, f"{role}-0", knobs, transport=cell.transport, core=core, make_group=make_group)
        try:
            if isinstance(team, Team):
                team.share(core.pool)
            yield node
        finally:
            node.side.close()
            core.close()


def run_cell(kind: Kind, cell: RankCell, watch: Callable[[Net, Node, Node], None]) -> list[list[int]]:
    """What a router heard of every job; nothing leaks. `watch` looks at how it went."""
    jobs, rng = kind.jobs(cell.temperature), random.Random(str(cell))
    with (
        node_of(kind, cell, "prefill", cell.prefill) as prefill,
        node_of(kind, cell, "decode", cell.decode) as decode,
    ):
        net = Net([prefill, decode])
        keys = [net.generate(prefill, job, decode) for job in jobs]
        deadline, retractions = time.monotonic() + HANG_GUARD_S, 0
        for round_ in itertools.count(1):
            if all(net.router.ends[key] for key in keys):
                break
            assert time.monotonic() < deadline, "no end"
            for name in net.nodes:
                net.tick(name)
            time.sleep(TURN_S)
            if cell.retract and round_ % RETRACT_EVERY == 0 and retractions < MAX_RETRACTIONS:
                retract_somebody(decode.ctx.core, rng)
                retractions += 1
        net.settle(prefill, decode)
        failed = [end for key in keys for end in net.router.ends[key] if end.error_code]
        assert not failed, failed
        watch(net, prefill, decode)
        return [net.router.streams[key] for key in keys]
