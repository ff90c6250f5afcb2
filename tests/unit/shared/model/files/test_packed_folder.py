"""The folder of packed files: packed once, checked when mapped, bounded, and never worse than memory of one's own."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.model.formats import packed_folder
from shared.model.formats.packed_file import ALIGNMENT, MappedFile, PackedWriter
from shared.model.formats.packed_folder import PackedFolder, PackedKey, PackedRefused
from tests.support.machine.patience import HANG_GUARD_S

KEY = PackedKey({"model": "a", "content": "1"}, "code 1")
MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[5]
CHILD = """
import sys, time
from pathlib import Path
from shared.model.formats.packed_folder import PackedFolder
from tests.unit.shared.model.files.test_packed_folder import KEY, MIB, fill

def slowly(writer):
    print("packs", flush=True)
    fill(writer)
    time.sleep(float(sys.argv[2]))

file = PackedFolder(Path(sys.argv[1]), MIB).take_file(KEY, 1000, slowly)
print("mapped", bytes(file.data[:5]), flush=True)
sys.stdin.read()
"""


def fill(writer: PackedWriter) -> None:
    writer.add_tensor("first", memoryview(b"hello"), "uint8", (5,))
    writer.add_tensor("second", memoryview(bytes(range(256)) * 4), "int8", (4, 256), "a note")


def never(writer: PackedWriter) -> None:
    raise AssertionError("it is there already")


def folder(tmp_path: Path, max_bytes: int = MIB, wait_s: float = 5.0) -> PackedFolder:
    return PackedFolder(tmp_path / "packed", max_bytes, wait_s)


def made(tmp_path: Path, key: PackedKey = KEY) -> Path:
    """A file that nobody has mapped."""
    assert folder(tmp_path).take_file(key, 1000, fill) is not None
    return tmp_path / "packed" / key.name


def files(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "packed").iterdir()} - {".lock"}


def child(tmp_path: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "packed"), str(seconds)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_what_was_written_is_mapped_by_the_next(tmp_path: Path) -> None:
    path = made(tmp_path)
    file = folder(tmp_path).take_file(KEY, 1000, never)
    assert file is not None and file.num_bytes == path.stat().st_size
    first, second = file.entries["first"], file.entries["second"]
    assert file.data[first.offset : first.offset + 5] == b"hello" and first.shape == (5,)
    assert file.data[second.offset : second.offset + 1024] == bytes(range(256)) * 4
    assert (second.dtype, second.shape, second.note, second.offset % ALIGNMENT) == ("int8", (4, 256), "a note", 0)
    with pytest.raises(TypeError):
        file.data[0] = 1  # it is other processes' memory, too
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert files(tmp_path) == {KEY.name}


def test_every_changed_byte_is_noticed_and_packed_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = made(tmp_path)
    whole = path.read_bytes()
    places = [*range(0, len(whole), 97), *range(len(whole) - 48, len(whole))]
    for at in places:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with path.open("rb") as file, pytest.raises(packed_folder.BrokenFile):
            MappedFile(file.fileno())
    with caplog.at_level(logging.WARNING):
        assert folder(tmp_path).take_file(KEY, 1000, fill) is not None
    assert len(caplog.messages) == 1 and "packed anew" in caplog.text and path.read_bytes() == whole


@pytest.mark.parametrize("left", [0, 10, 40, 1000, -1])
def test_a_file_that_was_cut_off_is_packed_anew(tmp_path: Path, left: int) -> None:
    path = made(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    assert folder(tmp_path).take_file(KEY, 1000, fill) is not None
    assert path.read_bytes() == whole


def test_a_file_about_something_else_is_not_believed(tmp_path: Path) -> None:
    other = PackedKey({"model": "a", "content": "2"}, "code 1")
    made(tmp_path, other).rename(tmp_path / "packed" / KEY.name)
    calls: list[int] = []
    assert folder(tmp_path).take_file(KEY, 1000, lambda writer: (calls.append(1), fill(writer))[1]) is not None
    assert calls == [1]


def test_other_code_packs_anew_and_takes_the_old_file_away(tmp_path: Path) -> None:
    other = PackedKey({"model": "b"}, "code 1")
    made(tmp_path), made(tmp_path, other)
    newer = PackedKey(KEY.about, "code 2")
    made(tmp_path, newer)
    assert files(tmp_path) == {newer.name, other.name}


@pytest.mark.parametrize("loosen", ["folder", "file"])
def test_what_others_could_have_written_is_not_read(
    tmp_path: Path, loosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = made(tmp_path)
    if loosen == "folder":
        path.parent.chmod(0o770)
        assert folder(tmp_path).take_file(KEY, 1000, never) is None and "mode 0700" in caplog.text
        with pytest.raises(PackedRefused):
            folder(tmp_path).clear()
    else:
        path.chmod(0o660)
        assert folder(tmp_path).take_file(KEY, 1000, fill) is not None and "others could have written" in caplog.text
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["folder", "file"])
def test_another_user_s_are_not_read(tmp_path: Path, which: str) -> None:
    path = made(tmp_path)
    os.chown(path.parent if which == "folder" else path, 12345, -1)
    file = folder(tmp_path).take_file(KEY, 1000, never if which == "folder" else fill)
    assert (file is None) == (which == "folder")


def test_links_and_pipes_are_no_files(tmp_path: Path) -> None:
    path = made(tmp_path)
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    assert folder(tmp_path).take_file(KEY, 1000, fill) is not None and not path.is_symlink()
    path.unlink()
    os.mkfifo(path, 0o600)
    assert folder(tmp_path).take_file(KEY, 1000, fill) is not None and path.is_file()
    (tmp_path / "linked").symlink_to(path.parent)
    assert PackedFolder(tmp_path / "linked", MIB).take_file(KEY, 1000, never) is None


def test_of_two_that_start_together_one_packs(tmp_path: Path) -> None:
    processes = [child(tmp_path, 1.0) for _ in range(2)]
    try:
        told = [process.communicate("", timeout=HANG_GUARD_S)[0].split("\n")[:-1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert sorted(told) == [["mapped b'hello'"], ["packs", "mapped b'hello'"]]


def test_after_one_that_was_killed_the_next_packs_and_cleans_up(tmp_path: Path) -> None:
    process = child(tmp_path, 60.0)
    with process:
        assert line(process) == "packs"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert [name for name in files(tmp_path) if name.endswith(".draft")]
    assert folder(tmp_path, wait_s=0.0).take_file(KEY, 1000, fill) is not None
    assert files(tmp_path) == {KEY.name}


def test_who_waits_in_vain_packs_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path).unlink()
    with (tmp_path / "packed" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert folder(tmp_path, wait_s=0.2).take_file(KEY, 1000, never) is None
    assert "another process has packed for 0.2 s" in caplog.text


def test_a_file_that_is_removed_stays_mapped(tmp_path: Path) -> None:
    path = made(tmp_path)
    process = child(tmp_path, 0.0)
    with process:
        assert line(process) == "mapped b'hello'"
        mapped = folder(tmp_path).take_file(KEY, 1000, never)
        assert mapped is not None
        (listed,) = folder(tmp_path).clear()
        assert listed.in_use and not path.exists() and files(tmp_path) == set()
        assert mapped.data[:5] == b"hello"
        del mapped
        assert process.stdin is not None and process.poll() is None
        process.stdin.close()
    assert process.returncode == 0


def test_the_file_unused_longest_makes_room_and_none_in_use(tmp_path: Path) -> None:
    keys = [PackedKey({"model": name}, "code") for name in "abcd"]
    size = made(tmp_path, keys[0]).stat().st_size
    used = folder(tmp_path).take_file(keys[0], 1000, never)
    for place, key in enumerate(keys[1:3]):
        os.utime(made(tmp_path, key), (place, 2000 - place * 1000))  # c was used before b
    os.utime(tmp_path / "packed" / keys[0].name, (0, 0))
    assert folder(tmp_path, 3 * size + 10).take_file(keys[3], size, fill) is not None
    assert files(tmp_path) == {keys[0].name, keys[1].name, keys[3].name}
    assert folder(tmp_path, size + 10).take_file(keys[2], size, never) is None, "a is in use"
    assert used is not None and keys[0].name in files(tmp_path)


def test_an_nfs_folder_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS turns `flock` into byte-range locks, and refuses an exclusive one on a descriptor that can't write."""
    lock = fcntl.flock

    def flock(fd: int, kind: int) -> None:
        if kind & fcntl.LOCK_EX and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    old = made(tmp_path)
    new = made(tmp_path, PackedKey(KEY.about, "code 2"))
    assert files(tmp_path) == {new.name} and new != old


