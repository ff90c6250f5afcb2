"""Turn a format's row into the grammar of an answer with tools, in llguidance's dialect of Lark.

auto:      text; or text up to a call's beginning, then only calls
required:  only calls
named:     only one call

A thought may precede each answer. If the prompt has opened the thought, the answer must close it first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from router.tools.call_shape import HEAD_SPACES, SPACES, CallRules, Markers, escaped, literal, regex
from router.tools.choice import ChoiceMode, ToolChoice
from router.tools.formats import ToolFormat
from router.tools.reasoning import Thought

TEXT = "/(?s:.*)/"


def tool_grammar(
    row: ToolFormat,
    choice: ToolChoice,
    *,
    allows_parallel: bool = True,
    special_ids: Mapping[str, int] | None = None,
    thought: Thought | None = None,
    has_body: bool = False,
) -> str | None:
    """Return an answer's grammar; None if any text is allowed. Raise InvalidRequest for a tool that can't be called.

    - `special_ids`: markers that are special tokens, which llguidance matches only by id
    - `has_body`: an answer without calls must follow the grammar that `with_body` adds
    """
    if choice.mode is ChoiceMode.NONE or not choice.tools:
        return None
    tags = () if thought is None else (thought.tags.opening, thought.tags.closing)
    markers = Markers(row.markers.union(tags), special_ids or {})
    many = allows_parallel and choice.mode is not ChoiceMode.NAMED
    return _Grammar(row, markers, many, has_body).text(choice, thought)


def behind_thought(grammar: str, thought: Thought, special_ids: Mapping[str, int]) -> str:
    """Put a thought before `grammar`. The thought is required if the prompt has opened it.

    Both `grammar` and the result are llguidance's JSON."""
    markers = Markers(frozenset((thought.tags.opening, thought.tags.closing)), special_ids)
    begin = "thought" if thought.is_open else "thought?"
    rules = {"start": f"{begin} GAP? @body", "GAP": "/[ \\t\\r\\n]{1,4}/", **thought_rules(thought, markers)}
    lark = "\n".join(f"{name}: {rule}" for name, rule in rules.items()) + "\n"
    return with_body(lark, grammar)


def with_body(lark: str, body: str) -> str:
    """Serialize two grammars. `lark` refers to `body` as `@body`."""
    (inner,) = json.loads(body)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**inner, "name": "body"}]})


def thought_rules(thought: Thought, markers: Markers) -> dict[str, str]:
    opening, closing = thought.tags.opening, thought.tags.closing
    rules: dict[str, str] = {}
    if markers.is_special(closing):
        rules["THOUGHT"] = text_without(closing)
        rules["inside"] = f"THOUGHT {markers.rule(closing)}"
    else:
        rules["inside[lazy]"] = f"{TEXT} {literal(closing)}"
    if thought.is_open:
        rules["thought"] = "inside"
    elif markers.is_special(opening):
        rules["thought"] = f"GAP? {markers.rule(opening)} inside"
    else:
        rules["opening[lazy]"] = regex(HEAD_SPACES, escaped(opening))
        rules["thought"] = "opening inside"
    return rules


def text_without(*marks: str) -> str:
    """Return a terminal for text without these marks. Readers can't tell a mark's text from the special token."""
    return " & ".join((TEXT, *(f"~/(?s:.*){escaped(mark)}(?s:.*)/" for mark in marks)))


