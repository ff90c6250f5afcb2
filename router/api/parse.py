"""From the bytes of a body to a checked object, or an error that names the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from router.api.schemas import Body
from router.api.unsupported import refuse_unserved
from shared.core.errors import InvalidRequest

B = TypeVar("B", bound=Body)

_PATH = re.compile(r"^(.*?) - at `\$\.?(.*)`$", re.DOTALL)
_NAMED = re.compile(r"(?:unknown|required) field `(.*)`$", re.DOTALL)
MAX_SHOWN = 200


class BodyParser:
    """Decodes one kind of body. Holds the compiled decoder, nothing else."""

    def __init__(self, kind: type[B]) -> None:
        self._decoder = msgspec.json.Decoder(kind)

    def parse(self, raw: bytes) -> Body:
        try:
            body: Body = self._decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise field_error(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the request body is not valid JSON: {shorten(str(error))}") from error
        except RecursionError as error:
            raise InvalidRequest("the request body is nested too deeply") from error
        refuse_unserved(body)
        for index, message in enumerate(getattr(body, "messages", None) or ()):
            refuse_unserved(message, f"messages[{index}].")
        return body


def field_error(text: str) -> InvalidRequest:
    """`Expected ... - at `$.messages[0].role`` becomes an error whose param is messages[0].role."""
    located = _PATH.match(text)
    what, path = (located[1], located[2]) if located else (text, "")
    named = _NAMED.search(what)
    if named:
        path = f"{path}.{named[1]}" if path else named[1]
    path = shorten(path.replace("[...]", ""))
    if not path:
        return InvalidRequest(f"the request body does not fit: {shorten(what)}")
    return InvalidRequest(f"{path}: {shorten(what)}", param=path)


def shorten(text: str) -> str:
    """Errors may quote the client's own text; a megabyte of it helps nobody."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
