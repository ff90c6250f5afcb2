"""Make docs/http-api.md from the field tables: python -m router.api.field_page > docs/http-api.md"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from router.api.fields import FieldTable
from router.api.handlers import APIS
from router.api.messages import COUNT_TOKENS
from router.api.tokenization import DETOKENIZE, TOKENIZE

ALL_TABLES: tuple[FieldTable[Any], ...] = (*(api.table for api in APIS), COUNT_TOKENS, TOKENIZE, DETOKENIZE)
INTRODUCTION = """# The HTTP API, field by field

Made from the parser's own tables (`python -m router.api.field_page`).

- A field that is null counts as absent.
- "The model's" default is in its generation_config.json, or in `general.sampling` of its GGUF file.
  [`--sampling-defaults`](flags.md) names other values. `/v1/models` shows the values as `sampling_defaults`. They also
  hold for parameters that an endpoint has no field for.
- Unknown fields and fields without effect are ignored. The header `x-baton-ignored-fields` names the first sixteen,
  and `baton_ignored_fields_total` counts them. With `--strict-fields` unknown fields are refused.
- Calls follow their tools' schemas, and answers the schema that the request names. If no grammar can follow a part of
  a tool's schema, such as a pattern with a look-ahead, this part is left out, and the header `x-baton-loosened-tools`
  names tool and part: `mail.properties.to.pattern`, or `mail` if the whole schema is left out. Only a tool with
  `strict: true` is refused, with a 400 that names both.
- An object with `properties` takes others only if `additionalProperties` (or `unevaluatedProperties`) allows them. With
  the router's flag `--open-objects` it takes any others, as JSON Schema says.
- A stop string ends text, not a call. If `max_tokens` cuts off a call before its arguments begin, nothing of it is
  shown.
- A field that would change the answer in an unsupported way is refused with a 400 that names it. A value that asks for
  nothing (`false`, `0`, `""`, `[]`, `{}`) is accepted.
- The router returns the request's `X-Request-Id`, cut to 128 printable characters. If the request has none, the router
  makes one. The router's log names this id with every failure. The field `request_id` wins over the header.
- With the header `X-Stream-Ids` (any value) each event of a stream has an `id`. Errors, `ping` and the comment
  `: waiting` have none. The first id is `TOKEN/POSITION`; later ids have only the position. TOKEN is signed, and holds
  the seed, the limit on the answer's length, the sampling values and a digest of the request. POSITION holds the number
  of events. For each choice it also holds the number of tokens and a digest of their ids. To resume a stream, send the
  same body to any router with the same `--api-key-file`, with the header `Last-Event-ID: TOKEN/POSITION`: the token,
  and the position of the last event received. The router computes the answer again and sends only the events after that
  event. `usage` counts the whole answer. `resume_mismatch` (422, or an event) means that the answer can't be
  reproduced. `unknown_stream` (400) means that no router with this key began the stream. Without `--api-key-file` the
  routers need the same `--admin-key-file`; without either, only the router that began a stream can resume it. Streams
  of more than 32 choices have no ids.
- `Idempotency-Key` (1 to 255 characters) is for answers that are not streamed. For ten minutes the same router answers
  a repeat of the same request and key with the same answer, and `idempotent-replayed: true`. A repeat waits while the
  first request runs. The same key with another body is a 422. A request with this header is computed to its end even if
  its client hangs up. Failures are not kept. A router keeps at most 1,024 answers and 64 MiB of them; the oldest goes
  first.
- `usage` shows how many of a prompt's tokens were cached. A node reports this number when it ends an answer. At a stop
  string the router ends the answer, and does not wait for the node. So if stop strings ended all answers to a prompt,
  `usage` shows 0 cached tokens.
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
