"""The table of alarms in docs/operations.md, made from the rules that Prometheus reads."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.support.house.launch_lines import LAUNCH
from tests.support.house.made_parts import with_part

RULES = LAUNCH / "prometheus" / "alerts.yaml"
BEGIN, END = "<!-- made from deploy/launch/prometheus/alerts.yaml -->", "<!-- end of the alarms -->"
HEAD = "| alarm when | query | for | first step |\n|---|---|---|---|\n"
PAGE = re.compile(r"docs/(([\w-]+)\.md(?:#[\w-]+)?)")


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return list(group["rules"])


def row(rule: dict[str, Any]) -> str:
    query = rule["expr"].replace("|", "\\|")
    step = PAGE.sub(r"[\2](\1)", rule["annotations"]["first_step"])
    return f"| {rule['annotations']['summary']} | `{query}` | {rule.get('for', '')} | {step} |\n"


def renewed(page: str) -> str:
    """Return the page with a new table. Raise ValueError if the page has no place for it."""
    return with_part(page, "docs/operations.md", BEGIN, END, f"\n{HEAD}{''.join(map(row, rules()))}\n")
