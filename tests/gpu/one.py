"""One check in a process of its own: a crash, or a GPU that answers nothing any more, costs this check only.

python -m tests.gpu.one NAME --device cuda --result FILE
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from shared.core.orphan_guard import die_with_parent
from tests.gpu.place import DEVICES, make_place
from tests.gpu.plan import CHECKS_PACKAGE, Check, NotHere, check_named

EXIT_NOT_HERE = 77


def run_check(check: Check, device: str) -> dict[str, object]:
    """What it measured. AssertionError for what is not as it should be, NotHere for what can't be run on `device`."""
    module, _, function = check.run.partition(".")
    found = getattr(importlib.import_module(f"{CHECKS_PACKAGE}.{module}"), function)
    figures: dict[str, object] = found(make_place(device), *check.arguments)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, default=0, help="ends when this process ends")
    args = parser.parse_args()
    if args.parent_pid:
        die_with_parent(args.parent_pid)
    try:
        figures = run_check(check_named(args.name), args.device)
    except NotHere as reason:
        print(reason)
        return EXIT_NOT_HERE
    args.result.write_text(json.dumps(figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
