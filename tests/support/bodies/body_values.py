"""Values for the fields of request bodies: right ones by the field's type, and odd ones. Knows nothing of endpoints.

Some things can't be written by a JSON encoder: NaN, broken escapes, nesting without end. In a value a MARK and a number
stand for one of RAW, and `to_json` puts its bytes there.
"""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

from msgspec import inspect

MARK = "\ue000"
_MARKED = re.compile(rb'"(?:\\ue000|\xee\x80\x80)(\d+)"')
RAW = (
    b"NaN", b"-Infinity", b"Infinity", b"1e999", b"-1e999", b"1e-999", b"-0", b"-0.0", b"01", b"0x10", b"1.", b".5",
    b"1" + b"0" * 4200, b"-1" + b"0" * 4200, b"1" + b"0" * 5000, b"0." + b"3" * 5000, b"1e" + b"9" * 5000,
    b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d\\ude00"', b'"\\x41"', b'"\\u00"', b'"\\u0000"', b'"\x00"',
    b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\xc0\xaf"', b'"\xf4\x90\x80\x80"', b'"a\nb"', b"'a'", b"nul", b"True",
    b"/**/1", b"[1,]", b'{"a":1,}', b'{"a":1,"a":2}', b'{"":{"":{}}}', b'{"\xff":1}', b'{"\\ud800":1}',
    b"[" * 300 + b"]" * 300, b"[" * 1500 + b"]" * 1500, b'{"a":' * 300 + b"1" + b"}" * 300,
    b"[" + b"0," * 2000 + b"0]", b"[" + b'"x",' * 200 + b'"x"]', b"[" + b"[5]," * 70 + b"[5]]",
    b"{" + b",".join(b'"%d":%d' % (i, i % 90) for i in range(400)) + b"}",
    b'{"a":' * 1500 + b"1" + b"}" * 1500, b"[" * 50_000 + b"]" * 50_000, b'{"a":' * 30_000, b"[" * 90_000,
)  # fmt: skip
ODD_TEXTS = (
    "", " ", "a", "0", "1", "-1", "null", "true", "\0", "\n", "\r\n\r\n", "\x1b[31m", "\x7f", "\u2028", "\ufeff",
    "\u202eabc", "\ufffd", "\uffff", "é", "e\u0301" * 40, "ﷺ" * 20, "\U0001f469\u200d\U0001f4bb", "\U00010ffff",
    "\ud800", "%s%n%x", "{}{0}", "{{ messages }}", "{% raw %}", "<|im_end|>\n<|im_start|>system", "</s>", "<eos>",
    "<think>", "' OR 1=1", "../../etc/passwd", "$.messages[0]", "`x` - at `$.y`", "x" * 300, "y" * 600, "z" * 20_000,
)  # fmt: skip
ODD_VALUES: tuple[object, ...] = (
    None, None, True, False, 0, 1, -1, 2, 95, 96, 511, 512, 65_536, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63,
    -(1 << 63) - 1, 1 << 64, 10**30, -(10**400), 0.0, -0.0, 0.5, 1.0, 1e-320, 1e30, -1e308, 1.7976931348623157e308,
    [], {}, [None], [[]], [[[]]], [0], ["a"], [{}], {"": None}, {"a": {"b": []}}, {"type": "text"}, [[1], "a", 2],
)  # fmt: skip
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "again", "and", "{", "}", "#1", "ok.")
MOST_ITEMS = 3


def to_json(value: object, *, ascii_only: bool) -> bytes:
    """Return the text with each RAW in its place. Bytes that are no UTF-8 are kept as they are."""
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    return _MARKED.sub(lambda found: RAW[int(found[1])], text)


def types_of(kind: inspect.Type) -> list[inspect.Type]:
    """Return the types that a value may have, without null."""
    if isinstance(kind, inspect.Metadata):
        return types_of(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [one for each in kind.types for one in types_of(each) if not isinstance(one, inspect.NoneType)]
    return [kind]


class ValueSource:
    """Draws from `rng` alone. `odd_texts`: the share of texts that are odd."""

    def __init__(self, rng: random.Random) -> None:
        self.odd_texts = 0.0
        self._rng = rng

    def text(self, most_words: int = 8) -> str:
        """Return printable ASCII mostly, which HashLM can read."""
        if self._rng.random() < self.odd_texts:
            return self._rng.choice(ODD_TEXTS)
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, most_words)))

    def odd(self) -> object:
        """Return anything, no matter what the field wants."""
        draw = self._rng.random()
        if draw < 0.15:
            return f"{MARK}{self._rng.randrange(len(RAW))}"
        chosen = self._rng.choice(ODD_TEXTS if draw < 0.45 else ODD_VALUES)
        return copy.deepcopy(chosen) if isinstance(chosen, dict | list) else chosen

    def limit(self, kind: inspect.Type) -> object:
        """Return a value at a limit of the type, one beyond it, or anything where it has none."""
        kinds = [one for one in types_of(kind) if self._limits(one)]
        if not kinds:
            return self.odd()
        chosen = self._rng.choice(kinds)
        bound = self._rng.choice(self._limits(chosen))
        if isinstance(chosen, inspect.StrType):
            return "x" * (bound + self._rng.choice((-1, 0, 1)))
        return bound + self._rng.choice((-1, 0, 1, 1e-9))

    def right(self, kind: inspect.Type) -> object:
        """Return a small value that the type takes."""
        rng = self._rng
        kind = rng.choice(types_of(kind))
        if isinstance(kind, inspect.StructType):
            return self.struct(kind)
        if isinstance(kind, inspect.ListType):
            return [self.right(kind.item_type) for _ in range(rng.randint(kind.min_length or 0, MOST_ITEMS))]
        if isinstance(kind, inspect.DictType):
            return {str(rng.randrange(95)): self.right(kind.value_type) for _ in range(rng.randint(0, MOST_ITEMS))}
        if isinstance(kind, inspect.LiteralType):
            return rng.choice(kind.values)
        if isinstance(kind, inspect.BoolType):
            return rng.random() < 0.5
        return self._number(kind) if isinstance(kind, inspect.IntType | inspect.FloatType) else self._leaf(kind)

    def struct(self, kind: inspect.StructType) -> dict[str, object]:
        """Return an object with what it needs and some of the rest."""
        chosen = [one for one in kind.fields if one.required or self._rng.random() < 0.3]
        found = {one.encode_name: self.right(one.type) for one in chosen}
        return found if kind.tag_field is None else {kind.tag_field: kind.tag, **found}

    def _leaf(self, kind: inspect.Type) -> object:
        if isinstance(kind, inspect.AnyType):
            return self._rng.choice((None, True, 1, self.text(), [self.text()], {"a": self.text()}))
        return self.text() if isinstance(kind, inspect.StrType) else None

    def _number(self, kind: inspect.IntType | inspect.FloatType) -> object:
        limits = self._limits(kind)
        low = min(limits, default=0)
        high = max(limits, default=4) if len(limits) > 1 else low + 4
        if isinstance(kind, inspect.IntType):
            return self._rng.randint(int(low), int(high))
        return self._rng.choice((high, self._rng.uniform(low, high)))

    def _limits(self, kind: Any) -> list[Any]:
        names = ("min_length", "max_length") if isinstance(kind, inspect.StrType) else ("ge", "gt", "le", "lt")
        found = [getattr(kind, name, None) for name in names]
        return [limit for limit in found if limit is not None]
