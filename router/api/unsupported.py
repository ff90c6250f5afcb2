"""Fields of OpenAI's API that we don't serve, and those of their values that ask for nothing."""

from __future__ import annotations

import msgspec

from shared.core.errors import InvalidRequest

NOTHING: tuple[object, ...] = (None, [], {}, "")

HARMLESS: dict[str, tuple[object, ...]] = {
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "service_tier": (None, "auto", "default"),
}

REASONS: dict[str, str] = {
    "chat_template": "templates are taken from the model only",
    "chat_template_kwargs": "templates are taken from the model only",
    "suffix": "the served models can't fill in the middle",
}


def refuse_unserved(body: msgspec.Struct, path: str = "") -> None:
    """Raises for the first field that asks for something we can't do."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if not isinstance(value, msgspec.Raw):
            continue
        if msgspec.json.decode(value) not in HARMLESS.get(name, NOTHING):
            why = REASONS.get(name, "it is not served here")
            raise InvalidRequest(f"{path}{name} is not supported: {why}", param=path + name)
