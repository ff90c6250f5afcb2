"""Find the numbers in a grammar's schemas that llguidance does not follow exactly.

llguidance computes with doubles and 64-bit integers. It takes 9007199254740993 for 9007199254740992, so a constant
would force another id on the model. A constant -2^63 recurses without end and kills the process. A `multipleOf` needs
as many states as the number is large: a million of them take 13 s and 290 MB.

All numbers count, under whatever name: a property may have the name of a keyword.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal

from shared.core.errors import InvalidRequest

LAST_EXACT = 1 << 53  # every integer up to here is a double
MOST_INT64 = (1 << 63) - 1  # as a maximum it is exact, by saturation
MOST_MULTIPLE = 100_000
EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")  # llguidance adds 1 to them
MULTIPLE = "multipleOf"
MOST_UNREAD = 64  # texts in a grammar that look like schemas; each is read up to its first error
_EMBEDDED = re.compile(r"%json\s*(?=\{)")


def check_numbers(grammar: str) -> None:
    """Raise InvalidRequest, which names the number. `grammar`: a text for llguidance, JSON or Lark."""
    parts = json.loads(grammar)["grammars"] if grammar.lstrip().startswith("{") else [{"lark_grammar": grammar}]
    for part in parts:
        _check(part.get("json_schema"))
        for schema in _embedded(part.get("lark_grammar") or ""):
            _check(schema)


def _embedded(lark: str) -> Iterator[object]:
    """Yield the schemas in a Lark text, which a client may have written."""
    decoder = json.JSONDecoder(strict=False)
    end = num_unread = 0
    while (found := _EMBEDDED.search(lark, end)) is not None and num_unread < MOST_UNREAD:
        try:
            schema, end = decoder.raw_decode(lark, found.end())
            yield schema
        except json.JSONDecodeError:  # a comment, a text, or an error that llguidance finds
            end, num_unread = found.end(), num_unread + 1
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"a schema in the grammar can't be read: {str(error)[:100]}") from None
    if num_unread == MOST_UNREAD:
        raise InvalidRequest(f"the grammar has {MOST_UNREAD} texts that look like schemas and can't be read")


def _check(schema: object) -> None:
    multiples = []
    for path, value in _numbers(schema):
        keyword = path.rpartition(".")[2]
        if not _is_exact(keyword, value):
            why = f"it rounds numbers beyond {LAST_EXACT} (2^53)"
            raise InvalidRequest(f"{path}: no grammar can follow {str(value)[:40]}: {why}")
        if keyword == MULTIPLE:
            multiples.append(Decimal(repr(value)))
    if multiples and _together(multiples) > MOST_MULTIPLE:
        shown = ", ".join(map(str, multiples))[:100]
        why = f"their least common multiple may be at most {MOST_MULTIPLE}"
        raise InvalidRequest(f"{MULTIPLE}: no grammar can follow {shown}: {why}")


def _numbers(schema: object) -> Iterator[tuple[str, int | float]]:
    """Yield (path, number). Numbers in a list have the path of the list."""
    left = [("", schema)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{path}.{name}" if path else name, inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(path, inner) for inner in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value


def _is_exact(keyword: str, value: int | float) -> bool:
    if abs(value) < LAST_EXACT + (keyword not in EXCLUSIVE):
        return True
    if keyword in EXCLUSIVE or not abs(value) <= MOST_INT64:
        return False
    if keyword == "maximum" and value == MOST_INT64:
        return True
    as_double = float(value)
    return as_double == value == Decimal(repr(as_double))  # in integers it is a double, in numbers its shortest digits


def _together(multiples: list[Decimal]) -> int:
    """Return the states that numbers need which may apply to one value: their least common multiple as integers."""
    digits = max(0, *(-int(one.as_tuple().exponent) for one in multiples))
    return math.lcm(*(int(one.scaleb(digits)) for one in multiples))
