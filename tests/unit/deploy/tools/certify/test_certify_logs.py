"""Logs of answers of any length: lines are read as they are needed, and few answers are held."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.tools.certify import run
from deploy.tools.certify.progress import ReplayProgress
from deploy.tools.certify.replay import AHEAD
from deploy.tools.certify.shown_files import KEPT_ANSWERS, SavedAnswer, read_shown, shown_in
from router.certify.record import NO_RECORD, ShownAnswer
from shared.core.sampling_params import SamplingParams
from tests.support.cores.certified_replays import shown_answers, write_log
from tests.support.cores.core_rig import CoreKnobs, Job, make_core, run_local

CERTIFICATE = {"record": "a.b.c", "salt": "00" * 32}
PROMPT = [1, 2, 3]


def chunk(answer: int, index: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"id": f"a{answer}", "choices": [{"index": index, "token_ids": ids, **more}]}


def events_of(answer: int) -> Iterator[dict[str, Any]]:
    """A chat of two choices: the second begins when the first has ended. Only the first chunk has the prompt."""
    yield {**chunk(answer, 0, [answer]), "prompt_token_ids": PROMPT}
    yield chunk(answer, 0, [5], certificate=CERTIFICATE, finish_reason="stop")
    yield chunk(answer, 1, [answer])
    yield chunk(answer, 1, [6], certificate=CERTIFICATE, finish_reason="stop")


def num_held() -> int:
    return sum(type(one) is SavedAnswer for one in gc.get_objects())


def test_of_an_endless_stream_little_is_held() -> None:
    """Its answers are saved by turns of three."""
    turns = ([3 * turn + at for at in range(3)] for turn in itertools.count())
    endless = (event for turn in turns for events in zip(*map(events_of, turn), strict=True) for event in events)
    before = num_held()
    found = shown_in(endless)
    shown = list(itertools.islice(found, 12 * KEPT_ANSWERS))
    assert num_held() - before <= KEPT_ANSWERS + 3
    assert all(one.prompt_token_ids == PROMPT and one.record != NO_RECORD for one in shown)
    assert sorted(one.token_ids or [] for one in shown) == sorted(
        [answer, last] for answer in range(6 * KEPT_ANSWERS) for last in (5, 6)
    )


def test_a_choice_without_a_certificate_is_not_held() -> None:
    """Its finish reason ends it; without one, it may be continued up to the file's end."""
    cut = chunk(0, 0, [1])
    ended = chunk(1, 0, [2], finish_reason="stop")
    certified = chunk(2, 0, [3], certificate=CERTIFICATE)
    found = list(shown_in([cut, ended, certified, chunk(0, 0, [4])]))
    assert [(one.record == NO_RECORD, one.token_ids) for one in found] == [
        (True, [2]), (False, [3]), (True, [1, 4]),
    ]  # fmt: skip


def test_a_pipe_is_read_as_its_answers_are_taken(tmp_path: Path) -> None:
    """Far more lines would be written than the pipe and a reader's buffer hold."""
    pipe, line = tmp_path / "pipe", json.dumps({**CERTIFICATE, "token_ids": [1] * 1000}).encode() + b"\n"
    os.mkfifo(pipe)
    num_lines, written = 4000, list[int]()

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), pipe.open("wb", buffering=0) as file:
            for number in range(num_lines):
                file.write(line)
                written.append(number)

    writer = threading.Thread(target=write)
    writer.start()
    found = read_shown(pipe)
    assert len(list(itertools.islice(found, 10))) == 10
    assert len(written) < num_lines // 2
    del found  # which closes the pipe
    writer.join()
    assert len(written) < num_lines


def test_a_replay_holds_no_more_than_it_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(CoreKnobs(spec="none", page_size=16))
    jobs = [Job(n, (5, 6, n), SamplingParams(max_tokens=3, temperature=0.8), n) for n in range(60)]
    shown = shown_answers(core, jobs, run_local(core, jobs)).values()
    core.close()
    taken: list[ShownAnswer] = []
    held: list[int] = []
    read, passed = run.read_shown, ReplayProgress.pass_one

    def counted(*given: Any) -> Iterator[ShownAnswer]:
        for one in read(*given):
            taken.append(one)
            yield one

    def passing(self: ReplayProgress) -> None:
        passed(self)
        held.append(len(taken) - len(held) - 1)

    monkeypatch.setattr(run, "read_shown", counted)
    monkeypatch.setattr(ReplayProgress, "pass_one", passing)
    monkeypatch.setattr(run.core_plan, "apply", lambda plan: None)
    flags = ("--model", "hashlm", "--kv-bytes", "4MiB", "--device", "inline", "--max-running", "2")
    assert cli.main(["replay", *write_log(tmp_path, shown), *flags]) == 0
    assert capsys.readouterr().out.startswith("60 equal, 0 different, 0 not computed: 180 tokens")
    assert len(held) == 60 and max(held) <= AHEAD * 2 + 1


@pytest.mark.parametrize("saved", [chunk(0, 0, [1], certificate=CERTIFICATE), [chunk(0, 0, [1])]])
def test_an_indented_log_is_refused_in_one_sentence(
    saved: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("\n" + json.dumps(saved, indent=1))
    assert cli.main(["replay", "--log", str(log), "--model", "hashlm"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.splitlines()[-1].startswith("baton replay: --log takes one answer")


@pytest.mark.parametrize("torn", ["{", '{"id": "a', "}"])
def test_a_torn_line_is_told_and_the_others_are_read(torn: str, tmp_path: Path) -> None:
    log, told = tmp_path / "log", list[str]()
    whole = json.dumps(chunk(0, 0, [1], certificate=CERTIFICATE))
    log.write_text(f"{whole}\n{torn}\n{whole}\n")
    assert len(list(read_shown(log, told.append))) == 2
    assert len(told) == 1 and told[0].startswith("line 2: ")
