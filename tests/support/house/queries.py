"""Prometheus queries, compared with what a router shows: metrics, and labels and their values."""

from __future__ import annotations

import re
from functools import cache

from tests.support.house import surface

SELECTOR = re.compile(r"\b((?:baton_|vllm:)\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
GROUPED = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
GIVEN = {"namespace", "pod", "job", "instance"}  # by Prometheus, to every sample


@cache
def shown() -> dict[str, dict[str, set[str]]]:
    """Sample -> its labels -> their values, as a router with one node shows them."""
    found: dict[str, dict[str, set[str]]] = {}
    for sample in (one for family in surface.families() for one in family.samples):
        labels = found.setdefault(sample.name, {})
        for name, value in sample.labels.items():
            labels.setdefault(name, set()).add(value)
    return found


def faults(query: str) -> list[str]:
    """Return what the query asks for that no router shows."""
    selectors = SELECTOR.findall(query)
    found = [] if selectors else ["it asks for no metric of ours"]
    known = set(GIVEN)
    for metric, matchers in selectors:
        if metric not in shown():
            found.append(f"there is no {metric}")
            continue
        labels = shown()[metric]
        known |= labels.keys()
        for label, operator, value in MATCHER.findall(matchers):
            if label not in labels and label not in GIVEN:
                found.append(f"{metric} has no label {label}")
            elif label in labels and not labels[label] & {surface.ANY}:
                wanted = value.split("|") if "~" in operator else [value]
                found += [
                    f"{metric} is never {label}={one}" for one in wanted if one not in labels[label] and one[:1] != "$"
                ]
    grouped = {label.strip() for group in GROUPED.findall(query) for label in group.split(",")}
    return found + [f"nothing has a label {label}" for label in sorted(grouped - known - {""})]
