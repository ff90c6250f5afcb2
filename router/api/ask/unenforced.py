"""Decide what becomes of an answer's form where no node can enforce it.

tools, where the model may choose   its calls are read; nothing makes them follow their schemas
JSON that is not strict             any text is answered; a whole answer's header says whether it is JSON
everything else                     refused: the client relies on it

No node follows grammars if all nodes have --pp, or a model with an encoder, or no tokenizer that they can read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.api.answer.choice_text import Delta
from router.api.ask.structured import MAKERS
from router.api.fields.fields import GenerationFields
from router.http.ignored import UNENFORCED
from router.tools.calls.deltas import ContentText
from router.tools.calls.literals import read_json
from router.tools.schemas.choice import NO_TOOLS, ChoiceMode, ToolChoice
from shared.core.errors import InvalidRequest

TOOLS, JSON = "tools", "json"  # names in the header
VALID = {True: "yes", False: "no"}
ONLY_ENFORCED = ("structured_outputs", *MAKERS)  # fields of clients that want nothing but answers of this form


def left_free(fields: GenerationFields, why: str, choice: ToolChoice = NO_TOOLS) -> tuple[str, ...]:
    """Return what the answer need not follow. `why`: a clause that says why no node follows grammars.

    Raise InvalidRequest for what must be enforced."""
    if choice.mode in (ChoiceMode.REQUIRED, ChoiceMode.NAMED):
        raise refused("tool_choice", "a call can't be enforced", why, 'send "auto"')
    strict = next((tool.name for tool in choice.tools if tool.is_strict), None)
    if strict is not None:
        raise refused("tools", f"{strict} is strict, which can't be enforced", why, "leave out `strict`")
    given = next((name for name in ONLY_ENFORCED if getattr(fields, name) is not None), None)
    if given is not None:
        raise refused(given, "this can't be enforced", why, "leave it out")
    wanted = fields.response_format
    is_json = wanted is not None and wanted.type != "text"
    if wanted is not None and wanted.json_schema is not None and wanted.json_schema.strict:
        raise refused("response_format", "its schema is strict, which can't be enforced", why, "leave out `strict`")
    return ((TOOLS,) if choice.tools else ()) + ((JSON,) if is_json else ())


def refused(field: str, what: str, why: str, advice: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what} here, because no node follows grammars: {why}; {advice}", param=field)


def free_header(names: Sequence[str], answers: Iterable[Delta] | None = None) -> dict[bytes, bytes]:
    """Return the response's header, if any, that names what no node enforces. `answers`: whole ones, to be checked."""
    if not names:
        return {}
    shown = ", ".join(names)
    if JSON in names and answers is not None:
        shown += f";valid={VALID[all(map(is_json_or_call, answers))]}"
    return {UNENFORCED: shown.encode()}


def is_json_or_call(answer: Delta) -> bool:
    """Whether the answer's text is JSON, if it is not a call. White space around it does not matter."""
    if answer.has_calls:
        return True
    text = answer.text or "".join(part.text for part in answer.parts if isinstance(part, ContentText))
    try:
        read_json(text)
    except ValueError:
        return False
    return True
