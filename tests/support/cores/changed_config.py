"""Change some settings of a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from shared.config.flags import from_sections, sections_of

P = TypeVar("P")


def replaced(config: P, **changes: Mapping[str, Any]) -> P:
    """Return a changed copy. For example, replaced(config, node={"node_id": "x"})."""
    sections = sections_of(config)
    changed = {section: dataclasses.replace(sections[section], **dict(fields)) for section, fields in changes.items()}
    return from_sections(type(config), sections | changed)
