"""Rows that say what a field of a request does: values that are taken, with what must hold of the plan, and values that
are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.api.answer.generation_plan import GenerationPlan
from router.api.fields.fields import FieldTable
from router.api.openai.chat import CHAT
from router.api.openai.completions import COMPLETIONS
from router.api.openai.responses import RESPONSES
from router.http.ignored import LOWERED

Table = FieldTable[Any]
CONTEXT = 1000
GENERATIONS = (CHAT, COMPLETIONS)
Check = Callable[[GenerationPlan], object]


@dataclass(frozen=True)
class Row:
    """`good`: (value, what must hold of the plan). `bad`: refused, naming the field. `extra`: fields sent along."""

    field: str
    good: tuple[tuple[Any, Check], ...] = ()
    bad: tuple[Any, ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()
    kinds: tuple[Table, ...] = GENERATIONS
    param: str = ""


def keeps(seconds: float) -> Check:
    return lambda plan: plan.keep_s == seconds


def marked(ttl: object) -> list[dict[str, Any]]:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": ttl}}
    return [{"role": "user", "content": [part]}]


CACHE_ROWS = (
    Row(
        "prompt_cache_key",
        (("app", lambda plan: plan.session == "app"), (None, lambda plan: not plan.session)),
        (1, "x" * 513),
        kinds=(*GENERATIONS, RESPONSES),
    ),
    Row(
        "prompt_cache_retention",
        (("24h", keeps(86400.0)), ("in_memory", keeps(0.0)), ("in-memory", keeps(0.0)), (None, keeps(0.0))),
        ("1h", "", 24, {"ttl": "24h"}),
        kinds=(*GENERATIONS, RESPONSES),
    ),
    Row("messages", ((marked("5m"), keeps(300.0)), (marked("1h"), keeps(3600.0))), (marked("2h"),), kinds=(CHAT,)),
)


def fills_the_context(plan: GenerationPlan) -> bool:
    return len(plan.jobs[0].ids) + plan.sampling.max_tokens == CONTEXT


def lowered(field: str, value: int) -> Check:
    """The header names the old and the new value."""
    return lambda plan: (
        plan.headers == {LOWERED: f"{field};from={value};to={plan.sampling.max_tokens}".encode()}
        and fills_the_context(plan)
    )


def always(plan: GenerationPlan) -> bool:
    return True


def sampling(name: str, value: Any) -> Check:
    return lambda plan: getattr(plan.sampling, name) == value


def show(name: str, value: Any) -> Check:
    return lambda plan: getattr(plan.show, name) == value


def num_prompt(count: int) -> Check:
    return lambda plan: len(plan.jobs[0].ids) == count


def harmless(*values: Any) -> tuple[tuple[Any, Check], ...]:
    return tuple((value, always) for value in values)


def grammar_with(part: str) -> Check:
    return lambda plan: part in plan.sampling.grammar


def grammar_without(part: str) -> Check:
    return lambda plan: bool(plan.sampling.grammar) and part not in plan.sampling.grammar


def calls(*names: str) -> Check:
    """Which tools the answer may call."""
    return lambda plan: (
        tuple(tool.name for tool in plan.show.form.tools) == names and bool(names) == bool(plan.sampling.grammar)
    )


def prompt_is(text: str) -> Check:
    """HashLM's ids are characters."""
    return lambda plan: prompt_of(plan) == text


def prompt_of(plan: GenerationPlan) -> str:
    return "".join(chr(32 + i) for i in plan.jobs[0].ids)
