"""Nodes of one, two and four processes in all pairs, on HashLM and on a random Llama: streams are those of one process,
whatever carried the pages. Real processes; tests/simulation/test_rank_matrix.py draws more of everything else.

A prefill node has all transports, a decode node the one that it is named for. With --all-ranks each transport meets
every two sizes; without, these are a few on the Llama (test_tensor_parallel.py has some on HashLM).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from shared.core.keys import sequence_seed
from shared.kernel.product.product import supports
from shared.kv.layout import page_bytes
from shared.model.formats.opened import LoadOptions
from shared.model.hashlm.model import HashLM
from shared.model.loading.load import load_model
from shared.model.math.interface import Model
from shared.wire.messages import Key
from tests.support.clusters.procs import NodeProcess, RouterStub
from tests.support.cores.core_rig import CoreKnobs, Job, draw_jobs, make_core, run_local
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worlds.node_pair import expected

SIZES = (1, 2, 4)
FEW = ((2,), [[("gloo", 4), ("zmq", 1)]])
ALL = (SIZES, [[(name, size) for size in SIZES] for name in ("shm", "zmq", "gloo")])
PAGE_SIZE, MAX_CONTEXT = 4, 256
FLAGS = ("--page-size", str(PAGE_SIZE), "--chunk-size", "16", "--max-context", str(MAX_CONTEXT))
# Too few for all that are decoded, and none are kept for their growth: somebody gives his memory back.
NUM_PAGES, KEEP_NONE = {"prefill": 600, "decode": 90}, ("--growth-reserve", "0")
NUM_JOBS = 6  # of a pair


@pytest.fixture
def router() -> Iterator[RouterStub]:
    stub = RouterStub()
    yield stub
    stub.close()


class Nodes:
    """Node processes of one model. Ends them all."""

    def __init__(self, router: RouterStub, folder: Path, name: str, model: Model) -> None:
        self.router, self._folder, self._name = router, folder, name
        self._page_bytes = page_bytes(model.kv_planes(PAGE_SIZE))
        self._started: dict[str, NodeProcess] = {}

    def start(self, role: str, size: int, transport: str = "auto") -> str:
        node_id = f"{role}-{transport}-{size}"
        flags = ("--model", self._name, "--dtype", "float32", "--tp", str(size), "--transport", transport)
        memory = ("--kv-bytes", str(self._page_bytes * NUM_PAGES[role]), "--trust-network", *KEEP_NONE)
        more = ("--layer-parts", "2") if role == "prefill" else ("--offload-bytes", str(40 * self._page_bytes))
        self._started[node_id] = NodeProcess(
            role, node_id, self.router, self._folder, *FLAGS, *flags, *memory, *more, "--spec", "ngram"
        )
        self.router.until(lambda: node_id in self.router.hellos, f"{node_id} says Hello")
        return node_id

    def stop(self, node_ids: Sequence[str]) -> None:
        """In good order, whole, and with all their processes."""
        for node_id in node_ids:
            self.router.wait_at_rest(node_id)
            node = self._started.pop(node_id)
            family = psutil.Process(node.process.pid).children(recursive=True)
            assert node.terminate() == 0, node.log
            assert not psutil.wait_procs(family, timeout=HANG_GUARD_S)[1], "a rank was left behind"
            assert "add up" not in node.log and "Traceback" not in node.log, node.log

    def close(self) -> None:
        for node in self._started.values():
            node.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--all-ranks")
    metafunc.parametrize("model", ["hashlm", "llama"] if every else ["llama"], indirect=True)
    metafunc.parametrize(("prefill_sizes", "rounds"), [ALL if every else FEW], ids=["all" if every else "few"])


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Model]:
    if request.param == "hashlm":
        return "hashlm", HashLM(max_context=MAX_CONTEXT)
    folder = str(write_tiny_llama(tmp_path / "llama"))
    loaded = load_model(folder, LoadOptions("float32", max_context=MAX_CONTEXT))
    if not supports(128, loaded.kv_planes(PAGE_SIZE)[0].dtype):
        pytest.skip("the library's products may sum in another order when they have fewer columns")
    return folder, loaded


@pytest.fixture
def nodes(router: RouterStub, tmp_path: Path, model: tuple[str, Model]) -> Iterator[Nodes]:
    made = Nodes(router, tmp_path, *model)
    yield made
    made.close()


def jobs_of(index: int) -> list[Job]:
    """Half of them greedy; never a prompt twice, for caches would hide hand-offs."""
    jobs = draw_jobs(random.Random(index), NUM_JOBS, max_prompt=60)
    own = [replace(job, rid=NUM_JOBS * index + job.rid) for job in jobs]
    return [replace(job, sampling=replace(job.sampling, stop_token_ids=(1,))) for job in own]


def wanted(model: Model, jobs: Sequence[Job]) -> list[list[int]]:
    """HashLM's are the plain reference's, Llama's those of a core with nothing special."""
    if isinstance(model, HashLM):
        return [expected(job) for job in jobs]
    core = make_core(CoreKnobs(num_pages=400, prefix_cache=False), model=model)  # type: ignore[arg-type]
    try:
        seeded = [replace(job, seed=sequence_seed(job.seed, 0)) for job in jobs]
        streams = run_local(core, seeded).streams
    finally:
        core.close()
    return [streams[f"r{job.rid}"] for job in jobs]


@pytest.mark.long
@pytest.mark.timeout(1800)  # with --all-ranks: nodes are started one after another
def test_streams_of_any_pair_are_those_of_one_process(
    nodes: Nodes, model: tuple[str, Model], prefill_sizes: Sequence[int], rounds: Sequence[Sequence[tuple[str, int]]]
) -> None:
    router, retractions = nodes.router, 0.0
    prefills = [nodes.start("prefill", size) for size in prefill_sizes]
    for number, decoders in enumerate(rounds):
        decodes = [nodes.start("decode", size, transport) for transport, size in decoders]
        pairs = [(prefill, decode) for decode in decodes for prefill in prefills]
        asked: list[tuple[Job, Key]] = []
        for index, (prefill, decode) in enumerate(pairs):
            asked += [(job, router.generate(prefill, job, decode)) for job in jobs_of(len(pairs) * number + index)]
        router.wait_ends([key for _, key in asked])
        assert not [end for _, key in asked for end in router.book.ends[key] if end.error_code]
        golden = wanted(model[1], [job for job, _ in asked])
        for (job, key), stream in zip(asked, golden, strict=True):
            assert router.book.streams[key] == stream, f"{key}: {job.sampling}"
        for decode in decodes:
            router.wait_at_rest(decode)  # its next heartbeat counts all of it
            counts = router.book.heartbeats[decode].load.counters
            assert counts["handoffs"] >= 3 * len(prefills), "each prefill node handed over"
            retractions += counts["retractions"]
        nodes.stop(decodes)
    nodes.stop(prefills)
    assert retractions > 0
