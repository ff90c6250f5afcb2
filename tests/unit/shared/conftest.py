"""For tests of one core: what they make is closed when they end."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def cores_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rig = sys.modules.get("tests.support.cores.core_rig")
    if rig is None:  # the test's file makes no core
        yield
        return
    cores, assemble = [], rig.assemble_core

    def remember(*args, **more):  # type: ignore[no-untyped-def]
        cores.append(assemble(*args, **more))
        return cores[-1]

    monkeypatch.setattr(rig, "assemble_core", remember)
    yield
    for core in cores:
        core.close()
