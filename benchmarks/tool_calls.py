"""How many tool calls of a model reach the client as calls: asks a running server questions that each need one call.

baton up --model FILE --port 8474
python -m benchmarks.tool_calls http://127.0.0.1:8474 [--num 40] [--modes auto] [--show]

Works with any server that has /v1/chat/completions. Answers are compared with the known function and arguments, texts
without regard to case. `lost` counts answers whose text looks like a call: it has a mark of a format of calls, or the
name of a declared function and braces, and doesn't define it in Python. Temperature 0, one request per question and
mode.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

MODES = ("auto", "required")
TEXT, NUMBER, WHOLE, YES_NO = {"type": "string"}, {"type": "number"}, {"type": "integer"}, {"type": "boolean"}
TOOLS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "get_weather": ("Get the current weather of a city.",
                    {"city": TEXT, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}),
    "set_timer": ("Set a timer that rings after some minutes.", {"minutes": WHOLE}),
    "add_numbers": ("Add two numbers.", {"a": NUMBER, "b": NUMBER}),
    "send_message": ("Send a text message to a person.", {"to": TEXT, "text": TEXT}),
    "switch_light": ("Switch the light of a room on or off.", {"room": TEXT, "on": YES_NO}),
    "read_file": ("Read a file and return its text.", {"path": TEXT}),
    "translate": ("Translate a text into another language.",
                  {"text": TEXT, "language": {"type": "string", "enum": ["French", "German", "Italian", "Spanish"]}}),
    "find_flights": ("Find flights from one city to another.", {"origin": TEXT, "destination": TEXT}),
    "delete_rows": ("Delete rows of a table by their ids.", {"table": TEXT, "ids": {"type": "array", "items": WHOLE}}),
    "convert_money": ("Convert an amount of money; currencies are three-letter codes.",
                      {"amount": NUMBER, "source": TEXT, "target": TEXT}),
}  # fmt: skip
# Each question, the function that it needs, and the arguments in the order of its parameters. Ten questions in a row
# need all functions.
ASKED: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("What is the weather in Paris, in celsius?", "get_weather", ("Paris", "celsius")),
    ("Set a timer for 10 minutes.", "set_timer", (10,)),
    ("What is 12 plus 30? Use the function.", "add_numbers", (12, 30)),
    ("Send Anna the message: dinner is ready", "send_message", ("Anna", "dinner is ready")),
    ("Switch on the light in the kitchen.", "switch_light", ("kitchen", True)),
    ("Show me the file notes.txt.", "read_file", ("notes.txt",)),
    ("Translate 'good morning' into French.", "translate", ("good morning", "French")),
    ("Find flights from Berlin to Madrid.", "find_flights", ("Berlin", "Madrid")),
    ("Delete the rows 3 and 7 of the table users.", "delete_rows", ("users", [3, 7])),
    ("Convert 100 USD to EUR.", "convert_money", (100, "USD", "EUR")),
    ("How warm is it in Oslo? In celsius, please.", "get_weather", ("Oslo", "celsius")),
    ("Start a 25 minute timer.", "set_timer", (25,)),
    ("Please add 4.5 and 8 with the function.", "add_numbers", (4.5, 8)),
    ("Tell Ben by message: I am late", "send_message", ("Ben", "I am late")),
    ("Turn off the bedroom light.", "switch_light", ("bedroom", False)),
    ("Read the file /etc/hostname.", "read_file", ("/etc/hostname",)),
    ("Translate 'thank you' into German.", "translate", ("thank you", "German")),
    ("I want to fly from Rome to Tokyo. Which flights are there?", "find_flights", ("Rome", "Tokyo")),
    ("Delete row 12 of the table orders.", "delete_rows", ("orders", [12])),
    ("How many JPY are 20 GBP?", "convert_money", (20, "GBP", "JPY")),
    ("Tell me the weather in Chicago in fahrenheit.", "get_weather", ("Chicago", "fahrenheit")),
    ("Remind me with a timer in 3 minutes.", "set_timer", (3,)),
    ("Compute 100 + 250 with the function.", "add_numbers", (100, 250)),
    ("Send a message to Carla: the train leaves at nine", "send_message", ("Carla", "the train leaves at nine")),
    ("Switch the light in the garage off.", "switch_light", ("garage", False)),
    ("What does the file src/main.py say?", "read_file", ("src/main.py",)),
    ("Translate 'where is the station' into Spanish.", "translate", ("where is the station", "Spanish")),
    ("Search flights from Lisbon to London.", "find_flights", ("Lisbon", "London")),
    ("Delete the rows 1, 2 and 5 of the table logs.", "delete_rows", ("logs", [1, 2, 5])),
    ("Convert 7.5 CHF to SEK.", "convert_money", (7.5, "CHF", "SEK")),
    ("Weather in Cairo, celsius.", "get_weather", ("Cairo", "celsius")),
    ("I need a timer of 45 minutes for the bread.", "set_timer", (45,)),
    ("Add 7 and -2 with the function.", "add_numbers", (7, -2)),
    ("Message David: see you tomorrow", "send_message", ("David", "see you tomorrow")),
    ("Switch on the light in the hall.", "switch_light", ("hall", True)),
    ("Open the file data/report.csv and read it to me.", "read_file", ("data/report.csv",)),
    ("Translate 'I am hungry' into Italian.", "translate", ("I am hungry", "Italian")),
    ("Which flights go from Vienna to Athens?", "find_flights", ("Vienna", "Athens")),
    ("Delete row 40 of the table carts.", "delete_rows", ("carts", [40])),
    ("Convert 1500 INR to USD.", "convert_money", (1500, "INR", "USD")),
)
# Published formats of calls by the marks that begin a call. A chat template has the first format with a mark in it.
FORMATS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>commentary", "<|channel|>", "to=functions.")),
    ("kimi", ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")),
    ("deepseek", ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜DSML｜")),
    ("minimax", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("gemma4", ("<|tool_call>",)),
    ("granite", ("<|tool_call|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm", ("<arg_key>",)),
    ("qwen3_coder", ("<function=",)),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>", "<|python_start|>", '{"name": function name, "parameters"')),
    ("pythonic", ("[func_name1(", "[func_name(")),
)


@dataclass(frozen=True, slots=True)
class Case:
    question: str
    name: str
    arguments: Mapping[str, Any]
    declared: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """`name`: of the first call, "" for no call. `refusal`: the server's error instead of an answer."""

    name: str = ""
    arguments: str = ""
    text: str = ""
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    num_asked: int
    num_called: int
    num_named: int
    num_right: int
    num_lost: int
    num_refused: int


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    with httpx.Client(base_url=args.url.rstrip("/"), timeout=args.timeout_s) as client:
        model = args.model or client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        written_in = args.format or format_of(template_of(client))
        asked = cases(args.num)
        rows = []
        for mode in args.modes:
            answers = ask_all(client, model, asked, mode, args)
            rows.append((model, written_in, mode, score(asked, answers)))
            tell(mode, asked, answers, shows_lost=args.show)
    print("\n".join(table(rows)))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server, without /v1")
    parser.add_argument("--num", type=int, choices=range(1, len(ASKED) + 1), default=len(ASKED), metavar="N",
                        help="the first N questions (default: %(default)s)")  # fmt: skip
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="of tool_choice (default: both)")
    parser.add_argument("--model", help="(default: the server's first)")
    parser.add_argument("--format", help="name in the table (default: by /tokenizer_info's chat template)")
    parser.add_argument("--streams", type=int, default=4, help="requests at a time (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of a request (default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="print the texts that hold a lost call")
    return parser


def cases(num: int) -> list[Case]:
    """The first `num` questions. They declare one to four functions, in turn; the needed one stands anywhere."""
    names = list(TOOLS)
    found = []
    for idx, (question, name, values) in enumerate(ASKED[:num]):
        others = [other for other in names[idx % 10 :] + names[: idx % 10] if other != name][: idx % 4]
        place = idx // 4 % (len(others) + 1)
        declared = (*others[:place], name, *others[place:])
        found.append(Case(question, name, dict(zip(TOOLS[name][1], values, strict=True)), declared))
    return found


def declared_tool(name: str) -> dict[str, Any]:
    about, properties = TOOLS[name]
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def ask_all(
    client: httpx.Client, model: str, asked: Iterable[Case], mode: str, args: argparse.Namespace
) -> list[Answer]:
    with ThreadPoolExecutor(args.streams) as pool:
        return list(pool.map(lambda case: ask(client, model, case, mode, args.max_tokens), asked))


def ask(client: httpx.Client, model: str, case: Case, mode: str, max_tokens: int) -> Answer:
    body = {
        "model": model, "messages": [{"role": "user", "content": case.question}], "temperature": 0.0,
        "tools": [declared_tool(name) for name in case.declared], "tool_choice": mode, "max_tokens": max_tokens,
    }  # fmt: skip
    reply = client.post("/v1/chat/completions", json=body)
    if reply.is_error:
        return Answer(refusal=f"{reply.status_code}: {reply.text}")
    message = reply.json()["choices"][0]["message"]
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        return Answer(call["function"]["name"], call["function"]["arguments"], text)
    return Answer(text=text)


def score(asked: Sequence[Case], answers: Sequence[Answer]) -> Score:
    pairs = list(zip(asked, answers, strict=True))
    return Score(
        num_asked=len(pairs),
        num_called=sum(bool(answer.name) for answer in answers),
        num_named=sum(answer.name == case.name for case, answer in pairs),
        num_right=sum(is_right(case, answer) for case, answer in pairs),
        num_lost=sum(is_lost(case, answer.text) for case, answer in pairs),
        num_refused=sum(bool(answer.refusal) for answer in answers),
    )


def is_right(case: Case, answer: Answer) -> bool:
    if answer.name != case.name:
        return False
    try:
        return bool(plain(json.loads(answer.arguments)) == plain(dict(case.arguments)))
    except ValueError:
        return False


def plain(value: Any) -> Any:
    """The value with texts in lower case, without spaces and a full stop at their ends. True differs from 1."""
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    if isinstance(value, list):
        return [plain(member) for member in value]
    if isinstance(value, str):
        return value.strip().rstrip(".").lower()
    return ("yes" if value else "no",) if isinstance(value, bool) else value


def is_lost(case: Case, text: str) -> bool:
    if any(mark in text for _, marks in FORMATS for mark in marks):
        return True
    return any(
        name in text and ("{" in text or f"{name}(" in text) and f"def {name}" not in text for name in case.declared
    )


def template_of(client: httpx.Client) -> str | None:
    """Return the server's chat template; of several the one for tools. None if the server does not show it."""
    reply = client.get("/tokenizer_info")
    found = reply.json().get("chat_template") if reply.is_success else None
    if isinstance(found, list):
        by_name = {row["name"]: row["template"] for row in found}
        return by_name.get("tool_use", by_name.get("default"))
    return found


def format_of(template: str | None) -> str:
    if template is None:
        return "?"
    if "tools" not in template:
        return "no tools"
    return next((name for name, marks in FORMATS if any(mark in template for mark in marks)), "other")


def tell(mode: str, asked: Sequence[Case], answers: Sequence[Answer], *, shows_lost: bool) -> None:
    refusals = [answer.refusal for answer in answers if answer.refusal]
    if refusals:
        print(f"{mode}: {len(refusals)} requests were refused, the first with {refusals[0][:300]}", file=sys.stderr)
    for case, answer in zip(asked, answers, strict=True):
        if shows_lost and is_lost(case, answer.text):
            print(f"{mode}: {case.question} -> {answer.text!r}", file=sys.stderr)


def table(rows: Iterable[tuple[str, str, str, Score]]) -> Iterator[str]:
    yield "| model | format | mode | questions | call | right name | right arguments | lost | refused |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for model, written_in, mode, found in rows:
        shares = (found.num_called, found.num_named, found.num_right)
        called, named, right = (f"{count / found.num_asked:.0%}" for count in shares)
        yield (
            f"| {model} | {written_in} | {mode} | {found.num_asked} | {called} | {named} | {right} | "
            f"{found.num_lost} | {found.num_refused} |"
        )


if __name__ == "__main__":
    sys.exit(main())
