"""Alert rules and dashboards ask for what routers show, and say the same as the sources that they are made from."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from prometheus_client import CollectorRegistry

from shared.observe.metrics import RequestMetrics
from tests.support.house import alarms, chart, dashboards, queries, surface
from tests.support.house.launch_lines import LAUNCH

PROMETHEUS = LAUNCH / "prometheus"
OUTCOMES = re.compile(r'outcome=~"([^"]+)"')


@pytest.mark.parametrize("rule", alarms.rules(), ids=lambda rule: rule["alert"])
def test_an_alarm_asks_for_what_there_is_and_says_what_to_do(rule: dict[str, dict[str, str]]) -> None:
    assert queries.faults(str(rule["expr"])) == []
    assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"].keys() == {"summary", "first_step"}
    for page in alarms.PAGE.findall(rule["annotations"]["first_step"]):
        assert (surface.ROOT / "docs" / page[0].partition("#")[0]).exists()


def test_the_first_failure_of_a_router_raises_its_alarm() -> None:
    """A rate sees no growth in a series that begins at 1, so what alarms ask for is there from the start."""
    registry = CollectorRegistry()
    RequestMetrics(registry)
    groups = OUTCOMES.findall(" ".join(str(rule["expr"]) for rule in alarms.rules()))
    asked = {outcome for group in groups for outcome in group.split("|")}
    assert len(asked) > 6
    for outcome in asked:
        assert registry.get_sample_value("baton_requests_total", {"outcome": outcome}) == 0, outcome


@pytest.mark.parametrize("name", sorted(dashboards.BOARDS))
def test_a_dashboard_is_what_its_source_says(name: str) -> None:
    assert (dashboards.FOLDER / f"{name}.json").read_text("utf-8") == dashboards.texts()[f"{name}.json"]
    assert {path.stem for path in dashboards.FOLDER.iterdir()} == dashboards.BOARDS.keys()


def test_every_query_of_a_dashboard_asks_for_what_there_is() -> None:
    asked = dashboards.asked()
    assert len(asked) > 45 and {query: found for query in asked if (found := queries.faults(query))} == {}
    assert all(query.count("(") == query.count(")") and "$" not in query for query in asked)


def test_legends_name_labels_that_their_queries_leave() -> None:
    for panels in dashboards.BOARDS.values():
        for title, _, found in panels:
            for legend, query in found.items():
                kept = {name.strip() for group in re.findall(r"by \(([^)]*)\)", query) for name in group.split(",")}
                assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= kept, title


def test_a_query_over_several_routers_counts_no_node_twice() -> None:
    """Each router shows all nodes, so a sum over routers of a node's figure is wrong; quantiles stay what they are."""
    shown = queries.shown()
    for query in [*dashboards.asked(), *(str(rule["expr"]) for rule in alarms.rules())]:
        for at in re.finditer(r"sum(?: by \([^)]*\))? \((?:rate\()?(baton_\w+)", query):
            assert "node" not in shown[at[1]] or at[1].endswith("_bucket"), query


def test_prometheus_reads_the_rules_and_the_chart_installs_them() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text("utf-8"))
    assert [PROMETHEUS / name for name in config["rule_files"]] == [alarms.RULES]
    (rule,) = (one for one in chart.kept("everything")[1] if one["kind"] == "PrometheusRule")
    assert rule["spec"]["groups"] == yaml.safe_load(alarms.RULES.read_text("utf-8"))["groups"]
    for path in dashboards.FOLDER.iterdir():
        assert json.loads(path.read_text("utf-8"))["uid"] == f"baton-{path.stem}"
