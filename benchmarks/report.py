"""Where a measurement's figures go: the terminal, and a file when --json names one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parser_with_json(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    return parser


def report(figures: Mapping[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(figures))
    print(json.dumps(figures, indent=1))
