"""Make docs/http-api.md from the tables of fields; `doc_pages.py` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from router.api.fields.fields import FieldTable
from router.api.site.tables import ALL_TABLES

INTRODUCTION = """# The HTTP API, field by field

Made from the parser's own tables (`python -m tests.support.house.doc_pages --write`).

- A field that is null counts as absent. Where an integer is meant, 8.0 is 8 (8.5 is refused). A text that is a number,
  such as "0.7", is the number where only numbers are meant. With `--strict-fields` it is refused, as OpenAI's API does.
- Empty stop strings ask for nothing. Half a surrogate pair in a text, such as `\\ud83d` alone, becomes U+FFFD.
- "The model's" default is in its generation_config.json, or in `general.sampling` of its GGUF file.
  `--sampling-defaults` names other values. `/v1/models` shows the values as `sampling_defaults`. They also
  hold for parameters that an endpoint has no field for.
- Unknown fields and fields without effect are ignored. The header `x-baton-ignored-fields` names the first sixteen,
  and `baton_ignored_fields_total` counts them. With `--strict-fields` unknown fields are refused.
- A `max_tokens` (or other name of it) that does not fit after the prompt is lowered. The header `x-baton-lowered` has
  the field, the old and the new value: `max_tokens;from=32000;to=8150`. With `--strict-fields` it is refused with the
  code `context_length_exceeded`, on which agents shorten their conversation. -1 means no limit: neither the 16 tokens
  of completions nor `--default-max-tokens` count.
- Calls follow their tools' schemas, and answers the schema that the request names. If no grammar can follow a part of
  a tool's schema, such as a pattern with a look-ahead, this part is left out, and the header `x-baton-loosened-tools`
  names tool and part: `mail.properties.to.pattern`, or `mail` if the whole schema is left out. Only a tool with
  `strict: true` is refused, with a 400 that names both. The same holds for numbers that llguidance would round: bounds,
  `const` and `enum` beyond 2^53 (but 10^17 and the maximum 2^63 - 1 are exact), and a `multipleOf` beyond 100,000. In
  an answer's schema they get a 400 that names them.
