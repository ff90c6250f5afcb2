"""The bench beside peers: what its verdicts rest on, how it goes on where it was, what it counts. With stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from benchmarks.peers import engines, environments, kept, needed, run, servers, traffic
from benchmarks.peers.needed import QUIET_MACHINE, ROWS, Row, judge
from benchmarks.peers.plan import Job
from benchmarks.sse_client import Stream
from tests.clients.environment import NotInstalled
from tests.gpu.book import Book
from tests.support.machine.patience import HANG_GUARD_S


def row(key: str) -> Row:
    (found,) = [one for one in ROWS if one.key == key]
    return found


def test_the_medians_of_the_best_of_each_side_are_compared():
    found = judge(
        row("decode_8"),
        {"Baton bfloat16": [500], "Baton int8": [1300, 900, 1200], needed.Q4_0: [600, 9000, 590], needed.BF16: [450]},
        QUIET_MACHINE,
    )
    assert (found.baton, found.peer) == (("Baton int8", 1200), (needed.Q4_0, 600))
    assert found.score == 2.0 and found.is_met and found.counts


def test_of_times_less_is_better():
    found = judge(row("ttft_8"), {"Baton": [100], needed.Q4_0: [600], needed.VLLM: [300]}, QUIET_MACHINE)
    assert found.peer == (needed.VLLM, 300) and found.score == pytest.approx(1 / 3) and found.is_met
    assert not judge(row("ttft_8"), {"Baton": [120], needed.VLLM: [300]}, QUIET_MACHINE).is_met


@pytest.mark.parametrize(("measured", "counts"), [(0.86 * 251, True), (0.84 * 251, False)])
def test_a_peer_counts_from_85_percent_of_what_it_can(measured: float, counts: bool):
    found = judge(row("decode_1"), {"Baton": [300], needed.Q4_0: [measured]}, QUIET_MACHINE)
    assert found.counts is counts


def test_what_a_peer_can_is_scaled_by_what_bounds_the_row():
    half = {**QUIET_MACHINE, "dram": QUIET_MACHINE["dram"] / 2}
    assert judge(row("decode_1"), {needed.Q4_0: [0.44 * 251]}, half).counts
    assert not judge(row("decode_8"), {needed.Q4_0: [0.44 * 615]}, half).counts
    slow_bytes = {**QUIET_MACHINE, "int8": QUIET_MACHINE["int8"] / 2}
    assert judge(row("ttft_1"), {needed.Q4_0: [2.3 * 79]}, slow_bytes).counts
    assert not judge(row("ttft_1"), {needed.Q4_0: [2.4 * 79]}, slow_bytes).counts


def test_a_fast_peer_that_was_slow_does_not_let_another_one_win():
    found = judge(row("decode_32"), {"Baton": [2000], needed.Q4_0: [500], needed.BF16: [697]}, QUIET_MACHINE)
    assert found.peer == (needed.BF16, 697) and not found.counts


def test_rows_that_are_held_against_themselves_or_a_difference():
    alone = judge(row("itl_core_each"), {"Baton itl_core_each": [1.31], needed.Q4_0: [90]}, QUIET_MACHINE)
    assert alone.score == 1.31 and not alone.is_met
    more = judge(row("pss_mib"), {"Baton": [1500], needed.Q4_0: [901]}, QUIET_MACHINE)
    assert more.score == 599 and more.is_met and more.counts


def test_without_a_peer_nothing_is_met():
    found = judge(row("decode_1"), {"Baton": [1e9]}, QUIET_MACHINE)
    assert found.score is None and not found.is_met


def job(unit: str, system: str, value: float, key: str = "decode_1") -> Job:
    return Job(unit, system, lambda: {key: value})


def test_systems_take_turns():
    made = [job(unit, name, 1) for unit in ("engine", "server") for name in "abc"]
    assert ["".join(one.system for one in run.turns(made, n)) for n in range(3)] == ["abcabc", "bcabca", "cabcab"]


def test_what_stands_in_the_table_is_what_was_measured(tmp_path: Path):
    machine = Job(needed.MACHINE, needed.MACHINE, lambda: dict(QUIET_MACHINE))
    made = [
        machine,
        job("engine", "Baton int8", 400),
        job("engine", "Baton file", 500),
        job("engine", needed.Q4_0, 250),
    ]
    made.append(job("server", needed.VLLM, 2000, "prefill_http"))
    book, text = Book(tmp_path), io.StringIO()
    for one in made:
        run.run_job(run.job_name(0, one), one, book, Console(file=io.StringIO()))
    found, allowed = run.gather(book, made, 1), frozenset({"int8"})
    (verdict, prefill) = sorted(run.verdicts(found, allowed), key=lambda one: one.row.key)
    assert verdict.baton == ("Baton int8", 400) and verdict.score == 1.6
    assert prefill.peer == (needed.VLLM, 2000)  # it has no program that prefills alone
    run.show(found, [verdict], allowed, Console(file=text, width=200))
    assert "400 (Baton int8)" in text.getvalue() and "1.6 times" in text.getvalue()
    (decode,) = [one for one in run.verdicts(found, None) if one.row.key == "decode_1"]
    assert decode.baton == ("Baton file", 500)
    assert json.loads(json.dumps(run.as_json(found, [verdict], {})))["rows"]["decode_1"]["met"] is True


def test_perplexity_of_other_sources_says_nothing(tmp_path: Path):
    path = tmp_path / "perplexity.json"
    assert kept.formats_near_enough(path) is None
    for code, said in ((kept.code_digest(kept.MODEL_SOURCES), frozenset({"file"})), ("older", None)):
        path.write_text(json.dumps({"about": {"code": code}, "near_enough": ["file"]}))
        assert kept.formats_near_enough(path) == said


def test_figures_are_read_out_of_what_llama_cpp_prints():
    assert engines.prefill_rate('[{"avg_ts": 5.0, "samples_ts": [4.0, 6.0]}]') == 6.0
    lines = [
        "",
        "main: n_kv_max = 9",
        '{"pl": 1, "speed_tg": 3.5}',
        '{"pl": 8, "speed_tg": 9}',
        '{"pl": 1, "speed_tg": 4}',
    ]
    assert engines.decode_rates(lines) == {"decode_1": 4.0, "decode_8": 9.0}


def test_a_server_goes_with_all_that_it_has_started():
    lines = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']); "
    lines += "print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", lines], stdout=subprocess.PIPE, start_new_session=True) as server:
        assert server.stdout is not None
        child = psutil.Process(int(server.stdout.readline()))
        servers.stop_group(server)
    try:
        assert not psutil.wait_procs([child], timeout=HANG_GUARD_S)[1]
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


@contextlib.asynccontextmanager
async def streaming(events: Sequence[str]) -> AsyncIterator[int]:
    """A server that answers everybody with these events."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + "".join(f"data: {one}\n\n" for one in events).encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


