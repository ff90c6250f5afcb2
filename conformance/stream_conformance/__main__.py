"""The program, without installing it: `python -m stream_conformance URL`."""

from __future__ import annotations

import sys

from stream_conformance.command import main

sys.exit(main())
