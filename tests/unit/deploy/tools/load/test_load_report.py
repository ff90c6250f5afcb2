"""Reports that are read back, comparisons that know chance from difference, the live view, plans out of flags."""

from __future__ import annotations

import argparse
import itertools
import math
import types

import pytest

from deploy import cli
from deploy.tools.load.compare import ComparedLine, bad, lines_of, remarks
from deploy.tools.load.harness import failed_elsewhere
from deploy.tools.load.page import page_of
from deploy.tools.traffic.figures.check import Check
from deploy.tools.traffic.figures.figures import Estimate
from deploy.tools.traffic.figures.outcome import LoadReport, encode, read_report, row_of, series_of
from deploy.tools.traffic.figures.slo import Slo
from deploy.tools.traffic.figures.summary import Reader, Window, summarize
from deploy.tools.traffic.live import glance_at
from deploy.tools.traffic.load_plan import golden_prompts, plan_of
from deploy.tools.traffic.options import add_arguments
from deploy.tools.traffic.workloads.driver import Driver, Limits
from deploy.tools.traffic.workloads.lengths import parse_lengths
from deploy.tools.traffic.workloads.workload import Synthetic, with_probes
from shared.core.errors import ConfigError
from tests.support.web.virtual_load import Script, always, play, single_turns


def records(script=None, seconds=10.0):
    arrivals = (i / 4 for i in range(10**6))
    driver = Driver(single_turns(5), arrivals, 0, Limits(seconds))
    return play(driver, script or always(Script(ttft=0.5, itl=0.1)))


def report(script=None, **changes):
    made = records(script)
    fields = {
        "title": "m at <here>",
        "begun": "2026-01-01T00:00:00+00:00",
        "server": "http://127.0.0.1:8000",
        "model": "m",
        "command": "baton load",
        "summary": summarize(made, Window(0.0, 10.0), Slo(ttft=1.0), Reader()),
        "checks": [Check("tokens", "ok", "fine"), Check("leaks", "failed", "<b>1 page</b>", ("n",))],
        "series": series_of(made, 11.0),
        "rows": [row_of(one) for one in made],
    }
    return LoadReport(**(fields | changes))


def test_a_report_is_read_as_it_was_written(tmp_path):
    first = report(lambda request: Script(error="no" if request.number % 3 == 0 else "", ttft=0.5, itl=0.1))
    path = tmp_path / "report.json"
    path.write_bytes(encode(first))
    assert encode(read_report(tmp_path)) == encode(first)
    assert read_report(path).rows == first.rows
    assert math.isnan(read_report(path).summary.latencies["ttft"]["max"].low)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"title": 3}'])
def test_what_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a report"):
        read_report(path)


def test_a_report_of_another_format_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(encode(report(format=2)))
    with pytest.raises(ConfigError, match="has format 2; this baton reads format 1"):
        read_report(path)


def test_in_a_sweep_overload_may_stall_but_never_lie():
    failed = [Check(name, "failed", "") for name in ("answers", "tokens", "stalls", "leaks", "agreement")]
    good, bad_run = (types.SimpleNamespace(checks=checks) for checks in ([], failed))
    beyond = failed_elsewhere({1.0: good, 2.0: bad_run}, good, 1.0)
    assert [check.name for check in beyond] == ["tokens", "leaks"]
    below = failed_elsewhere({0.5: bad_run, 1.0: good}, good, 1.0)
    assert [check.name for check in below] == ["tokens", "stalls", "leaks", "agreement"]
    assert failed_elsewhere({2.0: bad_run}, bad_run, 0.0) == []


def test_the_page_stands_alone_and_escapes():
    page = page_of(report())
    assert "m at &lt;here&gt;" in page and "&lt;b&gt;1 page" in page and "<b>1" not in page
    assert "<script" not in page and page.count("<svg") == 5
    assert page == page_of(report())  # the same report, the same file


