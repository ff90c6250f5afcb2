"""A page in a prefix cache: a node of the tree, or an entry of a WindowCache."""

from __future__ import annotations


class CachedPage:
    """A page in the tree. `identity` is computed on demand. A WindowCache's have no parent.

    `stamp`: logical time when the last lock ended. `used`: the same for uses by requests; eviction goes by it.
    `is_due`: a use has ended, and the node becomes cold when it is unlocked. An unlock sets
    `used` and `is_due` up to the first node that is still pinned. Nodes above get both when that node is unlocked.
    """

    __slots__ = ("children", "identity", "is_due", "key", "page", "parent", "refs", "stamp", "used")

    def __init__(self, key: bytes, page: int, parent: CachedPage | None, identity: bytes = b"") -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[bytes, CachedPage] = {}
        self.refs = 0
        self.stamp = 0
        self.used = 0
        self.is_due = False
        self.identity = identity
