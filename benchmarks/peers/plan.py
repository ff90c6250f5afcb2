"""Which measurements a run consists of: what is measured together (a unit), of which system, and by what call.

A unit gives figures by the keys of the rows of needed.py; others it gives are shown and held against nothing.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.peers import environments, servers, traffic
from benchmarks.peers.engines import SERVED_FORMATS, baton_engine, llama_engine
from benchmarks.peers.needed import BATON, BF16, MACHINE, Q4_0, UNITS, VLLM
from benchmarks.peers.prompts import Prompts, draft_prompts
from benchmarks.peers.servers import Room, Serve
from benchmarks.peers.weights import gguf_files, hf_folder
from benchmarks.run import Part, measure
from tests.clients.environment import NotInstalled

Figures = dict[str, float]
CORE_EACH = ("--no-share-cores",)  # Baton's default settings are what is compared, but for this row
DRAFTS = {
    "eagle": ("--spec", "eagle"),
    "eagle tree": ("--spec", "eagle", "--spec-topk", "3", "--spec-steps", "2", "--spec-width", "6"),
}
IN_BYTES = f"{BATON} with int8 weights"  # is shown, and stands for nothing, because it is not the default
WITHOUT_DRAFTS = f"{BATON} without drafts"  # is shown, and stands for nothing
PEER_DRAFTS = ("--spec-type", "ngram-mod")  # the one kind that needs neither another model nor settings
TEMPERATURES = (0.0, 0.8)
LONG_ROOM = Room(5, 2048)
MEMORY_ROOM = Room(32, 512)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked: enough for figures, or only to see that everything runs."""

    prompt: int = 128
    answer: int = 64
    rounds: Mapping[int, int] = field(default_factory=lambda: {1: 6, 8: 3, 16: 2, 32: 2})  # streams -> how often
    prompts_per_kind: int = 4
    draft_answer: int = 96
    long_answer: int = 700
    long_prompt: int = 1500
    long_prompts: int = 8
    batches: tuple[int, ...] = (1, 8, 32)


TINY = Sizes(16, 8, {1: 1, 8: 1, 16: 1, 32: 1}, 1, 16, 100, 200, 1, (1, 2))


@dataclass(frozen=True, slots=True)
class Job:
    unit: str
    system: str
    measure: Callable[[], Figures]


@dataclass(frozen=True, slots=True)
class Peers:
    """What is there. `missing`: why a peer is not, by name."""

    llama: Path | None
    files: Mapping[str, Path]
    vllm: Path | None
    vllm_model: Path | None
    missing: Mapping[str, str]


def find_peers(units: Collection[str]) -> Peers:
    """Those that stand in these units. Makes what is missing; that takes minutes, once."""
    llama, files, vllm, folder, missing = None, dict[str, Path](), None, None, dict[str, str]()
    try:
        if set(units) - {MACHINE}:
            llama = environments.llama_cpp()
            files = gguf_files(llama)
    except NotInstalled as error:
        missing["llama.cpp"] = str(error)
    try:
        if "server" in units:
            vllm, folder = environments.vllm(), hf_folder()
    except NotInstalled as error:
        missing[VLLM] = str(error)
    return Peers(llama, files, vllm, folder, missing)


def jobs(peers: Peers, units: Iterable[str], sizes: Sizes, threads: int, console: Console) -> list[Job]:
    """In the order of UNITS."""
    makers: dict[str, Callable[[], list[Job]]] = {
        MACHINE: lambda: [Job(MACHINE, MACHINE, functools.partial(machine_rates, threads, console))],
        "engine": lambda: engine_jobs(peers, sizes, threads, console),
        "drafts": lambda: draft_jobs(peers, sizes, threads),
        "server": lambda: server_jobs(peers, sizes, threads),
        "itl": lambda: itl_jobs(peers, sizes, threads),
        "memory": lambda: memory_jobs(peers, sizes, threads),
    }
    return [job for unit in UNITS if unit in units for job in makers[unit]()]


def machine_rates(threads: int, console: Console) -> Figures:
    found = measure(Part(MACHINE, threads, ("-m", "benchmarks.peers.machine", "--threads", str(threads))), console)
    if found is None:
        raise RuntimeError("benchmarks.peers.machine failed; what it said stands above")
    return dict(found)


def engine_jobs(peers: Peers, sizes: Sizes, threads: int, console: Console) -> list[Job]:
    made = [
        Job("engine", f"{BATON} {name}", functools.partial(baton_engine, name, threads, console))
        for name in SERVED_FORMATS
    ]
    for name, file in peers.files.items():
        assert peers.llama is not None
        call = functools.partial(llama_engine, peers.llama, file, threads, sizes.batches)
        made.append(Job("engine", f"llama.cpp {name}", call))
    return made


def llama_servers(peers: Peers, threads: int) -> dict[str, Serve]:
    """The two formats that are fastest: one with few streams, one with many."""
    if peers.llama is None:
        return {}
    return {
        name: servers.llama_server(peers.llama, peers.files[name.removeprefix("llama.cpp ")], threads)
        for name in (Q4_0, BF16)
    }


