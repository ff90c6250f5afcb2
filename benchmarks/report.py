"""Where a measurement's figures go: the terminal, and a file when one is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def report(figures: Mapping[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(figures))
    print(json.dumps(figures, indent=1))
