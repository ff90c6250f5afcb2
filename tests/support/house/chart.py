"""Render the Helm chart with each of its values files, and keep what comes out for tests that have no Helm.

    python -m tests.support.house.chart [--helm PATH] [--write]

tests/data/chart/NAME.jsonl has one object a line, of ci/NAME-values.yaml, and before them the digest of the chart's
files: a chart that was changed and not rendered again is found without Helm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "launch" / "helm" / "baton"
RENDERED = ROOT / "tests" / "data" / "chart"
NAMES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir())
RELEASE = NAMESPACE = "baton"

Rendered = list[dict[str, Any]]


def digest() -> str:
    """Return the SHA-256 of all files of the chart, with their names."""
    whole = hashlib.sha256()
    for path in sorted(path for path in CHART.rglob("*") if path.is_file()):
        whole.update(
            f"{path.relative_to(CHART).as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return whole.hexdigest()


def render(helm: str, name: str) -> Rendered:
    command = [helm, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "-f", f"{CHART}/ci/{name}-values.yaml"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [one for one in yaml.safe_load_all(text) if one]


def kept(name: str) -> tuple[str, Rendered]:
    """Return the digest of the chart that was rendered, and the objects."""
    first, *objects = (RENDERED / f"{name}.jsonl").read_text("utf-8").splitlines()
    return json.loads(first)["chart"], [json.loads(line) for line in objects]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--helm", default=shutil.which("helm"))
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    if args.helm is None:
        parser.error("there is no helm in PATH: name one with --helm")
    stale = []
    for name in NAMES:
        objects = render(args.helm, name)
        if args.write:
            lines = [{"chart": digest()}, *objects]
            RENDERED.mkdir(exist_ok=True)
            (RENDERED / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines), "utf-8")
        elif kept(name) != (digest(), objects):
            stale.append(name)
    print("stale: " + ", ".join(stale) if stale else f"{len(NAMES)} renderings are those of the chart")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
