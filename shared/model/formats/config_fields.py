"""Say which fields of a config.json our programs may leave unread, by the library's class of the family.

Our networks equal the library's. So a field that its class does not declare, or that has the class's default, changes
no answer. A test compares the table with the library, which is not loaded for it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.config.models.model_folder import CONFIG
from shared.core.errors import ConfigError

# fields that classes declare and our programs don't read, with their defaults
_OF_ALL: Mapping[str, Any] = {"chunk_size_feed_forward": 0, "is_encoder_decoder": False}
_OF_FAMILY: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"attn_logit_softcapping": None, "use_bidirectional_attention": False},
}

_log = logging.getLogger(__name__)


class NotOurs(ConfigError):
    """config.json asks for something that our programs lack, and the library transformers may have.

    `reason`: what it is, without the folder."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"{folder / CONFIG}: {reason}; --model-library transformers may run it")
        self.reason = reason


def declared_fields(family: str) -> Mapping[str, Any]:
    """Return the fields that the library's class reads and our programs don't, with their defaults."""
    return {**_OF_ALL, **_OF_FAMILY.get(family, {})}


@functools.cache
def _tell_unread(family: str, names: str) -> None:
    """Say it once, although config.json is read several times."""
    _log.info("config.json has fields that no program reads for %s: %s", family, names)


def fields_that_matter(family: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that may change answers."""
    declared = declared_fields(family)
    if unread := sorted(fields.keys() - declared.keys()):
        _tell_unread(family, ", ".join(unread))
    return sorted(name for name in fields.keys() & declared.keys() if fields[name] != declared[name])
