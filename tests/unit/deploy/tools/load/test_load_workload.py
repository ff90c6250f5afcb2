"""What is asked: drawn by a seed, from a file, from a trace of Mooncake; shared prefixes and golden prompts."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from deploy.tools.traffic.workloads.lengths import NO_PAUSE, Pauses, parse_lengths, parse_pauses
from deploy.tools.traffic.workloads.trace import BLOCK_TOKENS, read_trace
from deploy.tools.traffic.workloads.workload import FromFile, Session, Synthetic, Turn, read_prompts
from shared.core.errors import ConfigError

ONE = parse_lengths("--turns", "1")
EIGHT = parse_lengths("--output-tokens", "8")


def some(source, count, seed=0):
    return list(itertools.islice(source.sessions(seed), count))


def synthetic(**changes):
    fields = {"prompt": parse_lengths("--prompt-tokens", "20"), "output": EIGHT, "turns": ONE} | changes
    return Synthetic(**fields)


def test_prefixes_are_shared_by_group():
    sessions = some(synthetic(prefix_tokens=30, prefix_groups=3), 60)
    openings = {session.opening for session in sessions}
    assert len(openings) == 3
    assert {len(text.split()) for ((role, text),) in openings for _ in [role]} == {30}


def test_turns_come_after_a_time_to_think():
    sessions = some(synthetic(turns=parse_lengths("--turns", "3"), think=parse_pauses("--think", "2")), 300)
    assert all(len(session.turns) == 3 and session.turns[0].think_s == 0 for session in sessions)
    thinking = [turn.think_s for session in sessions for turn in session.turns[1:]]
    assert sum(thinking) / len(thinking) == pytest.approx(2.0, rel=0.15)


def test_tools_are_mostly_fast_and_sometimes_slow():
    pauses = parse_pauses("--think", "0.5-30")
    rng = random.Random(1)
    drawn = sorted(pauses.draw(rng) for _ in range(2000))
    assert 0.5 <= drawn[0] < 0.51 and 29 < drawn[-1] <= 30
    assert drawn[1000] == pytest.approx(math.sqrt(0.5 * 30), rel=0.1)
    assert parse_pauses("--think", "0") is NO_PAUSE


@pytest.mark.parametrize("text", ["", "x", "-1", "5-1", "0-3", "1-", "1-2-3", "nan", "1-inf"])
def test_a_pause_that_cannot_be_is_named(text):
    with pytest.raises(ConfigError, match="--think"):
        parse_pauses("--think", text)


def test_prompt_files(tmp_path):
    plain = tmp_path / "a.txt"
    plain.write_text("Why?\n\nHow?\n")
    sessions = some(FromFile(read_prompts(plain), EIGHT), 3)
    assert [session.turns[0] for session in sessions] == [Turn("Why?", 8), Turn("How?", 8), Turn("Why?", 8)]

    lines = [
        {"prompt": "Why?", "max_tokens": 3},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]},
        {"turns": ["Hi", "And then?"]},
    ]
    rich = tmp_path / "b.jsonl"
    rich.write_text("\n".join(json.dumps(line) for line in lines))
    assert some(FromFile(read_prompts(rich), EIGHT, Pauses(lambda rng: 1.0)), 3) == [
        Session((Turn("Why?", 3),)),
        Session((Turn("Who?", 8),), (("system", "Be brief."),)),
        Session((Turn("Hi", 8), Turn("And then?", 8, 1.0))),
    ]


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"messages": []}', '{"turns": []}', '{"prompt": "a", "max_tokens": "x"}']
)
def test_a_wrong_line_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path)


def test_files_that_are_empty_or_not_there(tmp_path):
    empty = tmp_path / "e.txt"
    empty.write_text("\n")
    for path in (empty, tmp_path / "none.txt"):
        with pytest.raises(ConfigError, match="--prompts"):
            read_prompts(path)
        with pytest.raises(ConfigError, match="--trace"):
            read_trace(path, 1.0, 0)


@pytest.fixture
def trace_file(tmp_path):
    """The first lines are of the published shape; out of order, as some traces are."""
    rows = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 3]},
        {"timestamp": 2000, "input_length": 1030, "output_length": 10, "hash_ids": [0, 1, 2]},
        {"timestamp": 4000, "input_length": 30, "output_length": 0},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_a_trace_is_replayed_by_its_times_and_lengths(trace_file):
    trace = read_trace(trace_file, 2.0, 0)
    assert list(trace.offsets()) == [0.0, 0.5, 1.0]
    turns = [session.turns[0] for session in trace.sessions(0)]
    assert [(len(turn.text.split()), turn.max_tokens) for turn in turns] == [(1030, 10), (1100, 20), (30, 1)]


def test_equal_blocks_are_equal_words(trace_file):
    first, second, _ = (session.turns[0].text.split() for session in read_trace(trace_file, 1.0, 0).sessions(0))
    shared = 2 * BLOCK_TOKENS
    assert first[:shared] == second[:shared]
    assert first[shared : shared + 6] != second[shared : shared + 6]


def test_long_prompts_can_be_cut(trace_file):
    lengths = [len(session.turns[0].text.split()) for session in read_trace(trace_file, 1.0, 600).sessions(0)]
    assert lengths == [600, 600, 30]


@pytest.mark.parametrize(
    "line", ["[]", '{"timestamp": 1}', '{"timestamp": "x", "input_length": 1, "output_length": 1}',
             '{"timestamp": 1, "input_length": 0, "output_length": 1}'],
)  # fmt: skip
def test_a_wrong_row_is_named(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match="line 1"):
        read_trace(path, 1.0, 0)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_a_trace_has_a_speed(trace_file, speed):
    with pytest.raises(ConfigError, match="--trace-speed"):
        read_trace(trace_file, speed, 0)
