"""Name what was changed in a request, or has no effect: in response headers, and in the metric."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

IGNORED = b"x-baton-ignored-fields"
LOWERED = b"x-baton-lowered"  # a limit of the request that was lowered, with its old and its new value
PLACEHOLDERS = b"x-baton-placeholders"  # parts of messages in whose place the model reads a placeholder
NORMALIZED = b"x-baton-normalized"  # steps that rewrote the conversation, because the template did not take it
LOST = b"x-baton-lost-texts"  # parts of messages that the template drops, whatever the form of the conversation
LOOSENED = b"x-baton-loosened-tools"  # parts of tools' schemas that no grammar can enforce
UNENFORCED = b"x-baton-unenforced"  # `tools` and `json`, if no node follows grammars
MAX_PART_CHARS = 256  # length of a part's name
MAX_NAMES = 16
MAX_CHARS = 64  # length of one name
MAX_BYTES = 1024  # length of all names, because proxies limit headers
SAFE = "[]._-"  # not escaped, like letters and digits


def names_in_header(names: Sequence[str], max_chars: int = MAX_CHARS) -> bytes:
    """Return names up to MAX_BYTES, escaped and comma-separated. `...` replaces the rest."""
    shown = [quote(name[:max_chars], safe=SAFE, errors="replace") for name in names[:MAX_NAMES]]
    while len(",".join(shown)) > MAX_BYTES:
        shown.pop()
    return ",".join([*shown, *(["..."] if len(names) > len(shown) else [])]).encode("ascii")
