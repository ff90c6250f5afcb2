"""Objects and lists whose members are tags: `<a>1</a><b><item>x</item></b>` is {"a": 1, "b": ["x"]}."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.tools.calls.literals import from_tagged, json_string
from router.tools.schemas.schemas import MAX_STEPS, Schema, kinds_of, properties_of, resolved

ITEM = "item"  # the tag of a list's members


@dataclass(frozen=True, slots=True)
class NestedTags:
    """`opens`, `behind`: the marks around a member's name; `closes`, with {key} for the name, ends the member."""

    opens: str
    behind: str
    closes: str

    def end_of(self, name: str) -> str:
        return self.closes.replace("{key}", name)

    def as_json(self, text: str, schema: object, root: Schema, depth: int = MAX_STEPS) -> str:
        """Text without members is a value by itself, whose JSON type the schema decides, or an empty list or object."""
        kinds = kinds_of(schema, root)
        if not text.strip() and kinds in ({"array"}, {"object"}):
            return "[]" if kinds == {"array"} else "{}"
        if self.opens not in text or depth == 0:
            return from_tagged(text, kinds)
        members = self._members(text)
        target = resolved(schema, root)
        target = target if isinstance(target, Mapping) else {}
        if all(name == ITEM for name, _ in members) and "object" not in kinds_of(target, root):
            items = [self.as_json(inner, target.get("items"), root, depth - 1) for _, inner in members]
            return f"[{', '.join(items)}]"
        inner_schemas = properties_of(target)
        pairs = [
            f"{json_string(name)}: {self.as_json(inner, inner_schemas.get(name), root, depth - 1)}"
            for name, inner in members
        ]
        return f"{{{', '.join(pairs)}}}"

    def _members(self, text: str) -> list[tuple[str, str]]:
        """Return (name, inside) of each member. A member without an end goes up to the text's end."""
        members: list[tuple[str, str]] = []
        at = text.find(self.opens)
        while at >= 0:
            name, _, _ = text[at + len(self.opens) :].partition(self.behind)
            start = at + len(self.opens) + len(name) + len(self.behind)
            end = self._end_of_member(text, start, name)
            members.append((name, text[start:end]))
            at = text.find(self.opens, end + len(self.end_of(name)))
        return members

    def _end_of_member(self, text: str, start: int, name: str) -> int:
        """Members with this name may lie inside the member."""
        closing = self.end_of(name)
        num_open, at = 1, start
        while (end := text.find(closing, at)) >= 0:
            num_open += self.num_begun(text[at:end], name) - 1
            if num_open == 0:
                return end
            at = end + len(closing)
        return len(text)

    def num_begun(self, text: str, name: str) -> int:
        """Return how many members with this name begin in the text."""
        return text.count(f"{self.opens}{name}{self.behind}")
