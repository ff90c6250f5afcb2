"""Bodies that are no JSON of ours, and limits of the configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.api.fields.fields import FieldTable
from router.api.fields.parse import BodyParser
from router.api.openai.chat import CHAT
from router.api.site.tables import ALL_TABLES
from shared.core.errors import InvalidRequest
from tests.support.machine.growth import grows_linearly

BROKEN = [b"", b"{", b"[]", b"3", b'"x"', b"null", b'{"model":', b"\xff\xfe", b'{"model": NaN}', b'{"a":1}trailing',
          b'{"model": "\xff"}', b'{"tools":' + b"[" * 200_000, b"[" * 200_000]  # fmt: skip


@pytest.mark.parametrize("raw", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("table", [pytest.param(table, id=table.path) for table in ALL_TABLES])
def test_broken_json_is_a_4xx(table: FieldTable[Any], raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as error:
        BodyParser(table).parse(raw)
    assert error.value.status == 400 and len(error.value.message) < 600


def refusal_of_role(role: str) -> InvalidRequest:
    body = {"messages": [{"role": role, "content": "x"}]}
    with pytest.raises(InvalidRequest) as error:
        BodyParser(CHAT).parse(json.dumps(body).encode())
    return error.value


@pytest.mark.parametrize("words", ["unknown field `", "unknown field `x` - at `$.y"])
def test_a_refused_value_does_not_change_the_param(words: str) -> None:
    assert refusal_of_role(words).param == "messages[0].role"


@pytest.mark.parametrize("words", ["unknown field `", " - at `$", "`"])
def test_a_long_refused_value_takes_linear_time(words: str) -> None:
    assert grows_linearly(lambda num: refusal_of_role(words * num), 200)
