"""`baton load` on real router and node processes: clients hang up, a node is killed, and everything is still true."""

from __future__ import annotations

import re

import pytest

from deploy import cli
from deploy.tools.load import truth
from tests.support.cluster import baton_up

pytestmark = pytest.mark.slow


def test_a_killed_node_under_load_shows_in_the_drill_and_nowhere_else(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(truth, "TTFT_SLACK_S", 20.0)  # a busy machine may take its time between server and client
    with baton_up(tmp_path / "up.log", "--model", "hashlm", "--decode", "2") as cluster:
        flags = ["--duration", "6", "--rate", "10", "--output-tokens", "300", "--turns", "1-2", "--golden-every", "4"]
        trouble = ["--hang-up", "0.2", "--drill", "kill:decode-1@3", "--rest", "60", "--stall", "30"]
        status = cli.main(["load", cluster.url, "--quiet", *flags, *trouble])
    text = capsys.readouterr().out
    marks = dict(re.findall(r"^ (\w+) +(ok|FAILED|doubtful|-)  ", text, re.MULTILINE))
    assert status == 0, text
    assert {marks[name] for name in ("answers", "tokens", "stalls", "leaks", "drills")} == {"ok"}, text
    assert "token for token" in text and re.search(r"under [1-9]\d* streams: 0 failed", text)
    assert re.search(r"decode-1 serves again after \d", text)
