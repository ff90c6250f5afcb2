"""`baton plan find` from the flags to the verdict, and profiles as files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deploy import cli
from deploy.router_url import parse_url
from deploy.tools.plan import profile as profiles
from deploy.tools.plan import search
from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.profile import PathProfile, Profile
from deploy.tools.plan.router_load import load_plan_of
from deploy.tools.plan.run import verdict
from deploy.tools.plan.running import RunningCluster, changes
from deploy.tools.plan.simulate import Forecast, forecast
from deploy.tools.traffic.load_plan import LoadPlan
from shared.core.errors import ConfigError
from tests.support.web.answering import answering
from tests.support.worlds import plan_cases as made


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    profiles.save(made.profile(), path)
    return path


def find(saved: Path, *flags: str) -> int:
    short = ("--requests", "30", "--prompt-tokens", "30", "--output-tokens", "20")
    return cli.main(["plan", "find", "--profile", str(saved), *short, *flags])


def test_the_verdict_names_the_layout_and_how_to_start_it(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find(saved, "--rate", "2", "--slo", "ttft<30s") == 0
    said = capsys.readouterr().out
    assert "Do not disaggregate" in said and "meets" in said
    assert "baton up --prefill 0 --decode" in said


def test_all_forecasts_can_be_kept(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert find(saved, "--rate", "2", "--json", str(out)) == 0
    found = json.loads(out.read_text())
    assert found["tried"] and found["tried"][0]["summary"]["num_ok"] == 30


def test_a_file_that_cannot_be_written_is_named_before_the_work(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find(saved, "--rate", "2", "--json", str(tmp_path / "none" / "found.json")) == 2
    assert find(saved, "--rate", "2", "--json", str(tmp_path)) == 2
    said = capsys.readouterr()
    assert said.err.count("can't write a file there") == 2 and not said.out


def test_a_load_that_fits_no_node_says_so(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find(saved, "--rate", "2", "--output-tokens", "5000") == 0
    assert " requests failed: prompt and answer are longer than the context of 4,096" in capsys.readouterr().out


def verdict_of(profile: Profile, *flags: str) -> str:
    tokens = made.tokens()

    def forecaster(layout: ClusterLayout, load: LoadPlan) -> Forecast:
        return forecast(layout, profile, tokens, load)

    args = cli.make_parser().parse_args(["plan", "find", "--requests", "5", *flags])
    plan = load_plan_of(args)
    finding = search.find_plan(profile, plan, args.machines, forecaster)
    return "\n".join(verdict(finding, plan, args, args.machines, profile))


def test_many_machines_get_their_commands_and_what_is_unmeasured() -> None:
    said = verdict_of(made.profile(), "--rate", "2", "--prompt-tokens", "5", "--output-tokens", "3", "--machines", "2")
    assert "over all machines, as flags of baton up: --prefill 0" in said
    assert "--model=hashlm --dtype=float32" in said
    assert "No hand-off was measured" in said
    measured = made.profile(path=PathProfile(0.0, handoff=0.01, bytes_per_s=1e6))
    assert "No hand-off was measured" not in verdict_of(measured, "--rate", "2", "--prompt-tokens", "5")


@pytest.mark.parametrize(
    ("flags", "text"),
    [(("--machines", "0"), "1 or more"), (("--slo", "ttft<soon"), "should look like"), (("--rate", "0"), "above 0")],
)
def test_nonsense_is_named(saved: Path, flags: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert find(saved, *flags) == 2
    assert text in capsys.readouterr().err


def test_a_missing_profile_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: no such profile.*baton plan measure"):
        profiles.read(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="directory"):
        profiles.read(tmp_path)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda text: "", "is not a profile"),
        (lambda text: text[:300], "is not a profile"),
        (lambda text: "{}", "has format 0, this baton reads format 2"),
        (lambda text: '{"format": 1, "hosts": []}', "has format 1, this baton reads format 2"),
        (lambda text: text.replace('"page_size": 16', '"page_size": 0'), "page_size is 0"),
        (lambda text: text.replace('"to_node": 0.0', '"to_node": null'), "is not a profile"),
        (lambda text: text.replace('"to_node": 0.0', '"to_node": -1'), "path of a node"),
        (lambda text: text.replace("1001", "1"), "step costs"),
        (lambda text: text.replace("0.011", "0.0"), "step costs"),
        (
            lambda text: text.replace('"cores": 2,\n "measured"', '"cores": 1,\n "measured"'),
            "2 cores on a machine of 1",
        ),
    ],
)
def test_a_damaged_or_foreign_profile_is_named(saved: Path, damage: Callable[[str], str], text: str) -> None:
    damaged = damage(saved.read_text())
    assert damaged != saved.read_text()
    saved.write_text(damaged)
    with pytest.raises(ConfigError, match=f"{saved.name}.*{text}.*baton plan measure --out"):
        profiles.read(saved)


def test_a_profile_without_its_paths_is_damaged(saved: Path) -> None:
    profiles.save(replace(made.profile(), paths={1: made.profile().paths[1]}), saved)
    with pytest.raises(ConfigError, match="damaged"):
        profiles.read(saved)


def test_a_node_size_that_was_not_measured_is_named() -> None:
    with pytest.raises(ConfigError, match=r"1, 2 cores, none of 3"):
        made.profile().node(3)


def layout(prefill: int, decode: int) -> ClusterLayout:
    return ClusterLayout(prefill, decode, 1, 2, 256, 64, 32)


@pytest.mark.parametrize(
    ("wanted", "lines"),
    [
        ((1, 2), ["http://r:1 runs 1 prefill and 2 decode nodes, as this layout wants."]),
        ((2, 1), ["  baton admin role d1 prefill http://r:1"]),
        ((0, 3), ["  baton admin role p0 decode http://r:1"]),
        ((0, 2), ["  baton admin drain p0 http://r:1"]),
        ((0, 1), ["  baton admin drain p0 http://r:1", "  baton admin drain d1 http://r:1"]),
        ((3, 1), ["  baton admin role d1 prefill http://r:1", "  start 1 more: baton prefill --router ..."]),
        ((2, 4), ["  start 1 more: baton prefill --router ...", "  start 2 more: baton decode --router ..."]),
    ],
)
def test_what_would_have_to_change_in_a_running_cluster(wanted: tuple[int, int], lines: list[str]) -> None:
    said = list(changes(RunningCluster(parse_url("r:1"), ("p0",), ("d0", "d1")), layout(*wanted)))
    assert said[-len(lines) :] == lines
    assert len(said) == 1 or said[0].endswith("to get there:")


def test_a_running_cluster_is_asked_and_compared(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"ready": True, "nodes": [{"node": name, "role": "decode", "ready": True} for name in ("d0", "d1", "d2")]}
    with answering(json.dumps(body).encode()) as url:
        assert find(saved, url, "--rate", "2", "--slo", "ttft<30s") == 0
    assert f"{url} runs 0 prefill and 3 decode nodes" in capsys.readouterr().out
    with answering(b"<html>") as url:
        assert find(saved, url, "--rate", "2") == 2
    assert "is it a router?" in capsys.readouterr().err