- If [no node follows grammars](structured-output.md#where-no-node-follows-grammars), tools that the model may call and
  JSON that is not strict are answered all the same. The header `x-baton-unenforced` names them: `tools`, `json`. On an
  answer that is not streamed, `json;valid=no` says that its text is not JSON.
- An object with `properties` takes others only if `additionalProperties` (or `unevaluatedProperties`) allows them. With
  the router's flag `--open-objects` it takes any others, as JSON Schema says.
- A stop string ends text, not a call. If `max_tokens` cuts off a call before its arguments begin, nothing of it is
  shown.
- An answer of the shipped model has at most 1,024 tokens unless the request says otherwise (`--default-max-tokens`): a
  model this small may repeat itself to the end of its context.
- A field that would change the answer in an unsupported way is refused with a 400 that names it. A value that asks for
  nothing (`false`, `0`, `""`, `[]`, `{}`) is accepted.
- The served models read text. Documents, files and search results with text become text, in a tag; so do calls that
  another server ran, and tool references. For other parts (images, audio, other files) the model reads a placeholder if
  they stand in an earlier message, in an answer, in a tool's result, or in the message behind one: the client can't
  take them back. The header `x-baton-placeholders` names them. In the newest message of a person, and in `system`, they
  are refused. With `--unsupported-parts refuse` they are refused everywhere.
- The prompt has all texts of a conversation, whatever the order of its roles. If the chat template drops a text or
  refuses the conversation, the router rewrites it, and the header `x-baton-normalized` names the steps:
  `systems-merged,turns-joined` ([which steps there are](serving.md#texts-that-templates-drop)). The header
  `x-baton-lost-texts` names messages that the template drops in any form. Arguments of past calls may be an object,
  JSON text, or any other text, such as JSON that `max_tokens` cut.
- A client's insertion for billing or caching at the beginning of a system prompt's block (`x-anthropic-...-header:` and
  `key=value` pairs that end with `;`) is cut, because it differs in each request, and nothing behind it could be
  cached.
- The router returns the request's `X-Request-Id`, cut to 128 printable characters. If the request has none, the router
  makes one. The router's log names this id with every failure. The field `request_id` wins over the header.
- A `traceparent` of W3C Trace Context goes with the request to the node that begins it. Log lines about the request
  have its trace id as `trace_id`. With [`--otlp-endpoint`](operations.md#traces) and a traceparent that is sampled,
  Baton's spans are below the client's. Other forms of the header are ignored.
- With the header `X-Stream-Ids` (any value) each event of a stream has an `id`. Errors, `ping` and the comment
  `: waiting` have none. The first id is `TOKEN/POSITION`; later ids have only the position. TOKEN is signed, and holds
  the seed, the limit on the answer's length, the sampling values and a digest of the request. POSITION holds the number
  of events. For each choice it also holds the number of tokens and a digest of their ids. To resume a stream, send the
  same body to any router with the same `--api-key-file`, with the header `Last-Event-ID: TOKEN/POSITION`: the token,
  and the position of the last event received. The router computes the answer again and sends only the events after that
  event. `usage` counts the whole answer. `resume_mismatch` (422, or an event) means that the answer can't be
  reproduced. `unknown_stream` (400) means that no router with this key began the stream. Without `--api-key-file` the
  routers need the same `--admin-key-file` with one key; else only the router that began a stream can resume it. Streams
  of more than 32 choices have no ids.
- `Idempotency-Key` (1 to 255 characters) is for answers that are not streamed. For ten minutes the same router answers
  a repeat of the same request and key with the same answer, and `idempotent-replayed: true`. A repeat waits while the
  first request runs. The same key with another body is a 422. A request with this header is computed to its end even if
  its client hangs up. Failures are not kept. A router keeps at most 1,024 answers and 64 MiB of them; the oldest goes
  first.
- Bodies are JSON in UTF-8, perhaps after a byte order mark, whatever their media type. `Content-Encoding` may be gzip,
  deflate or zstd, or two of them. Others, br too, get a 415 whose `Accept-Encoding` lists these. `--max-body-bytes`
  limits a body before and after decoding.
- The server ignores `Upgrade`, and speaks HTTP/1.1 on plain connections. HTTP/1.0 clients get streams without chunks.
  Idle connections stay open for `--keep-alive-s`, which the header `Keep-Alive: timeout=` announces. A client that
  closes its sending side before it has its answer counts as gone.
- A slash at the end of a path changes nothing, except at `/metrics` and below `/admin`.
- Paths answer `OPTIONS` and errors of 405 with `Allow`. A 404 names the path that was meant, or all paths. Known APIs
  that are not served (embeddings, reranking, audio, images, files, batches) are refused by name, with a 404.
- `usage` shows how many of a prompt's tokens were cached. A node reports this number when it ends an answer. At a stop
  string the router ends the answer, and does not wait for the node. So if stop strings ended all answers to a prompt,
  `usage` shows 0 cached tokens.
- While a prompt waits, its stream sends the comment `: waiting` every three seconds. Clients skip it. In
  a stream with ids no blank line follows it, because openai's SDK would take that for an event without data.
- Ollama's paths stream lines of JSON (NDJSON), and have no event ids. While a prompt waits, they send a line with an
  empty part of the answer. Errors are `{"error": TEXT}`. `/api/tags`, `/api/ps` and `/api/version` have no body.
- `/openapi.json` describes the same fields to programs, in OpenAPI 3.1.
"""


def http_api_page() -> str:
    return "\n".join([INTRODUCTION, *(line for table in ALL_TABLES for line in section(table))])


def section(table: FieldTable[Any]) -> Iterator[str]:
    yield from (f"## POST {table.path}", "", "| field | |", "|---|---|")
    for name in table.served.__struct_fields__:
        yield f"| `{name}` | {table.about[name]} |"
    for name in sorted(table.ignored):
        yield f"| `{name}` | ignored: {table.ignored[name]} |"
    for name in sorted(table.refused):
        yield f"| `{name}` | refused: {table.refused[name].why} |"
    yield ""
