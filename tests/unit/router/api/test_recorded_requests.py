"""Recorded requests of agents: each says of which program it is, holds no text of others."""

from __future__ import annotations

import json

import pytest

from tests.clients import record
from tests.clients.record import FOLDER, faults_of

FIXTURES = {file.stem: json.loads(file.read_text("utf-8")) for file in sorted(FOLDER.glob("*.json"))}


@pytest.mark.parametrize("name", FIXTURES)
def test_a_fixture_says_program_version_and_date(name: str) -> None:
    assert faults_of(FIXTURES[name]) == []


def test_each_session_that_is_recorded_has_its_fixture() -> None:
    assert {session.fixture for session in record.SESSIONS} == set(FIXTURES)
