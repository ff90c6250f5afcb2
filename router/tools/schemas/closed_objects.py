"""Prepare clients' schemas for grammars.

- An object that names properties and does not mention others takes no others; else a small model invents some.
- Annotations are dropped. Models see them in the prompt.

Schemas that apply together to one object, such as those under `allOf`, stay open: each would forbid what others name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from router.tools.schemas.schema_tree import all_nodes, holds_schemas, with_inner
from router.tools.schemas.schemas import Schema, properties_of, required_of, resolved

ANNOTATIONS = frozenset(
    {"title", "description", "markdownDescription", "examples", "default", "deprecated", "readOnly", "writeOnly"}
    | {"$comment"}
)
ALTERNATIVES = ("anyOf", "oneOf")
CASES = ("then", "else")
UNTOUCHED = frozenset({"not", "if", "dependentSchemas", *CASES})  # grammars don't follow these


def prepared(schema: Schema, *, opens_objects: bool = False) -> Schema:
    """`opens_objects`: leave objects open, as JSON Schema says."""
    return _Closing(schema, opens_objects).all()


class _Closing:
    def __init__(self, root: Schema, opens_objects: bool) -> None:
        self._root = root
        self._opens = opens_objects
        self._open: set[int] = set()  # ids of schemas that stay open
        for node in () if opens_objects else all_nodes(root):
            groups = self._groups(node)
            if len(groups) + bool(properties_of(node)) > 1:
                for branch in (branch for group in groups for branch in group):
                    self._leave_open(branch)

    def all(self) -> Schema:
        changed = self._changed(self._root)
        assert isinstance(changed, Mapping)
        return changed

    def _groups(self, node: Schema) -> list[list[object]]:
        """Return the schemas that apply to the same object as `node`. Of each inner list, only one has to."""
        groups = [[branch] for branch in _list(node.get("allOf"))]
        groups += [_list(node[name]) for name in ALTERNATIVES if _list(node.get(name))]
        groups += [[node[name]] for name in CASES if name in node]
        dependent = node.get("dependentSchemas")
        groups += [[schema] for schema in dependent.values()] if isinstance(dependent, Mapping) else []
        reference = node.get("$ref")
        return [*groups, [{"$ref": reference}]] if isinstance(reference, str) else groups

    def _leave_open(self, branch: object) -> None:
        target = resolved(branch, self._root)
        if isinstance(target, Mapping) and id(target) not in self._open:
            self._open.add(id(target))
            for inner in (inner for group in self._groups(target) for inner in group):
                self._leave_open(inner)

    def _changed(self, node: object) -> object:
        if not isinstance(node, Mapping):
            return node
        kept = {name: value for name, value in node.items() if name not in ANNOTATIONS}
        changed = {
            name: with_inner(name, value, lambda _, inner: self._changed(inner))
            if name not in UNTOUCHED and holds_schemas(name, value)
            else value
            for name, value in kept.items()
        }
        if self._is_to_close(node):
            changed.pop("unevaluatedProperties", None)  # grammars don't know it
            changed["additionalProperties"] = False
        return changed

    def _is_to_close(self, node: Schema) -> bool:
        if self._opens or id(node) in self._open or not isinstance(node.get("properties"), Mapping):
            return False
        if "additionalProperties" in node or node.get("unevaluatedProperties", False) is not False:
            return False
        named = properties_of(node).keys()
        others = {name for group in self._groups(node) for branch in group for name in self._named(branch, node)}
        return others <= named and (required_of(node) <= named or "patternProperties" in node)

    def _named(self, branch: object, node: Schema) -> Iterator[str]:
        """Yield the properties that a branch names. A branch that leads back to `node` names no more than `node`."""
        seen, left = {id(node)}, [branch]
        while left:
            target = resolved(left.pop(), self._root)
            if isinstance(target, Mapping) and id(target) not in seen:
                seen.add(id(target))
                yield from properties_of(target)
                left += [inner for group in self._groups(target) for inner in group]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
