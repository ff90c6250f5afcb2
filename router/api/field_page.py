"""The page that says what each endpoint does with each field: docs/http-api.md, made from the tables.

python -m router.api.field_page > docs/http-api.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from router.api.fields import FieldTable
from router.api.handlers import APIS
from router.api.messages import COUNT_TOKENS
from router.api.tokenization import DETOKENIZE, TOKENIZE

ALL_TABLES: tuple[FieldTable[Any], ...] = (*(api.table for api in APIS), COUNT_TOKENS, TOKENIZE, DETOKENIZE)
INTRODUCTION = """# The HTTP API, field by field

Made from the tables that the parser is made from (`python -m router.api.field_page`).

- A field that is null is a field that is not there.
- A field that is unknown, or has no effect, is ignored. The header `x-baton-ignored-fields` names the first sixteen,
  and `baton_ignored_fields_total` counts them. With `--strict-fields` an unknown one is refused.
- A field that would change the answer in a way we can't is refused with a 400 that names it, unless its value asks for
  nothing (`false`, `0`, `""`, `[]`, `{}`).
- `X-Request-Id` is returned (128 printable characters of it), or made, and stands in the router's log beside what
  failed. The field `request_id` wins over it.
- With the header `X-Stream-Ids` (any value) each event of a stream has an `id`. Errors, `ping` and the comment
  `: waiting` have none. The first id is a token, a slash and a position; the later ones are positions alone. To resume
  a stream, send the same body to any router with the same `--api-key-file`, with the header
  `Last-Event-ID: TOKEN/POSITION`: the token, and the position of the last event that came. The router computes the
  answer again, repeats no event, and goes on behind that one; `usage` counts the whole answer. `resume_mismatch` (422,
  or an event) means that the answer can't be had again. `unknown_stream` (400) means that no router with this key began
  it. Without `--api-key-file` only the router that began a stream can resume it. Streams of more than 32 choices have
  no ids.
- `Idempotency-Key` (1 to 255 characters) is for answers that are not streamed. Within ten minutes the same router gives
  the same request with the same key the same answer, with `idempotent-replayed: true`; a second request waits for the
  first. Another body with that key is a 422. Such a request is computed to its end even if its client hangs up.
  Failures are not kept. A router keeps at most 1,024 answers and 64 MiB of them; the oldest goes first.
- While a prompt waits, its stream sends the comment `: waiting` every three seconds. Clients skip it.
"""


def field_page(tables: Iterable[FieldTable[Any]]) -> str:
    return "\n".join([INTRODUCTION, *(line for table in tables for line in section(table))])


def section(table: FieldTable[Any]) -> Iterator[str]:
    yield from (f"## POST {table.path}", "", "| field | |", "|---|---|")
    for name in table.served.__struct_fields__:
        yield f"| `{name}` | {table.about[name]} |"
    for name in sorted(table.ignored):
        yield f"| `{name}` | ignored: {table.ignored[name]} |"
    for name in sorted(table.refused):
        yield f"| `{name}` | refused: {table.refused[name].why} |"
    yield ""


if __name__ == "__main__":
    print(field_page(ALL_TABLES), end="")
