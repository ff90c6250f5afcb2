"""Parse a model's name on the hub: org/name[@revision][:file.gguf]. Uses no network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?(?::(?P<file>[A-Za-z0-9_][^:\\]*\.gguf))?"
)


@dataclass(frozen=True, slots=True)
class HubName:
    """`revision`: a branch, tag or commit; "" for the default branch. `file`: a GGUF file; "" for none."""

    repo: str
    revision: str = ""
    file: str = ""

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")


def parse_hub_name(text: str) -> HubName | None:
    """Return None if the text has another form, or is an existing path."""
    found = _NAME.fullmatch(text)
    if found is None or Path(text).exists():
        return None
    name = HubName(found["repo"], found["revision"] or "", found["file"] or "")
    is_path = name.repo.endswith(".gguf") or ".." in name.file.split("/")
    return None if is_path else name