TEXT = '{"choices": [{"text": "a"}]}'
IDS = '{"choices": [{"text": "", "token_ids": [5, 6]}]}'


@pytest.mark.parametrize(
    ("events", "arrived", "counted"),
    [
        ([TEXT, TEXT, '{"choices": [{"text": ""}]}', '{"choices": [], "usage": {"completion_tokens": 3}}'], 2, 3),
        ([IDS, '{"choices": [{"text": "", "token_ids": null}], "usage": {"completion_tokens": 2}}'], 2, 2),
    ],
)
def test_tokens_are_counted_by_the_server_and_timed_as_they_come(events: list[str], arrived: int, counted: int):
    async def ask() -> Stream:
        async with streaming(events) as port:
            return await traffic.ask(port, {})

    stream = asyncio.run(ask())
    assert (len(stream.token_times), stream.num_tokens) == (arrived, counted)


@pytest.mark.parametrize("events", [[TEXT], ['{"error": {"message": "full"}}'], []])
def test_answers_that_are_too_short_are_no_measurement(events: list[str]):
    async def ask() -> None:
        async with streaming(events) as port:
            await traffic.at_once(port, 1, random.Random(1), 4, 2)

    with pytest.raises(RuntimeError):
        asyncio.run(ask())


def test_gaps_are_those_within_the_time():
    streams = [Stream(0.0, [1.0, 2.0, 4.0, 7.0]), Stream(0.0, [3.0, 3.5])]
    assert traffic.gaps(streams, 2.0, 4.0) == [2.0, 0.5]


def test_what_was_half_made_is_made_again(tmp_path: Path):
    folder, made = tmp_path / "peer", list[str]()

    def fails(where: Path) -> None:
        (where / "half").touch()
        raise NotInstalled("the network is gone")

    with pytest.raises(NotInstalled):
        environments.make_once(folder, "one", fails)
    for wanted in ("one", "one", "two"):
        environments.make_once(folder, wanted, lambda where: made.append(where.name))
    assert len(made) == 2 and not (folder / "half").exists()