def test_a_folder_that_cannot_be_written_is_named_before_the_run(tmp_path, capsys):
    """Nobody is there to be asked: that would be said next."""
    (tmp_path / "file").write_text("")
    assert cli.main(["load", "http://127.0.0.1:9", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "--out" in capsys.readouterr().err
    assert cli.main(["load", "http://127.0.0.1:9", "--out", str(tmp_path / "out")]) == 2
    assert "is a server running there?" in capsys.readouterr().err


def test_a_run_that_brought_nothing_still_has_a_page():
    page = page_of(report(always(Script(error="503 all"))))
    assert "<h2>Latencies</h2>" in page and "nan" not in page.partition("<svg")[0]


def line(a, b, lower_is_better=True):
    return ComparedLine("x", Estimate(*a), Estimate(*b), lower_is_better)


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (line((10, 9, 11), (5, 4, 6)), "better"),
        (line((5, 4, 6), (10, 9, 11)), "worse"),
        (line((10, 9, 11), (5, 4, 6), False), "worse"),
        (line((10, 9, 11), (10.9, 9.9, 11.9)), "same"),
        (line((10, 9, 11), (11.5, 10.5, 12.5)), "worse"),  # beyond what chance makes of both: sqrt(2)
        (line((10, math.nan, math.nan), (5, 4, 6)), ""),
        (line((math.nan,) * 3, (5, 4, 6)), ""),
    ],
)
def test_chance_is_told_from_difference(one, verdict):
    assert one.verdict == verdict


def test_a_run_is_like_itself_and_a_slow_one_is_worse():
    assert {one.verdict for one in lines_of(report(), report())} <= {"same", ""}
    slow = report(always(Script(ttft=2.0, itl=0.3)))
    verdicts = {one.name: one.verdict for one in lines_of(report(), slow)}
    assert verdicts["TTFT p50 ms"] == "worse" and verdicts["goodput /s"] == "worse"


def test_remarks_name_what_makes_two_runs_incomparable():
    found = "\n".join(remarks(report(), report(model="n", command="baton load --rate 3")))
    assert "other models" in found and "other commands" in found and "first: check leaks failed" in found
    assert bad([Check("a", "ok", "")]) == []


def test_a_glance_shows_the_newest_seconds():
    made = records(lambda request: Script(ttft=9.0 if request.due < 2 else 0.5, itl=0.1), seconds=20.0)
    glance = glance_at(made, made[-3:], 19.0)
    assert (glance.sent, glance.open, glance.failed) == (80, 3, 0)
    assert glance.tokens_per_s == pytest.approx(20.0, rel=0.1)
    assert glance_at(made, made[-3:], 40.0).tokens_per_s == 0.0
    # nothing new is sent, and what is open still brings something
    assert glance_at(made, made[-9:], 29.0).tokens_per_s == pytest.approx(
        sum(at > 19 for r in made[-9:] for at in r.at) / 10
    )
    assert glance.ttft_p99 == pytest.approx(0.5) and len(glance.cells()) == 9
    assert glance_at([], [], 0.0).cells()[0] == "0 s"


def flags(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(list(words))


def test_a_plain_load_of_a_seed_knows_nothing_of_agents():
    lengths = [parse_lengths("", text) for text in ("128", "64", "2-3")]
    wanted = Synthetic(*lengths).sessions(5)
    found = plan_of(flags("--turns", "2-3")).load.source.sessions(5)
    assert list(itertools.islice(found, 20)) == list(itertools.islice(wanted, 20))


def test_golden_prompts_are_like_the_loads_own_and_none_of_them():
    plan = plan_of(flags("--turns", "3", "--prefix-tokens", "9"))
    probes = golden_prompts(plan)
    assert [(len(one.turns), one.probe) for one in probes] == [(1, 0), (1, 1), (1, 2), (1, 3)]
    load = with_probes(plan.load.source.sessions(0), [], 1)
    own = {next(load).turns[0].text for _ in range(200)}
    assert not own & {one.turns[0].text for one in probes}
    assert plan_of(flags("--temperature", "0.7")).truth.golden == 0


def test_windows():
    made = records()
    assert plan_of(flags("--warmup", "2", "--duration", "10")).window(made) == Window(2.0, 10.0)
    last = max(one.end for one in made)
    assert plan_of(flags("--requests", "40", "--duration", "50")).window(made) == Window(0.0, last)
    assert plan_of(flags("--requests", "41", "--duration", "50")).window(made) == Window(0.0, 50.0)
    assert plan_of(flags("--concurrency", "3")).window(made) == Window(0.0, last)
