"""Make the pages of docs that are read off running code: metrics, messages, fields, and tables of models and alarms.

    python -m tests.support.house.doc_pages [--write]

`tests/unit/house/test_doc_pages.py` compares them with what is committed. Knows nothing of what the entries mean.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from msgspec import inspect as kinds
from prometheus_client import Metric

from shared.wire import messages
from shared.wire.codec import MOST_BYTES, MOST_BYTES_OF
from tests.support.house import alarms, field_page, model_table, surface
from tests.support.models import published_folders

DOCS = surface.ROOT / "docs"
REWRITE = "python -m tests.support.house.doc_pages --write"


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


# ---- metrics

METRICS_HEAD = f"""# Metrics

For people who watch Baton: what a router shows on `/metrics`, nodes' figures included.
[Where to find what](structure.md#operation) says how to add one. Made from the registries
(`shared/observe/metric_names.py`, `metrics.py`) by `{REWRITE}`.

A label in *italics* is a name (a node, a field); the others have the values that are listed. A histogram has `_bucket`,
`_sum` and `_count`.

The metrics of `vllm:` are for the endpoint pickers of Kubernetes' Gateway API inference extension, which read these
names of every model server unless told otherwise. They count the whole cluster, at each of its routers.

| metric | kind | labels | meaning |
|---|---|---|---|
"""


def metrics_page() -> str:
    return METRICS_HEAD + "".join(map(metric_row, surface.families()))


def metric_row(family: Metric) -> str:
    name, about = surface.shown_name(family), cell(family.documentation)
    return f"| `{name}` | {family.type} | {cell(labels(family.samples))} | {about} |\n"


def labels(samples: Iterable[Any]) -> str:
    found: dict[str, dict[str, None]] = {}
    for sample in samples:
        for name, value in sample.labels.items():
            if name != "le":
                found.setdefault(name, {})[value] = None
    return ", ".join(
        f"*{name}*" if list(values) == [surface.ANY] else f"{name}: {' '.join(sorted(values))}"
        for name, values in found.items()
    )


# ---- messages

ROUTER_TO_NODE, NODE_TO_ROUTER = "Router to node", "Node to router"
OUT, BACK, BOTH = "Prefill node to decode node", "Decode node to prefill node", "Both ways between two nodes"
THROUGH = "Router to node, and on to the node's other routers"
ASKS, LENDS = "Prefill node to another one that has pages", "Back from that one"
WAYS: dict[str, tuple[type, ...]] = {
    NODE_TO_ROUTER: (
        messages.Hello,
        messages.Heartbeat,
        messages.Begun,
        messages.Tokens,
        messages.Scores,
        messages.CacheEvents,
        messages.Goodbye,
        messages.Unwelcome,
    ),
    ROUTER_TO_NODE: (
        messages.Welcome,
        messages.Generate,
        messages.Abort,
        messages.Keep,
        messages.Drain,
        messages.LoadAdapter,
        messages.RemoveAdapter,
        messages.Release,
        messages.CacheReplay,
    ),
    THROUGH: (messages.Spending,),
    OUT: (messages.Offer, messages.Ready, messages.Prebuilt),
    BACK: (
        messages.Grant,
        messages.Wait,
        messages.Refuse,
        messages.FramesTaken,
        messages.Installed,
        messages.Failed,
        messages.Join,
        messages.Take,
    ),
    ASKS: (messages.Pull, messages.Returned),
    LENDS: (messages.Lent,),
    BOTH: (messages.StoreEntry, messages.Broken),
}
MESSAGES_HEAD = f"""# Messages

For people who read or change the protocol between routers and nodes. Made from `shared/wire/messages.py` by
`{REWRITE}`. [handoff.md](handoff.md) says when each one is sent.

Protocol {messages.PROTOCOL_VERSION}. A message is msgpack: a map with the tag `t`, its class name. A missing field has
its default, if it has one. Unknown fields are skipped. Other missing fields, unknown tags and values beyond a limit are
errors; such a message is dropped and counted, and such a `Generate` is answered with the end `wire_error`.
[Two versions](adr/0011-neighbours.md) of the protocol work side by side by the tables in `shared/wire/versions.py`. KV
pages never travel inside a message: with the transport `zmq` they are frames behind their `Ready`. A drafter's buffers
do travel inside a message (`Prebuilt.draft_state`). A prefill node sends `Abort` to a decode node, too, and `Ready` to
another prefill node that has asked with `Pull`.
"""
TRAILING = re.compile(r"^    (\w+): [^#]*?(?:#\s*(.*))?$")
MOST_EXACT = (1 << 53) - 1  # of a count
ABOVE = re.compile(r"^    #\s*(.*)$")


def messages_page() -> str:
    told = {kind for group in WAYS.values() for kind in group}
    missing = set(all_messages()) ^ told
    assert not missing, f"WAYS lacks, or has too much: {missing}"
    lines = [MESSAGES_HEAD]
    for way, group in WAYS.items():
        lines += [f"## {way}", ""]
        lines += [line for kind in group for line in message_section(kind, MOST_BYTES_OF.get(kind, MOST_BYTES))]
    lines += ["## Parts of messages", ""]
    return "\n".join([*lines, *(line for kind in parts() for line in message_section(kind))])


def all_messages() -> tuple[type, ...]:
    assert isinstance(messages.AnyMessage, UnionType)
    return get_args(messages.AnyMessage)


def parts() -> list[type]:
    """Return the structs inside of messages, in the order in which they occur."""
    found: dict[type, None] = {}
    for kind in (one for group in WAYS.values() for one in group):
        for field in struct_of(kind).fields:
            walk(field.type, lambda inner: found.setdefault(inner.cls))
    return list(found)


def struct_of(kind: type) -> kinds.StructType:
    info = kinds.type_info(kind)
    assert isinstance(info, kinds.StructType)
    return info


def walk(kind: kinds.Type, visit: Callable[[kinds.StructType], object]) -> None:
    if isinstance(kind, kinds.StructType):
        visit(kind)
        for field in kind.fields:
            walk(field.type, visit)
    for name in ("type", "item_type", "key_type", "value_type"):
        inner = getattr(kind, name, None)
        if isinstance(inner, kinds.Type):
            walk(inner, visit)
    for inner in (*getattr(kind, "types", ()), *getattr(kind, "item_types", ())):
        walk(inner, visit)


def message_section(kind: type, most_bytes: int = 0) -> Iterator[str]:
    doc, own = kind.__doc__ or "", comments(kind)
    yield from (f"### {kind.__name__}", "")
    if most_bytes:
        yield from (f"At most {most_bytes >> 10:,} KiB.", "")
    if doc and not doc.startswith(f"{kind.__name__}("):
        yield from (" ".join(inspect.cleandoc(doc).split()), "")
    yield from ("| field | type | |", "|---|---|---|")
    for field in struct_of(kind).fields:
        yield f"| `{field.name}` | {cell(written(field.type))} | {cell(own.get(field.name, ''))} |"
    yield ""


def comments(kind: type) -> dict[str, str]:
    """Return what the source says beside each field, or in the line before it."""
    found: dict[str, str] = {}
    before = ""
    for line in inspect.getsource(kind).splitlines():
        above = ABOVE.match(line)
        if above is not None:
            before = f"{before} {above[1]}".strip()
            continue
        field = TRAILING.match(line)
        if field is not None:
            found[field[1]] = field[2] or before
        before = ""
    return found


def written(kind: kinds.Type) -> str:
    """A type and its limits in words."""
    match kind:
        case kinds.Metadata(type=inner, extra=extra):
            bits = (extra or {}).get("bits")
            return written(inner) + (f" of {bits} bits" if bits else "")
        case kinds.UnionType(types=types):
            return " or ".join(map(written, types))
        case kinds.NoneType():
            return "nothing"
        case kinds.BoolType():
            return "true or false"
        case kinds.LiteralType(values=values):
            return " or ".join(f'"{value}"' for value in values)
        case kinds.StructType(cls=inner):
            return f"[{inner.__name__}](#{inner.__name__.lower()})"
        case kinds.DictType(key_type=key, value_type=value):
            return f"map of {written(value)} by {written(key)}{at_most(kind)}"
        case kinds.ListType(item_type=item) | kinds.VarTupleType(item_type=item):
            return f"list{at_most(kind)} of {written(item)}"
    return f"{plain(kind)}{bounds(kind)}{at_most(kind)}"


def plain(kind: kinds.Type) -> str:
    return type(kind).__name__.removesuffix("Type").lower()


def at_most(kind: Any) -> str:
    return "" if getattr(kind, "max_length", None) is None else f" (at most {kind.max_length:,})"


def bounds(kind: Any) -> str:
    low, high = getattr(kind, "ge", None), getattr(kind, "le", None)
    if high is None and getattr(kind, "lt", None) is not None:
        high = kind.lt - 1
    if isinstance(kind, kinds.FloatType):
        return ""
    from_low = "" if low is None else f" from {low}"
    to_high = "" if high is None else " to 2^53 - 1" if high == MOST_EXACT else f" to {high:,}"
    return from_low + to_high


# ---- models


def support_page() -> str:
    return model_table.renewed((DOCS / "support.md").read_text("utf-8"))


# ---- alarms


def operations_page() -> str:
    return alarms.renewed((DOCS / "operations.md").read_text("utf-8"))


PAGES: dict[str, Callable[[], str]] = {
    "http-api.md": field_page.http_api_page,
    "metrics.md": metrics_page,
    "messages.md": messages_page,
    "support.md": support_page,
    "operations.md": operations_page,
}


def stale(folder: Path = DOCS) -> list[str]:
    """Return the pages that are not what the code says."""
    return [name for name, page in PAGES.items() if (folder / name).read_text("utf-8") != page()]


def main(argv: list[str]) -> int:
    if "--write" in argv:
        published_folders.write_verdicts()
        for name, page in PAGES.items():
            (DOCS / name).write_text(page(), "utf-8")
        return 0
    wrong = stale()
    print("\n".join(f"{name} is stale: {REWRITE}" for name in wrong) or f"{len(PAGES)} pages are what the code says")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
