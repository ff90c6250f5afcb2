"""Request bodies for the endpoints' tables, valid ones and mutated ones. A seed and a number give the same body always.

table -> plain body -> odd values in fields -> changed structure -> text -> changed bytes
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from typing import Any

from msgspec import defstruct, inspect

from router.api.fields.fields import FieldTable
from router.http.errors import OLLAMA_PATHS, is_messages
from tests.support.bodies.agent_turns import (
    claude_conversation,
    conversation,
    function,
    ollama_conversation,
    response_items,
)
from tests.support.bodies.body_values import ODD_TEXTS, ValueSource, to_json, types_of

Table = FieldTable[Any]
Body = dict[str, Any]
SHORT = 4  # tokens of most answers
LONG = 20_000  # bytes; the router reads a body of this length on a thread
NEEDS = {"stream_options": ("stream", True), "top_logprobs": ("logprobs", True), "echo": ("logprobs", None)}
LIMITS = ("max_tokens", "max_output_tokens")
KINDS = ("plain", "fields", "structure", "bytes")
WEIGHTS = (24, 30, 20, 26)


@functools.cache
def fields_of(table: Table) -> dict[str, inspect.Field]:
    """All fields that the table names; those that are not served may have any value. A name with a dot belongs to an
    inner object, which has unknown fields, too."""
    others = [(name, Any, None) for name in (*table.ignored, *table.refused) if "." not in name]
    whole = defstruct("Whole", others, bases=(table.served,), frozen=True, kw_only=True)
    info = inspect.type_info(whole)
    assert isinstance(info, inspect.StructType)
    return {one.encode_name: one for one in info.fields}


class BodySource:
    """Makes one body; a new one is made for each, so that none depends on those before it."""

    def __init__(self, rng: random.Random, model: str) -> None:
        self._rng = rng
        self._model = model
        self._values = ValueSource(rng)

    def body(self, table: Table) -> tuple[str, bytes]:
        """Return the kind of body, and its bytes."""
        kind = self._rng.choices(KINDS, WEIGHTS)[0]
        spoils_texts = kind != "plain" and self._rng.random() < 0.3
        self._values.odd_texts = 0.2 if spoils_texts else 0.0
        body = self.plain(table)
        if kind != "plain" and not spoils_texts:
            self._spoil_fields(body, table)
        if kind == "structure":
            for _ in range(self._rng.choice((1, 1, 2, 4))):
                self._change(body)
        whole = self._values.odd() if kind == "structure" and self._rng.random() < 0.05 else body
        text = to_json(whole, ascii_only=self._rng.random() < 0.5)
        if kind == "fields" and body and self._rng.random() < 0.2:
            text = self._twice(text, body)
        if self._rng.random() < 0.02:
            text = self._rng.choice((b"", b"\xef\xbb\xbf", b" " * LONG)) + text
        return kind, self._broken(text) if kind == "bytes" else text

    # ---- valid bodies

    def plain(self, table: Table) -> Body:
        """Return a body that is mostly answered with 200, and cheap to answer."""
        rng, fields = self._rng, fields_of(table)
        body = {name: self._plain_value(name, one, table.path) for name, one in fields.items() if one.required}
        optional = [name for name in table.served.__struct_fields__ if name not in body]
        chosen = rng.sample(optional, rng.randint(0, min(4, len(optional))))
        body |= {name: self._plain_value(name, fields[name], table.path) for name in chosen}
        limit = next((name for name in LIMITS if name in fields), None)
        if limit is not None and rng.random() < 0.98:
            body[limit] = rng.randint(1, SHORT)
        if "options" in table.about and rng.random() < 0.98:
            body["options"] = (body.get("options") or {}) | {"num_predict": rng.randint(1, SHORT)}
        if table.ignored and rng.random() < 0.3:
            body[rng.choice(list(table.ignored))] = self._values.right(inspect.AnyType())
        if table.refused and rng.random() < 0.2:
            name = rng.choice(list(table.refused))
            body[name] = copy.deepcopy(rng.choice(table.refused[name].harmless))
        return self._agreeing(body)

    def _agreeing(self, body: Body) -> Body:
        """Fields that are refused without, or beside, others."""
        for name, (other, value) in NEEDS.items():
            if name in body:
                body[other] = value
        if "max_tokens" in body:
            body.pop("max_completion_tokens", None)
        texts = [name for name in ("prompt", "content", "messages") if name in body]
        for name in texts[1:]:
            del body[name]
        return body

    def _plain_value(self, name: str, field: inspect.Field, path: str) -> Any:
        rng, text, is_claude = self._rng, self._values.text, is_messages(path)
        if name == "model":
            return self._model
        if name == "messages" and path.startswith(OLLAMA_PATHS):
            return ollama_conversation(rng, text)
        if name == "messages":
            return claude_conversation(rng, text) if is_claude else conversation(rng, text)
        if name == "input":
            return rng.choice((text(), response_items(rng, text)))
        if name == "tools":
            return [function(rng, text, is_claude=is_claude) for _ in range(rng.randint(0, 2))]
        if name == "prompt" and len(types_of(field.type)) > 1:
            return self._prompt()
        if name in ("tokens", "stop_token_ids"):
            return rng.choices(range(96), k=rng.randint(0, 30))
        if name in ("n", "best_of", "max_completion_tokens"):
            return rng.choice((1, 1, 1, 2))
        if name == "min_tokens":
            return rng.choice((0, 1))
        if name == "stop":
            return rng.choice((text(1), [text(1), "dog"], "e"))
        return self._values.right(field.type)

    def _prompt(self) -> object:
        rng, text = self._rng, self._values.text
        if rng.random() < 0.5:
            return rng.choice((text(4), text(30), [text(3), text(3)]))
        ids = rng.choices(range(95), k=rng.choice((1, 8, 40, 150)))
        return rng.choice((ids, [ids[:20], ids[:3]]))

    # ---- mutations of the tree

    def _spoil_fields(self, body: Body, table: Table) -> None:
        """One field or a few get a limit's value, or an odd one; some of them are unknown fields."""
        rng, fields = self._rng, fields_of(table)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            draw = rng.random()
            if draw < 0.1:
                body[rng.choice(ODD_TEXTS)] = self._values.odd()
                continue
            name = rng.choice(list(fields))
            if draw < 0.3:
                body[name] = self._values.right(fields[name].type)
            else:
                body[name] = self._values.limit(fields[name].type) if draw < 0.5 else self._values.odd()

    def _change(self, body: Body) -> None:
        """One change at a place drawn from the whole tree."""
        rng = self._rng
        place: Any = rng.choice(containers(body))
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            self._put(place, rng.choice(ODD_TEXTS), self._values.odd())
            return
        key, other = rng.choice(keys), rng.choice(keys)
        change = rng.randrange(7)
        if change == 0:
            del place[key]
        elif change == 1:
            for i in range(1 if isinstance(place[key], dict | list) else rng.choice((1, 2, 70))):
                self._put(place, f"{key}{i}", copy.deepcopy(place[key]))
        elif change == 2:
            place[key], place[other] = place[other], place[key]
        elif change == 3:
            place[key] = self._values.odd()
        elif change == 4:
            place[key] = rng.choice(([place[key]], {str(other): place[key]}, str(place[key])))
        elif change == 5:
            place[key] = copy.deepcopy(rng.choice((body, place)))
        else:
            self._put(place, rng.choice(ODD_TEXTS), self._values.odd())

    def _put(self, place: Any, name: str, value: object) -> None:
        if isinstance(place, dict):
            place[name] = value
        else:
            place.insert(self._rng.randint(0, len(place)), value)

    # ---- mutations of the text

    def _twice(self, text: bytes, body: Body) -> bytes:
        """The first key comes a second time, with another value."""
        name = to_json(self._rng.choice(list(body)), ascii_only=True)
        value = to_json(self._values.odd(), ascii_only=True)
        return b"{" + name + b":" + value + b"," + text[1:]

    def _broken(self, text: bytes) -> bytes:
        rng, out = self._rng, bytearray(text)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            place = rng.randrange(len(out) + 1)
            size = rng.choice((1, 1, 2, 8, 64))
            change = rng.randrange(6)
            if change == 0 and place < len(out):
                out[place] ^= 1 << rng.randrange(8)
            elif change == 1:
                del out[place : place + size]
            elif change == 2:
                out[place:place] = rng.randbytes(size)
            elif change == 3:
                out[place:place] = rng.choices(b'{}[]":,\\/0129eE-+.ntf \t\n', k=size)
            elif change == 4:
                out[place:place] = out[: rng.randint(0, len(out))][-2000:]
            elif rng.random() < 0.9:
                del out[place:]
            else:
                out = bytearray(bytes(out).decode("latin-1").encode(rng.choice(("utf-16", "utf-32", "utf-7"))))
        return bytes(out)


def containers(value: object) -> Sequence[Any]:
    """Return every object and list in the tree, the tree itself first."""
    found: list[Any] = [value]
    for one in found:
        items = one.values() if isinstance(one, dict) else one
        found += [item for item in items if isinstance(item, dict | list)]
    return found
