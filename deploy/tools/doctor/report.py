"""Print findings as text, the worst first, or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from deploy.tools.doctor.finding import LEVELS, OK, Finding, worst

MARKS = {"ok": "ok    ", "look": "look  ", "broken": "BROKEN"}


def as_text(findings: Sequence[Finding]) -> str:
    ordered = sorted(findings, key=lambda finding: -LEVELS.index(finding.level))
    lines = [line for finding in ordered for line in lines_of(finding)]
    counts = ", ".join(f"{sum(f.level == level for f in findings)} {level}" for level in reversed(LEVELS))
    return "\n".join([*lines, "", f"in all: {counts}"])


def lines_of(finding: Finding) -> list[str]:
    line = f"{MARKS[finding.level]}  {finding.check:<10} {finding.where}: {finding.what}"
    return [line] if finding.level == OK or not finding.advice else [line, f"{'':8}what to do: {finding.advice}"]


def as_json(url: str, findings: Sequence[Finding]) -> str:
    body = {"url": url, "worst": worst(findings), "findings": [dataclasses.asdict(finding) for finding in findings]}
    return json.dumps(body, indent=2)
