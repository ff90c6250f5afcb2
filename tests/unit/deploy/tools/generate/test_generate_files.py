"""Files of answers are whole after every line, belong to one run at a time, and nobody else's file is touched."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from deploy.tools.generate import line_file
from deploy.tools.generate.line_file import BatchStopped, LineFile, OutputLine, ResponsePart
from shared.core.errors import ConfigError


def line(name: str, digest: str = "1") -> OutputLine:
    return OutputLine(f"batch_req_{digest}", name, ResponsePart(200, "r", {"text": "a\nb"}), None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """With two whole lines."""
    file = LineFile(tmp_path / "out.jsonl")
    file.append(line("a"))
    file.append(line("b"))
    file.close()
    return file.path


def names(path: Path) -> list[str | None]:
    file = LineFile(path)
    try:
        return [one.custom_id for one in file.lines()]
    finally:
        file.close()


@pytest.mark.parametrize("length", [1, 9, 20, 60])
def test_a_torn_line_is_dropped_and_the_next_one_is_whole(path: Path, length: int) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:length])
    file = LineFile(path)
    assert [one.custom_id for one in file.lines()] == ["a", "b"]
    assert file.drop_torn_line()
    file.append(line("c"))
    file.close()
    assert path.read_bytes().startswith(whole) and names(path) == ["a", "b", "c"]


@pytest.mark.parametrize("text", [b"notes\n", b"notes", b'{"id": 1}\n', b'{"id":"x","custom_id":"a"}\n', b"\xff\n"])
def test_somebody_else_s_file_is_refused_and_stays(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"is not a file of answers \(line 1\) and stays unchanged"):
        names(path)
    assert path.read_bytes() == text


def test_what_can_not_be_a_file_of_answers_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be written"):
        LineFile(tmp_path / "nowhere" / "out.jsonl")
    with pytest.raises(ConfigError, match="not a plain file"):
        LineFile(Path("/dev/null"))
    assert Path("/dev/null").exists()


def test_one_run_at_a_time(path: Path) -> None:
    first = LineFile(path)
    with pytest.raises(ConfigError, match="another baton generate is writing"):
        LineFile(path)
    first.close()
    LineFile(path).close()


def test_a_full_disk_leaves_whole_lines_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, before = os.write, path.read_bytes()

    def full(fd: int, data: memoryview) -> int:
        if len(data) > 50:
            return real(fd, data[:50])
        raise OSError(errno.ENOSPC, "No space left on device")

    file = LineFile(path)
    with monkeypatch.context() as patch:
        patch.setattr(line_file.os, "write", full)
        with pytest.raises(BatchStopped, match="No space left on device"):
            file.append(line("c"))
    assert path.read_bytes() == before
    file.append(line("c"))
    file.close()
    assert names(path) == ["a", "b", "c"]


def test_an_empty_file_is_taken_away_where_it_says_nothing(tmp_path: Path) -> None:
    for keeps in (True, False):
        file = LineFile(tmp_path / "errors")
        file.append(line("a"))
        file.clear()
        file.close(keep_empty=keeps)
        assert file.path.exists() == keeps
