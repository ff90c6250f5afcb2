"""Histories that agents and other programs send back, with the texts that the prompt must show.

Each text is a word of its own, so that a search in the prompt finds out whether it is there, and other texts can be
put in its place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
WORD = re.compile(r"Q[a-z]\d")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FIRST, SECOND, THIRD = "a12345678", "b12345678", "c12345678"  # ids as Mistral's templates want them
LONG = "toolu_01A09q90qw90lq917835lq9"
CUT = (
    '{"city": "Qa1',
    '"Qa1"',
    '["Qa1"]',
    "Qa1",
    '{"city": "Qa1"',
    '{"city": "Qa1\nb"}',
    '{"city": {"of": ["Qa1", 2]}}',
)


def said(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def system(text: Any = "Qs1", **more: Any) -> Message:
    return said("system", text, **more)


def user(text: Any = "Qu1", **more: Any) -> Message:
    return said("user", text, **more)


def assistant(text: Any = "Qa1", **more: Any) -> Message:
    return said("assistant", text, **more)


def called(*given: Any, text: Any = "", ids: Sequence[Any] = (FIRST, SECOND, THIRD), **more: Any) -> Message:
    calls = [
        {"id": one, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        for one, arguments in zip(ids, given, strict=False)
    ]
    return assistant(text, tool_calls=calls, **more)


def city(name: str) -> str:
    return json.dumps({"city": name})


def result(text: Any = "Qr1", call_id: Any = FIRST, **more: Any) -> Message:
    return said("tool", text, tool_call_id=call_id, **more)


def part(text: str) -> Message:
    return {"type": "text", "text": text}


CALL = called(city("Qc1"))
TALK = [user(), assistant()]
WORK = [user(), CALL, result()]
HISTORIES: dict[str, list[Message]] = {
    "plain": [user()],
    "system, user": [system(), user()],
    "talk": [system(), *TALK, user("Qu2")],
    "call": WORK,
    "work": [system(), *WORK, assistant(), user("Qu2")],
    "long work": [
        *(system(), *WORK, called(city("Qc2"), ids=[SECOND]), result("Qr2", SECOND), assistant(), user("Qu2")),
        *(called(city("Qc3"), ids=[THIRD]), result("Qr3", THIRD)),
    ],
    "two systems": [system(), system("Qs2"), user()],
    "five systems": [system(f"Qs{i}") for i in range(5)] + [user()],
    "system in the middle": [system(), *TALK, system("Qs2"), user("Qu2")],
    "system in the middle only": [*TALK, system(), user("Qu2")],
    "system last": [user(), system()],
    "system before the answer": [user(), system(), assistant(), user("Qu2")],
    "system between users": [user(), system(), user("Qu2")],
    "system behind a result": [*WORK, system()],
    "system between call and result": [user(), CALL, system(), result()],
    "systems everywhere": [system(), *TALK, system("Qs2"), user("Qu2"), system("Qs3")],
    "developer": [said("developer", "Qd1"), user()],
    "system, developer": [system(), said("developer", "Qd1"), user()],
    "developer, system": [said("developer", "Qd1"), system(), user()],
    "developer in the middle": [system(), *TALK, said("developer", "Qd1"), user("Qu2")],
    "system only": [system()],
    "developer only": [said("developer", "Qd1")],
    "two users": [user(), user("Qu2")],
    "three users": [system(), user(), user("Qu2"), user("Qu3"), assistant(), user("Qu4")],
    "two assistants": [user(), assistant(), assistant("Qa2"), user("Qu2")],
    "assistant first": [assistant(), user()],
    "system, assistant first": [system(), assistant(), user(), assistant("Qa2"), user("Qu2")],
    "assistant last": [user(), assistant()],
    "assistant only": [assistant()],
    "user behind a result": [*WORK, user("Qu2")],
    "users behind a result": [*WORK, user("Qu2"), user("Qu3"), assistant(), user("Qu4")],
    "call first": [CALL, result(), user()],
    "system, call first": [system(), CALL, result()],
    "result first": [result(), user()],
    "result behind a user": [user(), result(), user("Qu2")],
    "result without an id": [user(), CALL, said("tool", "Qr1")],
    "call without a result": [user(), CALL, user("Qu2")],
    "call last": [user(), CALL],
    "two calls": [user(), called(city("Qc1"), city("Qc2")), result(), result("Qr2", SECOND)],
    "three calls": [
        *(user(), called(city("Qc1"), city("Qc2"), city("Qc3"))),
        *(result("Qr3", THIRD), result("Qr1", FIRST), result("Qr2", SECOND), assistant(), user("Qu2")),
    ],
    "two calls, one result": [user(), called(city("Qc1"), city("Qc2")), result("Qr2", SECOND), user("Qu2")],
    "two calls in two turns": [
        *(user(), CALL, called(city("Qc2"), ids=[SECOND]), result(), result("Qr2", SECOND), assistant()),
    ],
    "text and call": [user(), called(city("Qc1"), text="Qa1"), result()],
    "texts and calls": [
        *(system(), user(), called(city("Qc1"), text="Qa1"), result()),
        *(called(city("Qc2"), text="Qa2", ids=[SECOND]), result("Qr2", SECOND), assistant("Qa3"), user("Qu2")),
    ],
    "text and two calls": [
        *(user(), called(city("Qc1"), city("Qc2"), text="Qa1"), result(), result("Qr2", SECOND), user("Qu2")),
    ],
    "thought, text and call": [user(), called(city("Qc1"), text="Qa1", reasoning_content="thought"), result()],
    "thought and call": [user(), called(city("Qc1"), reasoning_content="thought"), result()],
    "thought in the text": [user(), assistant("<think>\nthought\n</think>\n\nQa1"), user("Qu2")],
    "thought in the text and call": [user(), called(city("Qc1"), text="<think>t</think>Qa1"), result(), user("Qu2")],
    "only a thought": [user(), assistant("", reasoning_content="thought"), user("Qu2")],
    "ids of others": [user(), called(city("Qc1"), ids=[LONG]), result("Qr1", LONG), assistant(), user("Qu2")],
    "ids of none": [user(), called(city("Qc1"), ids=[""]), said("tool", "Qr1"), assistant(), user("Qu2")],
    "the same id twice": [*WORK, called(city("Qc2")), result("Qr2"), assistant(), user("Qu2")],
    "names": [user(name="ann"), assistant(name="bob"), CALL, result(name="get_weather"), user("Qu2", name="eve")],
    "empty contents": [system(""), user(), assistant(""), user("Qu2"), assistant(None), user(" ")],
    "nulls": [user(name=None), called(city("Qc1"), text=None, reasoning=None), result(), assistant(None), user("Qu2")],
    "parts": [
        *(system([part("Qs1"), part("Qs2")]), user([part("Qu1"), part("Qu2")]), assistant([part("Qa1")])),
        *(CALL, result([part("Qr1"), part("Qr2")]), user("Qu3")),
    ],
    "no arguments": [user(), called("", "null", None), result(), result("Qr2", SECOND), result("Qr3", THIRD)],
    "results with marks": [user('Qu1 "q" \\ <b>\n\n  é 🦜'), CALL, result('{"a": "Qr1\\n\\"x\\""}'), user("Qu2")],
    "agent": [
        *(system(), system("Qs2"), user(), user("Qu2"), called(city("Qc1"), text="Qa1", ids=[LONG])),
        *(result("Qr1", LONG), said("developer", "Qd1"), user("Qu3"), called(city("Qc2"), city("Qc3"), text="Qa2")),
        *(result("Qr3", SECOND), result("Qr2", FIRST), assistant("Qa3"), system("Qs3"), user("Qu4")),
    ],
}
HISTORIES |= {
    f"call with {str(given)[:25]}": [system(), user(), called(given), result(), assistant(), user("Qu2")]
    for given in CUT
}


def with_texts(value: Any, text: Callable[[], str], name: str = "") -> Any:
    """Return a copy with another text for each word. `name`: of the field, for arguments are JSON."""
    if isinstance(value, list):
        return [with_texts(item, text, name) for item in value]
    if isinstance(value, dict):
        return {key: with_texts(item, text, key) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    return WORD.sub(lambda _: json.dumps(text())[1:-1] if name == "arguments" else text(), value)
