"""The `baton` command."""

from __future__ import annotations

import baton_serve


def main() -> int:
    """Return the exit status."""
    baton_serve.put_code_first()
    from deploy.cli import main

    return main()