class _Grammar:
    def __init__(self, row: ToolFormat, markers: Markers, allows_many: bool, has_body: bool) -> None:
        self._row = row
        self._markers = markers
        self._many = allows_many
        self._has_body = has_body
        self._rules: dict[str, str] = {}

    def text(self, choice: ToolChoice, thought: Thought | None) -> str:
        calls = [self._call(index, choice) for index in range(len(choice.tools))]
        self._add_groups(calls)
        if choice.mode is ChoiceMode.AUTO:
            self._add_auto(calls, thought)
        else:
            self._add_required(thought)
        start = self._rules.pop("start")
        return "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **self._rules}.items()) + "\n"

    def _call(self, index: int, choice: ToolChoice) -> CallRules:
        rules = self._row.shape.rules(choice.tools[index], f"t{index}", self._markers)
        self._rules |= rules.rules
        return rules

    def _add_groups(self, calls: Sequence[CallRules]) -> None:
        """The rule `calls` is a group without its first marker."""
        row = self._row
        self._rules["call"] = " | ".join(f"call_{index}" for index in range(len(calls)))
        for index, call in enumerate(calls):
            self._rules[f"rest_{index}"] = call.rest
            self._rules[f"call_{index}"] = f"{regex(SPACES, call.head)} rest_{index}"
        opens = regex(SPACES, escaped(row.opens)) + " " if row.opens else ""
        self._rules["calls"] = f"{opens}call after_call"
        self._rules["group"] = f"({self._begins()}) calls"
        separator = f"({regex(SPACES, escaped(row.separator))} call)* " if row.separator and self._many else ""
        closes = regex(SPACES, escaped(row.closes)) if row.closes else ""
        next_groups = " (GAP? group)*" if self._many and not row.separator else ""
        end = self._end()
        if not (separator or closes or end or next_groups):
            end = '""'
        self._rules["after_call"] = f"{separator}{closes}{end}{next_groups}".strip()
        self._rules["GAP"] = "/[ \\t\\r\\n]{1,4}/"

    def _calls_alone(self) -> str:
        return "calls | group" if self._row.may_begin_bare else "group"

    def _add_required(self, thought: Thought | None) -> None:
        answer = f"GAP? ({self._calls_alone()})"
        if thought is None:
            self._rules["start"] = answer
        else:
            self._add_thought(thought)
            self._rules["start"] = f"thought {answer}" if thought.is_open else f"thought? {answer}"

    def _add_auto(self, calls: Sequence[CallRules], thought: Thought | None) -> None:
        """Free text ends where a call begins, because llguidance prefers a complete lazy rule to text."""
        if self._has_body:
            self._rules["answer"] = f"GAP? ({self._calls_alone()} | @body)"
        else:
            self._add_text(calls)
        if thought is None:
            self._rules["start"] = "answer"
        else:
            self._add_thought(thought)
            self._rules["start"] = "thought answer" if thought.is_open else "thought answer | answer"

    def _add_text(self, calls: Sequence[CallRules]) -> None:
        self._rules["TEXT"] = text_without(*filter(self._markers.is_special, self._row.begins))
        alternatives = ("TEXT", *self._marked_alternatives(), *self._bare_alternatives(calls))
        self._rules["answer"] = " | ".join(alternatives)

    def _marked_alternatives(self) -> Iterator[str]:
        """Yield alternatives of an answer: text, a marker, then calls. Their rules go to `self._rules`."""
        for index, mark in enumerate(self._markers.written(self._row.begins)):
            if self._markers.is_special(mark):
                yield f"TEXT {self._markers.rule(mark)} calls"
            else:
                self._rules[f"begins_{index}[lazy]"] = f"TEXT {literal(mark)}"
                yield f"begins_{index} calls"

    def _bare_alternatives(self, calls: Sequence[CallRules]) -> Iterator[str]:
        """Yield alternatives of an answer: calls without a marker."""
        if not self._row.may_begin_bare:
            return
        opens = escaped(self._row.opens) + HEAD_SPACES if self._row.opens else ""
        for index, call in enumerate(calls):
            self._rules[f"bare_{index}[lazy]"] = regex(HEAD_SPACES, opens, call.head)
            yield f"bare_{index} rest_{index} after_call"

    def _add_thought(self, thought: Thought) -> None:
        self._rules |= thought_rules(thought, self._markers)

    def _begins(self) -> str:
        return " | ".join(map(self._markers.rule, self._markers.written(self._row.begins)))

    def _end(self) -> str:
        is_needed = not self._row.may_begin_bare
        marks = (self._markers.written if is_needed else self._markers.written_if_any)(self._row.ends)
        if not marks:
            return ""
        return f" (GAP? ({' | '.join(map(self._markers.rule, marks))})){'' if is_needed else '?'}"
