"""OpenAI's `tool_choice`: the tools that the model may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from router.tools.declared import Tool
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


def parse_tool_choice(value: object, tools: Sequence[Tool], param: str = "tool_choice") -> ToolChoice:
    """Null means `auto` if there are tools, else `none`. Raise InvalidRequest with the invalid member's name."""
    if value is None:
        return ToolChoice(ChoiceMode.AUTO, tuple(tools)) if tools else NO_TOOLS
    if isinstance(value, str):
        return _of_mode(value, tuple(tools), param)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be a string or an object", param=param)
    if value.get("type") == "function":
        return ToolChoice(ChoiceMode.NAMED, (_named(value, tools, param),))
    if value.get("type") == "allowed_tools":
        return _allowed(value, tools, param)
    raise InvalidRequest(f"{param}.type {str(value.get('type'))[:40]!r} is not supported", param=f"{param}.type")


def _of_mode(mode: object, tools: tuple[Tool, ...], param: str) -> ToolChoice:
    if mode == "none" or (mode == "auto" and not tools):
        return NO_TOOLS
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{param} must be none, auto, required or name a function", param=param)
    if not tools:
        raise InvalidRequest(f"{param} {mode} needs tools", param=param)
    return ToolChoice(ChoiceMode(mode), tools)


def _named(value: dict[str, object], tools: Sequence[Tool], param: str) -> Tool:
    """Find the tool in {"type": "function", "function": {"name": ...}}, with or without `function`."""
    inner = value.get("function", value)
    name = inner.get("name") if isinstance(inner, dict) else None
    for tool in tools:
        if tool.name == name:
            return tool
    raise InvalidRequest(f"{param} names {str(name)[:64]!r}, which is not among the tools", param=param)


def _allowed(value: dict[str, object], tools: Sequence[Tool], param: str) -> ToolChoice:
    """Parse {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}."""
    inner = value.get("allowed_tools", value)
    if not isinstance(inner, dict) or not isinstance(inner.get("tools"), list):
        raise InvalidRequest(f"{param}.allowed_tools needs a mode and a list of tools", param=param)
    names = {_named(item if isinstance(item, dict) else {}, tools, param).name for item in inner["tools"]}
    return _of_mode(inner.get("mode"), tuple(tool for tool in tools if tool.name in names), param)
