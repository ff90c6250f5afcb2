"""Runs the `baton` command."""

from __future__ import annotations

import sys

from baton_serve.command import main

if __name__ == "__main__":
    sys.exit(main())
