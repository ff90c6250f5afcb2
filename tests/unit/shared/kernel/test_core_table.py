"""The table of cores that nodes of a machine share: who is in it, what is left of the dead, who may read it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.kernel.team import core_table
from shared.kernel.team.core_table import CoreTable, CoreUse, NoTable, Owner
from shared.kernel.team.core_words import NUM_SLOTS
from tests.support.machine.patience import HANG_GUARD_S


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cores"


def joined(folder: Path, name: str, own: tuple[int, ...], borrows: tuple[int, ...] = ()) -> CoreTable:
    return CoreTable(Owner(name, own, borrows), folder)


def test_each_has_a_slot_and_people_see_who_computes(folder: Path) -> None:
    first, second = joined(folder, "prefill-0", (0,), (0, 1)), joined(folder, "decode-0", (1,), (0, 1))
    assert {first.slot, second.slot} == {0, 1}
    nobody = [CoreUse(0, (), None), CoreUse(1, (), None)]
    assert first.uses() == second.uses() == nobody
    second.hold_own()
    assert first.uses() == [CoreUse(0, (), None), CoreUse(1, ("decode-0",), None)]
    second.close()
    assert first.uses() == nobody
    first.close()


def test_a_slot_is_free_again_and_the_folder_goes_with_the_last(folder: Path) -> None:
    first, second = joined(folder, "a", (0,)), joined(folder, "b", (1,))
    first.close()
    third = joined(folder, "c", (2,))
    assert third.slot == first.slot and folder.exists()
    third.close()
    second.close()
    assert not folder.exists()


def test_when_all_slots_are_taken_a_node_keeps_to_its_plan(folder: Path) -> None:
    tables = [joined(folder, str(n), (n,)) for n in range(NUM_SLOTS)]
    with pytest.raises(NoTable, match=f"{NUM_SLOTS} nodes share"):
        joined(folder, "one too many", (0,))
    for table in tables:
        table.close()


@pytest.mark.parametrize("own", [(), (core_table.MOST_CORES,)])
def test_a_node_needs_cores_that_have_a_line(tmp_path: Path, own: tuple[int, ...]) -> None:
    with pytest.raises(NoTable, match="cores of its own"):
        joined(tmp_path / "cores", "a", own)


def test_a_folder_of_others_is_not_used(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    elsewhere = tmp_path / "link"
    elsewhere.symlink_to(tmp_path)
    (tmp_path / "file").touch(mode=0o600)
    for path in (open_to_all, elsewhere, tmp_path / "file"):
        with pytest.raises(NoTable, match="not a private folder of this user"):
            joined(path, "a", (0,))
    assert not any(open_to_all.iterdir())


def test_where_memory_is_full_the_plan_stays_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is missing only when it is touched would end the process."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoTable, match="No space left"):
        joined(tmp_path / "cores", "a", (0,))


def test_without_shared_memory_the_plan_stays_fixed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(core_table, "SHARED_MEMORY", tmp_path / "none" / "shm")
    with pytest.raises(NoTable, match="No such file"):
        CoreTable(Owner("a", (0,), ()))


def test_all_of_it_is_private(folder: Path) -> None:
    table = joined(folder, "a", (0,))
    modes = [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())]
    assert modes[0] == 0o700 and set(modes[1:]) == {0o600} and len(modes) == 4
    table.close()


JOIN = """
import sys, time
from pathlib import Path
from shared.kernel.team.core_table import CoreTable, Owner, through_gate
table = CoreTable(Owner("other", (1,), (0,)), Path(sys.argv[1]))
{then}
print(table.slot, flush=True)
time.sleep(3600)
"""


@pytest.fixture
def other(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A node in another process, which holds core 1, and is a guest on core 0 as far as the words say."""
    then = "table.hold_own(); table._words[0, 0] = table.slot + 1"
    yield from started(folder, then)


def started(folder: Path, then: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", JOIN.format(then=then), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4])
    try:
        assert process.stdout is not None and process.stdout.readline() == "0\n"
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_what_a_killed_node_had_is_free_again(folder: Path, other: subprocess.Popen[str]) -> None:
    table = joined(folder, "a", (0,), (0, 1))
    table.clear_up()
    assert table.uses() == [CoreUse(0, (), "other"), CoreUse(1, ("other",), None)], "it lives"
    other.kill()
    other.wait()
    table.clear_up()
    assert table.uses() == [CoreUse(0, (), None), CoreUse(1, (), None)]
    left = table._words[:, 0].any()
    table.close()
    assert not left


def test_who_comes_after_a_killed_node_starts_with_nothing(folder: Path, other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    table = joined(folder, "a", (0,), (0, 1))
    assert table.slot == 0 and not table._words[:, 0].any()
    table.close()


def test_a_stopped_node_is_not_dead(folder: Path, other: subprocess.Popen[str]) -> None:
    table = joined(folder, "a", (0,), (0, 1))
    other.send_signal(signal.SIGSTOP)
    table.clear_up()
    assert table.uses() == [CoreUse(0, (), "other"), CoreUse(1, ("other",), None)]
    other.send_signal(signal.SIGCONT)
    other.kill()
    other.wait()
    table.close()


def test_a_node_stopped_in_the_gate_holds_up_others_only_briefly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = joined(folder, "a", (0,))
    then = "gate = through_gate(Path(sys.argv[1]), 0.0); gate.__enter__()"
    command = [sys.executable, "-c", JOIN.format(then=then), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4])
    try:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        began = time.monotonic()
        table.clear_up()
        assert time.monotonic() - began < HANG_GUARD_S
        monkeypatch.setattr(core_table, "COMING_S", 0.05)
        with pytest.raises(NoTable, match="makes no progress"):
            joined(folder, "b", (1,))
    finally:
        end(process)
    table.close()


def test_the_gate_admits_one_at_a_time_while_the_folder_changes(folder: Path) -> None:
    """Two processes and many rounds; who goes last takes the folder, which the other is just opening."""
    code = """
import sys
from pathlib import Path
from shared.kernel.team.core_table import CoreTable, Owner
for n in range(200):
    table = CoreTable(Owner(sys.argv[2], (int(sys.argv[2]),), ()), Path(sys.argv[1]))
    table.hold_own()
    assert [use.core for use in table.uses() if sys.argv[2] in use.holders] == [int(sys.argv[2])], table.uses()
    table.close()
"""
    root = Path(__file__).parents[4]
    both = [subprocess.Popen([sys.executable, "-c", code, str(folder), str(n)], cwd=root) for n in range(2)]
    assert [process.wait(HANG_GUARD_S) for process in both] == [0, 0] and not folder.exists()


@pytest.mark.parametrize("when", ["before it is looked at", "then"])
def test_a_folder_that_goes_while_somebody_comes_is_made_again(
    folder: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = Path.lstat, []

    def one_look(path: Path) -> os.stat_result:
        goes = path == folder and not looks
        if goes:
            looks.append(path)
        if goes and when != "then":
            path.rmdir()
        found = look(path)
        if goes and when == "then":
            path.rmdir()
        return found

    monkeypatch.setattr(Path, "lstat", one_look)
    joined(folder, "a", (0,)).close()
    assert looks
