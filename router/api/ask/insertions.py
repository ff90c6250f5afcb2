"""Cut clients' insertions for billing or caching out of system prompts.

    x-anthropic-billing-header: cc_version=2.1.100; cc_entrypoint=cli; cch=00af3;

Claude Code begins its system prompt with it, often as a block of its own. `cch` differs in each request, so that
nothing behind it could be cached. Its text is the name, `key=value` pairs that end with `;`, and one line end. The last
pair needs no `;` at the end of the line or block. All else is the prompt, also on the same line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_PAIR = r"[ \t]*[A-Za-z][\w.-]*=[^\s;]*"
_LINE_END = r"[ \t]*(?:\r?\n|\Z)"
INSERTION = re.compile(
    rf"x-anthropic-[a-z0-9-]*header:(?:(?:{_PAIR};)++(?:{_PAIR}{_LINE_END}|{_LINE_END})?|{_PAIR}{_LINE_END})", re.ASCII
)


def without_insertion(text: str) -> str:
    """Return the text behind insertions with which it begins."""
    at = 0
    while (found := INSERTION.match(text, at)) is not None:
        at = found.end()
    return text[at:]


def system_text(blocks: Iterable[str]) -> str:
    return "".join(map(without_insertion, blocks))