def test_what_is_larger_than_the_limit_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert folder(tmp_path, 100).take_file(KEY, 101, never) is None
    assert "--packed-bytes" in caplog.text and len(caplog.messages) == 1


def full(writer: PackedWriter) -> None:
    fill(writer)
    raise OSError(28, "No space left on device")


def source_gone(writer: PackedWriter) -> None:
    raise PackedRefused("the model's files have changed while they were read")


@pytest.mark.parametrize("write", [full, source_gone])
def test_what_fails_while_it_is_packed_leaves_nothing(
    tmp_path: Path, write: Callable[[PackedWriter], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert folder(tmp_path).take_file(KEY, 1000, write) is None
    assert files(tmp_path) == set() and len(caplog.messages) == 1 and "own memory" in caplog.text


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    assert folder(tmp_path, 1 << 60).take_file(KEY, 1 << 59, never) is None


def test_a_folder_that_can_t_be_made_costs_memory_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert PackedFolder(tmp_path / "file" / "packed", MIB).take_file(KEY, 1000, never) is None
    assert len(caplog.messages) == 1


def test_it_is_listed_and_cleared(tmp_path: Path) -> None:
    assert folder(tmp_path).listed() == [] and folder(tmp_path).clear() == []
    path = made(tmp_path)
    (path.parent / f"{KEY.name}.1.draft").write_text("left over")
    before = time.time()
    (one,) = folder(tmp_path).listed()
    assert (one.name, one.num_bytes, one.in_use) == (KEY.name, path.stat().st_size, False)
    assert one.about == KEY.whole and abs(one.used - before) < 60
    path.write_bytes(b"nothing that can be read")
    assert folder(tmp_path).listed()[0].about == {}
    assert [found.name for found in folder(tmp_path).clear()] == [KEY.name] and files(tmp_path) == set()
