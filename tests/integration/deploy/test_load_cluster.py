"""`baton load` on real router and node processes: clients hang up, a node is killed, and everything is still true."""

from __future__ import annotations

import re

import pytest

from deploy import cli
from deploy.tools.traffic import truth
from tests.support.clusters.cluster import baton_up
from tests.support.machine.patience import HANG_GUARD_S


@pytest.mark.long
def test_a_killed_node_under_load_shows_only_in_the_drill(tmp_path, capsys, monkeypatch):
    for slack in ("TTFT_SLACK_S", "ITL_SLACK_S", "LAG_BOUND_S"):  # a busy machine may take its time between the two
        monkeypatch.setattr(truth, slack, 20.0)
    with baton_up(tmp_path / "up.log", "--model", "hashlm", "--decode", "2") as cluster:
        flags = ["--duration", "6", "--rate", "10", "--output-tokens", "300", "--turns", "1-2", "--golden-every", "4"]
        trouble = ["--hang-up", "0.2", "--drill", "kill:decode-1@3"]
        for bound in ("--rest", "--stall", "--drain"):
            trouble += [bound, str(HANG_GUARD_S)]
        status = cli.main(["load", cluster.url, "--quiet", *flags, *trouble])
    text = capsys.readouterr().out
    marks = dict(re.findall(r"^ (\w+) +(ok|FAILED|doubtful|-)  ", text, re.MULTILINE))
    assert status == 0, text
    assert {marks[name] for name in ("answers", "tokens", "stalls", "leaks", "drills")} == {"ok"}, text
    assert "token for token" in text and re.search(r"under [1-9]\d* streams: 0 failed", text)
    assert re.search(r"decode-1 serves again after \d", text)
