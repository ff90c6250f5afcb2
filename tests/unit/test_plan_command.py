"""`baton plan find` from the flags to the verdict, and profiles as files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import plan_cases as made
import pytest

from deploy import cli
from deploy.plan import profile as profiles
from shared.core.errors import ConfigError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    profiles.save(made.profile(), path)
    return path


def find(saved: Path, *flags: str) -> int:
    short = ("--requests", "30", "--prompt-tokens", "30", "--output-tokens", "20")
    return cli.main(["plan", "find", "--profile", str(saved), *short, *flags])


def test_a_profile_comes_back_as_it_was_saved(saved: Path) -> None:
    assert profiles.read(saved) == made.profile()


def test_the_verdict_names_the_layout_and_how_to_start_it(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find(saved, "--rate", "2", "--slo", "ttft<30s") == 0
    said = capsys.readouterr().out
    assert "Do not disaggregate" in said and "meets" in said
    assert "baton up --prefill 0 --decode" in said


def test_disaggregation_wins_where_decoding_must_be_smooth(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    even = made.profile()
    even.nodes[1] = replace(even.nodes[1], beside=None)
    even.nodes[2] = replace(even.nodes[1], cores=2)  # more cores bring nothing: two nodes do
    profiles.save(even, saved)
    assert find(saved, "--rate", "0.7", "--prompt-tokens", "120", "--slo", "ttft<5s,tpot<16ms") == 0
    said = capsys.readouterr().out
    assert "Do not disaggregate" not in said and "Disaggregate" in said
    assert "baton up --prefill 1 --decode 1" in said


def test_what_nothing_meets_is_said(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find(saved, "--rate", "2", "--slo", "ttft<1ms") == 0
    assert "does not meet" in capsys.readouterr().out


def test_all_forecasts_can_be_kept(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert find(saved, "--rate", "2", "--json", str(out)) == 0
    found = json.loads(out.read_text())
    assert found["tried"] and found["tried"][0]["summary"]["num_ok"] == 30


@pytest.mark.parametrize(
    ("flags", "text"),
    [(("--machines", "0"), "1 or more"), (("--slo", "ttft<soon"), "should look like"), (("--rate", "0"), "above 0")],
)
def test_nonsense_is_named(saved: Path, flags: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert find(saved, *flags) == 2
    assert text in capsys.readouterr().err


def test_a_missing_or_foreign_profile_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="baton plan measure"):
        profiles.read(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no profile"):
        profiles.read(tmp_path / "other.json")


def test_a_node_size_that_was_not_measured_is_named() -> None:
    with pytest.raises(ConfigError, match=r"1, 2 cores, none of 3"):
        made.profile().node(3)