def server_jobs(peers: Peers, sizes: Sizes, threads: int) -> list[Job]:
    systems = {BATON: servers.baton(), **llama_servers(peers, threads)}
    if peers.vllm is not None and peers.vllm_model is not None:
        systems[VLLM] = servers.vllm_server(peers.vllm, peers.vllm_model, threads)
    made = [Job("server", name, functools.partial(serve_streams, serve, sizes)) for name, serve in systems.items()]
    in_bytes = functools.partial(serve_streams, servers.baton("--weight-dtype", "int8"), sizes, "int8 ")
    return [*made, Job("server", IN_BYTES, in_bytes)]


def serve_streams(serve: Serve, sizes: Sizes, prefix: str = "") -> Figures:
    """Rates and first tokens by number of streams; and prefill through HTTP, out of the first token of 512."""
    rng, figures = random.Random(11), Figures()
    with serve(Room(max(sizes.rounds), 1024)) as port:
        for warm in (1, 4, max(sizes.rounds)):
            asyncio.run(traffic.at_once(port, warm, rng, sizes.prompt, 8))
        for streams, rounds in sizes.rounds.items():
            seen = [asyncio.run(traffic.at_once(port, streams, rng, sizes.prompt, sizes.answer)) for _ in range(rounds)]
            figures[f"server_{streams}"] = statistics.median(one.tok_s for one in seen)
            figures[f"ttft_{streams}"] = statistics.median(one.ttft_p50_ms for one in seen)
        whole = [asyncio.run(traffic.at_once(port, 1, rng, 512, 4)).ttft_p50_ms for _ in range(sizes.rounds[1])]
        figures["prefill_http"] = 512 / statistics.median(whole) * 1e3
    return {prefix + key: value for key, value in figures.items()}


def draft_jobs(peers: Peers, sizes: Sizes, threads: int) -> list[Job]:
    prompts = draft_prompts(sizes.prompts_per_kind)
    systems = {f"{BATON} {name}": servers.baton(*flags) for name, flags in DRAFTS.items()}
    systems[WITHOUT_DRAFTS] = servers.baton()
    if peers.llama is not None:
        systems[Q4_0] = servers.llama_server(peers.llama, peers.files["Q4_0"], threads)
        systems[f"{Q4_0} n-gram"] = servers.llama_server(peers.llama, peers.files["Q4_0"], threads, *PEER_DRAFTS)
    made = []
    for name, serve in systems.items():
        mean = "mean" if name == WITHOUT_DRAFTS else "drafts"
        made.append(Job("drafts", name, functools.partial(serve_drafts, serve, prompts, sizes.draft_answer, mean)))
    return made


def serve_drafts(serve: Serve, prompts: Prompts, answer: int, mean: str) -> Figures:
    """Tokens/s behind the first token, by kind and temperature, over all answers of the cell; as `mean` their geometric
    mean."""
    figures = Figures()
    with serve(Room(1, 2048)) as port:
        for ids in prompts.values():
            asyncio.run(traffic.answer_alone(port, ids[0], 0.0, 16))
        for temperature in TEMPERATURES:
            for kind, of_kind in prompts.items():
                made = [asyncio.run(traffic.answer_alone(port, ids, temperature, answer)) for ids in of_kind]
                figures[f"{kind} at {temperature:g}"] = sum(n for n, _ in made) / sum(took for _, took in made)
    return figures | {mean: math.exp(statistics.mean(map(math.log, figures.values())))}


def itl_jobs(peers: Peers, sizes: Sizes, threads: int) -> list[Job]:
    systems = {"itl_core_each": {BATON: servers.baton(*CORE_EACH)}, "itl_both_cores": {BATON: servers.baton()}}
    systems["itl_both_cores"] |= {name: one for name, one in llama_servers(peers, threads).items() if name == Q4_0}
    return [
        Job("itl", f"{name} {row}", functools.partial(serve_beside_prompts, serve, sizes, row))
        for row, of_row in systems.items()
        for name, serve in of_row.items()
    ]


def serve_beside_prompts(serve: Serve, sizes: Sizes, row: str) -> Figures:
    rng = random.Random(12)
    with serve(LONG_ROOM) as port:
        asyncio.run(traffic.at_once(port, 4, rng, sizes.long_prompt, 16))
        found = asyncio.run(
            traffic.beside_prompts(port, rng, sizes.long_answer, [sizes.long_prompt] * sizes.long_prompts)
        )
    return found | {row: found["during_over_quiet"]}


def memory_jobs(peers: Peers, sizes: Sizes, threads: int) -> list[Job]:
    systems: dict[str, Serve] = {BATON: servers.baton_with_kv_of}
    if peers.llama is not None:
        systems[Q4_0] = servers.llama_server(peers.llama, peers.files["Q4_0"], threads)
    return [Job("memory", name, functools.partial(serve_and_weigh, serve, sizes)) for name, serve in systems.items()]


def serve_and_weigh(serve: Serve, sizes: Sizes) -> Figures:
    """After as many streams as there is room for."""
    rng = random.Random(13)
    with serve(MEMORY_ROOM) as port:
        for streams in (1, MEMORY_ROOM.streams):
            asyncio.run(traffic.at_once(port, streams, rng, sizes.prompt, sizes.answer))
        return {"pss_mib": servers.pss_mib(), "kv_mib": MEMORY_ROOM.kv_bytes / 2**20}
