"""Certificates and logs that are damaged, or made to end the command that reads them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from deploy import cli
from deploy.tools.certify.progress import ReplayProgress
from deploy.tools.certify.run import read_log, tasks_of
from deploy.tools.certify.shown_files import read_shown
from deploy.tools.certify.shown_text import Speller
from router.certify.record import ShownAnswer, record_of
from router.certify.signing import public_pem, sign
from router.text.hashlm import HashTokenizer
from shared.core.errors import ConfigError
from tests.support.cores.certified import choice_facts, new_signer, shown_of

SIGNER = new_signer()


def test_a_time_after_the_calendar_s_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(choice_facts(), bytes(32))
    answer, key = tmp_path / "answer", tmp_path / "key"
    key.write_text(public_pem(SIGNER.secret.public_key()))
    for seconds, code in ((253_402_300_799, 0), (253_402_300_800, 1), (1 << 63, 1)):
        signed = sign(msgspec.structs.replace(record, time=seconds), SIGNER.secret)
        answer.write_text(json.dumps({"record": signed, "salt": "00" * 32}))
        assert cli.main(["verify", str(answer), "--key", str(key)]) == code
    assert "9999-12-31 23:59:59 UTC" in capsys.readouterr().out


@pytest.mark.parametrize(("prompt", "tokens"), [((1, 2, 4_000_000_000), (4, 5)), ((1, 2, 3), (4, 4_000_000_000))])
def test_text_of_tokens_that_do_not_exist(
    prompt: tuple[int, ...], tokens: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = msgspec.structs.replace(shown_of(SIGNER, choice_facts(prompt, tokens)), text="hello")
    progress = ReplayProgress(Console())
    assert not list(tasks_of([("a", shown)], None, {}, lambda: Speller(HashTokenizer()), progress))
    assert progress.counts.different == 1 and "no token 4000000000" in capsys.readouterr().out


def test_a_log_s_damaged_lines_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = json.dumps(msgspec.to_builtins(shown_of(SIGNER, choice_facts())))
    lines = [good, "\x1b[2J{", '{"record": 3}', "[" * 100_000, '{"choices": [{"index": "x"}]}', good, good[:90]]
    log, progress = tmp_path / "log", ReplayProgress(Console())
    log.write_text("\n".join(lines))
    found = list(read_log(log, progress))
    assert len(found) == 2 and all(isinstance(one, ShownAnswer) for _, one in found)
    told = capsys.readouterr().out
    assert (progress.counts.untold, progress.counts.exit_code) == (5, 2)
    assert len(told.splitlines()) == 5 and "line 7: " in told and told.replace("\n", "").isprintable()
    with pytest.raises(ConfigError, match="line 2"):  # of an answer's own file nothing is left out
        list(read_shown(log))
