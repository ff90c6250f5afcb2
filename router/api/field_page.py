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
- With the header `X-Stream-Ids` (any value) each event of a stream has an `id`, but for `: waiting`, `ping` and errors.
  Who lost the stream sends the same body again, to any router with the same `--api-key-file`, and as `Last-Event-ID`
  the token of the first id, up to its slash, a slash, and what stood behind the slash of the last id that came. The
  answer is computed again, nothing of it is said twice, and it goes on behind that event; `usage` counts all of it.
  `resume_mismatch` (422, or an event) means that it can't be had again, `unknown_stream` (400) that no router with
  this key began it. Without `--api-key-file` only the router that began a stream goes on with it. Streams of more
  than 32 choices have no ids.
- `Idempotency-Key` (1 to 255 characters), for answers that are not streamed: the same request with the same key within
  ten minutes gets the same answer from the same router, with `idempotent-replayed: true`, and waits for it where it is
  not there yet. Another body is a 422. Such a request is computed to its end even if its client hangs up. Failures are
  not kept. A router keeps 1,024 answers and 64 MiB of them at most; the oldest goes first.
- A stream whose prompt waits says `: waiting` every three seconds, a comment that clients pass over.
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
