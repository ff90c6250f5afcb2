"""Name the files of a GGUF model that is split: NAME-00001-of-00003.gguf, NAME-00002-of-00003.gguf, ...

The first part has the header. Any part names the model.
"""

from __future__ import annotations

import re

_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def part_names(name: str) -> tuple[str, ...]:
    """Return the names or paths of all parts, of which `name` is one."""
    found = _PART.search(name)
    if found is None:
        return (name,)
    stem, count = name[: found.start()], found[1]
    return tuple(f"{stem}-{n:05}-of-{count}.gguf" for n in range(1, int(count) + 1)) or (name,)


def without_part(name: str) -> str:
    """Return the model's name: without the number of a part and without .gguf."""
    return _PART.sub("", name).removesuffix(".gguf")
