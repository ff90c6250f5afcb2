"""Turn parts of messages that are not plain text into text, a placeholder or an error.

    document, file with text, search_result, tool_reference   their text, in a tag
    server_tool_use, web_search_tool_result, ...              a foreign server's calls and results, in a tag
    image, audio, other files, unknown                        a placeholder; an error in the newest user message

A client can take back only its newest message. It sends earlier images with each later request.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.api.fields.fields import Body
from shared.core.errors import InvalidRequest

MAX_KIND = 40  # characters of a client's type that an error or a placeholder shows
OPAQUE = frozenset({"type", "id", "signature", "cache_control", "citations", "encrypted_content", "encrypted_stdout"})


class AnyPart(Body, frozen=True, kw_only=True):
    """The fields of all kinds of parts. It has many fields because the kind is known only after decoding."""

    type: str = "text"
    text: str | None = None
    title: Any = None
    context: Any = None
    source: Any = None
    content: Any = None
    name: Any = None
    tool_name: Any = None
    input: Any = None
    url: Any = None
    file: Any = None
    filename: Any = None
    file_data: Any = None
    file_id: Any = None
    file_url: Any = None
    image_url: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    detail: Any = None
    citations: Any = None
    cache_control: Any = None
    encrypted_content: Any = None
    page_age: Any = None


class Parts:
    """What one request's parts become. `keeps`: whether placeholders are allowed."""

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self.replaced: list[str] = []  # paths of parts with a placeholder

    def text_of(self, part: AnyPart, path: str, *, is_newest: bool) -> str:
        """Raise InvalidRequest for a part that may not have a placeholder."""
        if part.type == "text":
            return needed_text(part, path)
        text = readable(part)
        return text if text is not None else self.left_out(part.type, path, is_newest=is_newest)

    def left_out(self, kind: str, path: str, *, is_newest: bool) -> str:
        if is_newest or not self._keeps:
            raise not_text(kind, path)
        self.replaced.append(path)
        return f"[{kind[:MAX_KIND]} left out: this model reads text only]"


def not_text(kind: str, path: str) -> InvalidRequest:
    why = f"{path}.type {kind[:MAX_KIND]!r} is not supported: this model reads text only"
    return InvalidRequest(why, param=f"{path}.type")


def needed_text(part: AnyPart, path: str) -> str:
    if part.text is None:
        raise InvalidRequest(f"{path}.text: a part of type {part.type!r} needs it", param=f"{path}.text")
    return part.text


def newest_user(roles: Sequence[str]) -> int | None:
    """Return the index of the message that a person has just written, or None.

    A message with tool results has the role `tool`. An agent writes the message behind it, often with a tool's images.
    """
    spoken = [(index, role) for index, role in enumerate(roles) if role != "system"]
    while spoken and spoken[-1][1] == "assistant":
        spoken.pop()
    if not spoken or spoken[-1][1] != "user":
        return None
    return None if len(spoken) > 1 and spoken[-2][1] == "tool" else spoken[-1][0]


def readable(part: AnyPart) -> str | None:
    """Return the text that a part holds, in a tag; None if there is none."""
    kind = part.type
    if kind in ("document", "file", "input_file"):
        text = _document_text(part)
        return None if text is None else tagged(kind, text, title=_title(part), context=part.context)
    if kind == "search_result":
        return tagged(kind, content_text(part.content), title=part.title, source=part.source)
    if kind == "tool_reference":
        return tagged(kind, str(part.tool_name or part.name or ""))
    if kind.endswith("tool_use"):
        return tagged(kind, json_text(part.input), name=part.name)
    if kind.endswith("tool_result"):
        return tagged(kind, content_text(part.content))
    return None


def tagged(kind: str, text: str, **attributes: object) -> str:
    shown = "".join(f" {name}={json_text(value)}" for name, value in attributes.items() if isinstance(value, str))
    return f"<{kind[:MAX_KIND]}{shown}>\n{text}\n</{kind[:MAX_KIND]}>\n"


def content_text(content: object) -> str:
    """Return the text of any content: of lists with a line for each entry, of other objects as JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(map(content_text, content))
    if isinstance(content, AnyPart):
        content = {name: value for name in content.__struct_fields__ if (value := getattr(content, name)) is not None}
    if isinstance(content, Mapping):
        text = content.get("text")
        readable = {name: item for name, item in content.items() if name not in OPAQUE}
        return text if isinstance(text, str) else json_text(readable)
    return json_text(content) if content is not None else ""


def json_text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _title(part: AnyPart) -> object:
    return part.title or part.filename or (part.file.get("filename") if isinstance(part.file, dict) else None)


def _document_text(part: AnyPart) -> str | None:
    source = part.source
    if isinstance(source, dict):
        if source.get("type") == "content":
            return _all_text(source.get("content"))
        data = source.get("data")
        if source.get("type") == "text":
            return data if isinstance(data, str) else None
        return _decoded(data) if str(source.get("media_type")).startswith("text/") else None
    data = part.file.get("file_data") if isinstance(part.file, dict) else part.file_data
    if not isinstance(data, str) or not data.startswith("data:text/"):
        return None
    head, _, body = data.partition(",")
    return _decoded(body) if head.endswith(";base64") else None


def _all_text(content: object) -> str | None:
    """Return None if the content has an image."""
    if isinstance(content, list) and not all(isinstance(one, dict) and "text" in one for one in content):
        return None
    return content_text(content) if isinstance(content, str | list) else None


def _decoded(data: object) -> str | None:
    if not isinstance(data, str):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
