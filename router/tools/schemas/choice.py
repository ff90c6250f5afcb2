"""OpenAI's `tool_choice`: the tools that the model may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from router.tools.schemas.declared import Tool
from shared.core.errors import InvalidRequest


class ChoiceMode(StrEnum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"  # exactly one call, of the only tool in `tools`


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`tools`: callable tools. With NONE the model may still see all tools."""

    mode: ChoiceMode
    tools: tuple[Tool, ...] = ()


NO_TOOLS = ToolChoice(ChoiceMode.NONE)


def parse_tool_choice(value: object, tools: Sequence[Tool]) -> ToolChoice:
    """Null means `auto` if there are tools, else `none`. Raise InvalidRequest with the invalid member's name."""
    if value is None:
        return ToolChoice(ChoiceMode.AUTO, tuple(tools)) if tools else NO_TOOLS
    if isinstance(value, str):
        return _of_mode(value, tuple(tools))
    if not isinstance(value, dict):
        raise InvalidRequest("tool_choice must be a string or an object", param="tool_choice")
    if value.get("type") == "function":
        return ToolChoice(ChoiceMode.NAMED, (_named(value, tools),))
    if value.get("type") == "allowed_tools":
        return _allowed(value, tools)
    raise InvalidRequest(f"tool_choice.type {str(value.get('type'))[:40]!r} is not supported", param="tool_choice.type")


def _of_mode(mode: object, tools: tuple[Tool, ...]) -> ToolChoice:
    if mode == "none" or (mode == "auto" and not tools):
        return NO_TOOLS
    if mode not in ("auto", "required"):
        raise InvalidRequest("tool_choice must be none, auto, required or name a function", param="tool_choice")
    if not tools:
        raise InvalidRequest(f"tool_choice {mode} needs tools", param="tool_choice")
    return ToolChoice(ChoiceMode(mode), tools)


def _named(value: dict[str, object], tools: Sequence[Tool]) -> Tool:
    """Find the tool in {"type": "function", "function": {"name": ...}}, with or without `function`."""
    inner = value.get("function", value)
    name = inner.get("name") if isinstance(inner, dict) else None
    for tool in tools:
        if tool.name == name:
            return tool
    raise InvalidRequest(f"tool_choice names {str(name)[:64]!r}, which is not among the tools", param="tool_choice")


def _allowed(value: dict[str, object], tools: Sequence[Tool]) -> ToolChoice:
    """Parse {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}."""
    inner = value.get("allowed_tools", value)
    if not isinstance(inner, dict) or not isinstance(inner.get("tools"), list):
        raise InvalidRequest("tool_choice.allowed_tools needs a mode and a list of tools", param="tool_choice")
    names = {_named(item if isinstance(item, dict) else {}, tools).name for item in inner["tools"]}
    return _of_mode(inner.get("mode"), tuple(tool for tool in tools if tool.name in names))
