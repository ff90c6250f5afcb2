"""The tools in tests/mutants, for tests: scripts beside each other, not a package."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "mutants"


def loaded(monkeypatch: pytest.MonkeyPatch, names: Sequence[str]) -> Iterator[SimpleNamespace]:
    """Yield the tools, loaded anew. Another test's of the same names come back afterwards."""
    before = {name: sys.modules.pop(name, None) for name in names}
    monkeypatch.syspath_prepend(str(FOLDER))
    yield SimpleNamespace(**{name: __import__(name) for name in names})
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
