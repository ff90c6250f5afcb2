"""Put what is made from the code between two lines of a page that is written by hand otherwise."""

from __future__ import annotations


def with_part(page: str, name: str, begin: str, end: str, part: str) -> str:
    """Raise ValueError if the page, which `name` names, has no place for the part."""
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"{name} must have the lines {begin} and {end}")
    return f"{before}{begin}\n{part}{end}{after}"
